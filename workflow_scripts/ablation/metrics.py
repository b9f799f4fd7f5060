"""How good an answer is (method, section 4)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from workflow_scripts.common.answers import (
    PASS_RECALL,
    rouge1_recall,
    rouge_l_f1,
    without_thinking,
)

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
"""Names of the metrics of an answer, in the order of the tables; all 0 to 1 but length, in tokens."""

LOSS = "loss"
"""The one metric of a text that is read: mean cross-entropy of a token in nats. Lower is better."""

_VERDICTS = ("accuracy", "contains", "exact_match")

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = "PS"  # first letters of Unicode's categories of punctuation and symbols
# A sign before a number and a point inside one belong to its value.
_NUMBER_SIGN = re.compile(r"(?<!\w)[-\u2212](?=\d)|(?<=\d)\.(?=\d)")
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
        The generated answer; what stands in a <think> block is left out.
    n_tokens
        Its length in tokens, without the one that ended it.
    answer, aliases
        The gold answer and what else is accepted; the best match counts. Blank ones match nothing.
    other_answers
        What would have been wrong: the other characters of the set.

    Returns
    -------
    dict
        By the names of `METRICS`. `accuracy` is 1 for a ROUGE-1 recall above 0.5; `contains` is
        NoLiMa's own measure, the gold answer as a part of the text; `exact_match` compares the last
        <answer> tag, or the whole text where there is none. An accuracy of exactly 0 is explained by
        `empty` and `other_character` (an answer that is not right and names another character): an
        immediate newline and a wrong name are different failures.
    """
    said = without_thinking(text)
    golds = [gold for gold in (answer, *aliases) if gold.strip()]
    recall = max((rouge1_recall(gold, said) for gold in golds), default=0.0)
    right = recall > PASS_RECALL
    folded = said.casefold()
    return {
        "accuracy": float(right),
        "rouge_l_f1": max((rouge_l_f1(gold, said) for gold in golds), default=0.0),
        "rouge1_recall": recall,
        "contains": float(any(gold.casefold() in folded for gold in golds)),
        "exact_match": float(normalise(_tagged(said)) in {normalise(gold) for gold in golds}),
        "empty": float(not said.strip()),
        "other_character": float(not right and any(_names(folded, o) for o in other_answers)),
        "length": float(n_tokens),
    }


def verdict_of(metric: str) -> str:
    """Return the metric that says whether an answer is right, for a task judged by a metric.

    That is the metric itself where it says so; else, as for ROUGE, accuracy.
    """
    return metric if metric in _VERDICTS else "accuracy"


def normalise(text: str) -> str:
    """Return a text without case, punctuation, articles and surplus space (SQuAD's rule).

    Unlike there, punctuation of every script goes, and a minus sign before a number and a decimal
    point stay: -3 is not 3.
    """
    folded = text.casefold()
    kept = {match.start() for match in _NUMBER_SIGN.finditer(folded)}
    bare = "".join(
        letter
        for place, letter in enumerate(folded)
        if place in kept or unicodedata.category(letter)[0] not in _PUNCTUATION
    )
    return " ".join(_ARTICLES.sub(" ", bare.replace("\u2212", "-")).split())


def _tagged(text: str) -> str:
    """Return what stands in the last <answer> tag, or the whole text where there is none."""
    found = _ANSWER_TAG.findall(text)
    return str(found[-1]) if found else text


def _names(folded: str, other: str) -> bool:
    """Return whether a text names someone, as a word of its own where the script has words."""
    wanted = re.escape(other.casefold())
    if other.isascii():
        wanted = rf"\b{wanted}\b"
    return bool(other.strip()) and re.search(wanted, folded) is not None
