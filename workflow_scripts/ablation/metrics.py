"""How good an answer is (method, section 4)."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from workflow_scripts.common.answers import rouge1_recall, rouge_l_f1

METRICS = (
    "accuracy",
    "rouge_l_f1",
    "rouge1_recall",
    "contains",
    "exact_match",
    "empty",
    "other_character",
    "length",
)
"""Names of the metrics, in the order of the tables; all 0 to 1 but length, in tokens."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANSWER_TAG = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)


def measure(
    text: str,
    n_tokens: int,
    answer: str,
    aliases: Sequence[str] = (),
    other_answers: Sequence[str] = (),
) -> dict[str, float]:
    """Return every metric of one answer.

    Parameters
    ----------
    text
        The generated answer.
    n_tokens
        Its length in tokens, without the one that ended it.
    answer, aliases
        The gold answer and what else is accepted; the best match counts.
    other_answers
        What would have been wrong: the other characters of the set.

    Returns
    -------
    dict
        By the names of `METRICS`. An accuracy of exactly 0 is explained by `empty` and
        `other_character`: an immediate newline and a wrong name are different failures.
    """
    golds = [answer, *aliases]
    recall = max(rouge1_recall(gold, text) for gold in golds)
    folded = text.casefold()
    named = any(_names(folded, other) for other in other_answers)
    return {
        "accuracy": float(recall > 0.5),
        "rouge_l_f1": max(rouge_l_f1(gold, text) for gold in golds),
        "rouge1_recall": recall,
        "contains": float(any(gold.casefold() in folded for gold in golds)),
        "exact_match": float(normalise(_tagged(text)) in {normalise(gold) for gold in golds}),
        "empty": float(not text.strip()),
        "other_character": float(named and recall <= 0.5),
        "length": float(n_tokens),
    }


def normalise(text: str) -> str:
    """Return a text without case, punctuation, articles and surplus space (SQuAD's rule)."""
    bare = _ARTICLES.sub(" ", text.casefold().translate(_PUNCTUATION))
    return " ".join(bare.split())


def _tagged(text: str) -> str:
    """Return what stands in the last <answer> tag, or the whole text where there is none."""
    found = _ANSWER_TAG.findall(text)
    return found[-1] if found else text


def _names(folded: str, other: str) -> bool:
    """Return whether a text names someone, as a word of its own where the script has words."""
    wanted = re.escape(other.casefold())
    if other.isascii():
        wanted = rf"\b{wanted}\b"
    return re.search(wanted, folded) is not None
