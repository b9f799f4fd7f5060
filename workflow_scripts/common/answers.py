"""Answers against the gold one: ROUGE, and the steps that spell it (method, section 2)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenize import tokenize
from transformers import PreTrainedTokenizerBase

PASS_RECALL = 0.5
"""An answer is right if ROUGE-1 recall of the gold answer exceeds this."""

_END_OF_THOUGHT = "</think>"
_START_OF_THOUGHT = "<think>"

# Scripts written without spaces between words, and Hangul, whose words carry their particles: kana,
# CJK ideographs with their extension A and compatibility forms, Hangul syllables.
_UNSPACED = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"
_UNICODE_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


@dataclass(frozen=True)
class Thinking:
    """Where the answer begins in a text that may think first.

    Attributes
    ----------
    answer_start
        Index of the first token that writes after the last closed block; 0 where nothing was
        thought; the number of tokens where a block is still open.
    closed
        False if a block was opened and never closed: the budget went on thinking.
    """

    answer_start: int
    closed: bool


class _UnicodeTokenizer:
    """Splits text that ROUGE's own tokenizer drops whole.

    A character of a script without spaces is a token of its own; letters and digits of any other
    script are joined into case-folded words, which are not stemmed.
    """

    def tokenize(self, text: str) -> list[str]:
        return _UNICODE_WORD.findall(text.casefold())


@lru_cache(maxsize=2)
def _scorer(ascii_words: bool) -> RougeScorer:
    if ascii_words:
        return RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
    return RougeScorer(["rouge1", "rougeL"], tokenizer=_UnicodeTokenizer())


def _scores(gold: str, text: str) -> dict[str, tuple[float, float, float]]:
    # ROUGE keeps only ASCII letters and digits. A gold answer without any (Chinese, Japanese) would
    # score 0 against itself, so it is compared in units of its own script.
    ascii_words = bool(tokenize(gold, None))
    return _scorer(ascii_words).score(gold, text)  # type: ignore[no-any-return]


def rouge1_recall(gold: str, text: str) -> float:
    """Return stemmed ROUGE-1 recall of the gold answer in a text, 0 to 1."""
    return float(_scores(gold, text)["rouge1"][1])


def rouge_l_f1(gold: str, text: str) -> float:
    """Return stemmed ROUGE-L F1 between the gold answer and a text, 0 to 1."""
    return float(_scores(gold, text)["rougeL"][2])


def without_thinking(text: str) -> str:
    """Return what a text says after its last closed <think> block; nothing while one is open."""
    start, _ = _answer_offset(text)
    return text[start:].lstrip() if start else text


def skip_thinking(tokenizer: PreTrainedTokenizerBase, generated_ids: Sequence[int]) -> Thinking:
    """Return where the answer begins behind what the model thought aloud.

    A prompt may have opened the block already, so a closing tag alone ends one too.
    """
    ids = list(generated_ids)
    start, closed = _answer_offset(_decode(tokenizer, ids))
    if start == 0:
        return Thinking(0, closed)
    spans = token_spans(tokenizer, ids)
    first = (step for step, (low, high) in enumerate(spans) if low >= start and high > low)
    return Thinking(next(first, len(ids)), closed)


def _answer_offset(text: str) -> tuple[int, bool]:
    """Return the character at which the answer begins, and whether every block is closed."""
    end = text.rfind(_END_OF_THOUGHT)
    start = 0 if end < 0 else end + len(_END_OF_THOUGHT)
    if _START_OF_THOUGHT in text[start:]:
        return len(text), False
    return start, True


def find_answer_steps(
    tokenizer: PreTrainedTokenizerBase, generated_ids: Sequence[int], answer: str
) -> list[int]:
    """Return the generated steps that spell the gold answer, at its first occurrence.

    First as an exact run of the tokens of the answer, with or without a space before it; else by
    decoded text, ignoring case: every token that overlaps the answer's characters. What stands in a
    <think> block is no answer.

    Parameters
    ----------
    tokenizer
        The model's; called without special tokens.
    generated_ids
        Token ids, without the one that ended the answer.
    answer
        The gold answer.

    Returns
    -------
    list of int
        Ascending indices into `generated_ids`; empty if the answer is not there.
    """
    ids = list(generated_ids)
    first = skip_thinking(tokenizer, ids).answer_start
    runs: list[range] = []
    for variant in (answer, f" {answer}"):
        wanted = tokenizer.encode(variant, add_special_tokens=False)
        for start in range(first, len(ids) - len(wanted) + 1):
            if wanted and ids[start : start + len(wanted)] == wanted:
                runs.append(range(start, start + len(wanted)))
                break
    if runs:
        # Two spellings of one place end together; a space that is a token of its own is no step.
        earliest = min(runs, key=lambda run: (run.stop, len(run)))
        return list(earliest)
    spans = token_spans(tokenizer, ids[first:])
    steps = _steps_by_text(spans, _decode(tokenizer, ids[first:]), answer)
    return [first + step for step in steps]


def token_spans(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return the half-open character span that each token writes in the decoded text.

    Decoded incrementally. An unfinished multi-byte character shows as replacement signs at the end
    of what is decoded so far: characters before them are done, and the token writes a part of the
    one that comes next. So all pieces of a character get its span, and no other token does.
    """
    ids = list(ids)
    spans: list[tuple[int, int]] = []
    done = 0
    for count in range(1, len(ids) + 1):
        text = _decode(tokenizer, ids[:count])
        finished = len(text.rstrip("\ufffd"))
        spans.append((done, finished + (finished < len(text))))
        done = max(done, finished)
    return spans


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    # Cleaning up spaces would shorten text that is already decoded when a token is added.
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _steps_by_text(spans: list[tuple[int, int]], text: str, answer: str) -> list[int]:
    match = re.search(re.escape(answer), text, re.IGNORECASE)
    if not answer or match is None:
        return []
    start, stop = match.span()
    return [step for step, span in enumerate(spans) if max(span[0], start) < min(span[1], stop)]
