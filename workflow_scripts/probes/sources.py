"""A dataset's files and config row, read and checked before any tokenizer or model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from workflow_scripts.common.errors import UserError
from workflow_scripts.common.layout import IN_HAYSTACKS
from workflow_scripts.probes.chat import ChatPrompt, read_chat_prompt
from workflow_scripts.probes.haystacks import Haystack, read_haystacks, sentence_ends
from workflow_scripts.probes.needles import Needle, check_template, read_needles, read_text
from workflow_scripts.probes.sample import SPLITS

_NOT_OF_TEXTS: dict[str, Any] = {
    **dict.fromkeys(("haystacks", "questions", "template", "prompt", "depths")),
    **{"split": "all", "needle": "present", "answer": "generated"},
}
"""Keys of a row that mean nothing to format text, with the value that says nothing."""


@dataclass(frozen=True)
class Sources:
    """A dataset's files, read and checked against its config row; `text` is that of format text."""

    needles: list[Needle]
    haystacks: list[Haystack]
    prompt: ChatPrompt | None = None
    text: str = ""


def check_sources(
    row: Mapping[str, Any],
    needles_path: str | Path,
    haystack_paths: Sequence[str | Path],
    dataset: str = "",
) -> Sources:
    """Read a dataset's files and check all that can be checked without a tokenizer.

    Parameters
    ----------
    row
        The row of `probes:` in the config: format, questions, split, context_lengths, depths, size,
        template, prompt, needle.
    needles_path, haystack_paths
        The files; haystacks only for the formats `IN_HAYSTACKS`.
    dataset
        Name of the row, for messages.

    Raises
    ------
    UserError
        If a file or a value cannot be used, or if a context length is below the number of words of
        a needle, its question and its template (a word is at least one token).
    """
    where = f"probes.{dataset}" if dataset else "probes"
    check_row(row, where)
    if row["format"] == "text":
        text = read_text(Path(needles_path)).strip()
        if not text:
            raise UserError(f"{needles_path}: holds no text; fill it")
        return Sources([], [], text=text)
    prompt = read_chat_prompt(row["prompt"]) if "prompt" in row else None
    template = row.get("template")
    if prompt is not None:
        template = prompt.user
        _check_template(row, template, f"{row['prompt']}: user")
    needles = read_needles(needles_path, row["format"], row.get("questions") or (), template)
    if row["format"] not in IN_HAYSTACKS:
        return Sources(needles, [], prompt)
    if not haystack_paths:
        raise UserError(
            f"{where}.haystacks: format {row['format']} needs one; name a file or folder"
        )
    haystacks = read_haystacks(haystack_paths)
    for haystack in haystacks:
        if not sentence_ends(haystack.text):
            raise UserError(
                f"{haystack.path}: no sentence ends in it, so a needle has no place; end its "
                "sentences with one of . ! ? or the like of its script"
            )
    shortest = min(row["context_lengths"])
    for needle in needles:
        for question in needle.questions:
            words = len(f"{needle.text} {question.text} {needle.template}".split()) - 2
            if shortest < words:
                raise UserError(
                    f"{where}.context_lengths: {shortest} tokens cannot hold needle "
                    f"{needle.needle_id}, its question and the template, {words} words; raise it"
                )
    return Sources(needles, haystacks, prompt)


def refuse_too_long(row: Mapping[str, Any], positions: int, where: str, model: str) -> None:
    """Raise UserError if a prompt of a config row, with its answer, exceeds a model's positions."""
    longest, budget = max(row.get("context_lengths", [0])), _budget(row)
    if longest + budget > positions:
        raise UserError(
            f"{where}.context_lengths: {longest} and the {budget} tokens of an answer "
            f"exceed the {positions} positions of model {model}; lower them"
        )


def refuse_long_questions(
    prompts: pl.DataFrame, row: Mapping[str, Any], positions: int, where: str, model: str
) -> None:
    """Raise UserError if a prompt without a haystack, with its answer, exceeds a model's positions.

    Documents may: their probes are skipped as too long, each by itself.
    """
    if row["format"] in (*IN_HAYSTACKS, "text", "document"):
        return
    probe, longest = max(
        prompts.select("probe_id", "context_length").iter_rows(), key=lambda found: found[1]
    )
    budget = _budget(row)
    if longest + budget > positions:
        raise UserError(
            f"{where}: the {longest} tokens of probe {probe} and the {budget} of an answer exceed "
            f"the {positions} positions of model {model}; take it out of the file, or shorten the prompt"
        )


def _budget(row: Mapping[str, Any]) -> int:
    """Return how many tokens may follow a prompt; none behind a text, which is only read."""
    if row["format"] == "text":
        return 0
    budget: int = row["max_new_tokens"] + row["max_thinking_tokens"]
    return budget


def check_row(row: Mapping[str, Any], where: str) -> None:
    """Raise UserError if a value of a config row is out of range; types are for the schema."""
    if row.get("split", "all") not in SPLITS:
        raise UserError(f"{where}.split: '{row['split']}' is none of {', '.join(SPLITS)}")
    if row.get("size") is not None and row["size"] < 1:
        raise UserError(
            f"{where}.size: {row['size']} probes; ask for at least 1, or leave size out"
        )
    if row.get("needle", "present") not in ("present", "removed"):
        raise UserError(f"{where}.needle: '{row['needle']}' is neither present nor removed")
    if row.get("template") is not None:
        if "prompt" in row:
            raise UserError(
                f"{where}.prompt: stands beside template, and both word the question; remove one"
            )
        _check_template(row, row["template"], f"{where}.template")
    is_text = row["format"] == "text"
    if is_text:
        for name, default in _NOT_OF_TEXTS.items():
            if row.get(name, default) != default:
                raise UserError(f"{where}.{name}: means nothing to format text; remove it")
    elif row["format"] not in IN_HAYSTACKS:
        return
    for name in ("context_lengths",) if is_text else ("context_lengths", "depths"):
        if not row.get(name):
            raise UserError(
                f"{where}.{name}: names none; format {row['format']} needs at least one"
            )
        if len(set(row[name])) < len(row[name]):
            raise UserError(f"{where}.{name}: names a value twice; remove one")
    for depth in row.get("depths", ()):
        if not 0 <= depth <= 100:
            raise UserError(f"{where}.depths: {depth} is no percentage; use 0 to 100")
    # A token of a text is read given one before it.
    least = 2 if is_text else 1
    for length in row["context_lengths"]:
        if length < least:
            raise UserError(
                f"{where}.context_lengths: {length} tokens are too few; use {least} or more"
            )


def _check_template(row: Mapping[str, Any], template: str, where: str) -> None:
    with_text = row["format"] in (*IN_HAYSTACKS, "document")
    check_template(template, where, needs_haystack=with_text)
