"""Generated answers against the gold one: ROUGE, and the steps that spell it (method, section 2)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenize import tokenize
from transformers import PreTrainedTokenizerBase


class _CharacterTokenizer:
    """Splits text that ROUGE's own tokenizer would drop whole: every letter is a token."""

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"[^\W_]", text.casefold())


@lru_cache(maxsize=2)
def _scorer(by_character: bool) -> RougeScorer:
    if by_character:
        return RougeScorer(["rouge1", "rougeL"], tokenizer=_CharacterTokenizer())
    return RougeScorer(["rouge1", "rougeL"], use_stemmer=True)


def _scores(gold: str, text: str) -> dict[str, tuple[float, float, float]]:
    # ROUGE keeps only ASCII words; a gold answer without any (Chinese, Japanese) is compared by
    # characters instead.
    by_character = not tokenize(gold, None)
    return _scorer(by_character).score(gold, text)  # type: ignore[no-any-return]


def rouge1_recall(gold: str, text: str) -> float:
    """Return stemmed ROUGE-1 recall of the gold answer in a text, 0 to 1."""
    return float(_scores(gold, text)["rouge1"][1])


def rouge_l_f1(gold: str, text: str) -> float:
    """Return stemmed ROUGE-L F1 between the gold answer and a text, 0 to 1."""
    return float(_scores(gold, text)["rougeL"][2])


def find_answer_steps(
    tokenizer: PreTrainedTokenizerBase, generated_ids: Sequence[int], answer: str
) -> list[int]:
    """Return the generated steps that spell the gold answer, at its first occurrence.

    First as an exact run of the tokens of the answer, with or without a space before it; else by
    decoded text, ignoring case: every token that overlaps the answer's characters.

    Returns
    -------
    list of int
        Ascending indices into `generated_ids`; empty if the answer is not there.
    """
    ids = list(generated_ids)
    for variant in (answer, f" {answer}"):
        wanted = tokenizer.encode(variant, add_special_tokens=False)
        for start in range(len(ids) - len(wanted) + 1):
            if wanted and ids[start : start + len(wanted)] == wanted:
                return list(range(start, start + len(wanted)))
    return _steps_by_text(token_spans(tokenizer, ids), str(tokenizer.decode(ids)), answer)


def token_spans(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return the half-open character span that each token writes in the decoded text.

    Decoded incrementally: a piece of a multi-byte character shows as a replacement sign until its
    last piece comes, so all its pieces get the span of the finished character.
    """
    spans: list[tuple[int, int]] = []
    pending = done = 0
    for count in range(1, len(ids) + 1):
        text = str(tokenizer.decode(list(ids[:count])))
        if text.endswith("\ufffd") and count < len(ids):
            pending += 1
            continue
        spans += [(done, len(text))] * (pending + 1)
        pending, done = 0, len(text)
    return spans


def _steps_by_text(spans: list[tuple[int, int]], text: str, answer: str) -> list[int]:
    match = re.search(re.escape(answer), text, re.IGNORECASE)
    if not answer or match is None:
        return []
    start, stop = match.span()
    return [step for step, (low, high) in enumerate(spans) if low < stop and high > start]
