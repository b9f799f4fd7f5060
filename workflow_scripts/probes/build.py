"""Needles, haystacks and a config row become the table of probes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from transformers import PreTrainedTokenizerBase

from workflow_scripts.common.errors import UserError
from workflow_scripts.probes.compose import (
    Frame,
    Prompt,
    TokenHaystack,
    answer_ids,
    compose,
    compose_document,
    compose_question,
    cut_text,
    longest_needle,
    make_frame,
    question_ids,
    tokenize_haystack,
)
from workflow_scripts.probes.needles import Needle
from workflow_scripts.probes.prompts import Encoder, before_text, chat_wrapper
from workflow_scripts.probes.sample import (
    Cell,
    assign_answers,
    sample_cells,
    split_characters,
    split_pairs,
)
from workflow_scripts.probes.sources import Sources, check_sources

DEFAULT_SEED = 42
DEFAULT_MAX_NEW_TOKENS = 50
DEFAULT_MAX_THINKING_TOKENS = 0

SCHEMA: dict[str, Any] = {
    "probe_id": pl.String,
    "dataset": pl.String,
    "split": pl.String,
    "needle_id": pl.String,
    "haystack_id": pl.String,
    "question": pl.String,
    "question_type": pl.String,
    "answer": pl.String,
    "aliases": pl.List(pl.String),
    "other_answers": pl.List(pl.String),
    "context_length": pl.Int32,
    "depth_percent": pl.Float32,
    "input_ids": pl.List(pl.Int32),
    "needle_start": pl.Int32,
    "needle_end": pl.Int32,
    "real_needle_start": pl.Int32,
    "real_needle_end": pl.Int32,
    "haystack_start": pl.Int32,
    "haystack_end": pl.Int32,
    "question_start": pl.Int32,
    "question_end": pl.Int32,
    "has_bos": pl.Boolean,
    "max_new_tokens": pl.Int32,
    "forced_ids": pl.List(pl.Int32),
    "max_thinking_tokens": pl.Int32,
    "seed": pl.Int64,
}
"""Columns of a probes table.

Spans are half-open token spans, null for what is not in a prompt; of a removed needle they are those of
the filler in its place. `forced_ids` are the gold answer's tokens, null where the model answers itself.
`answer` is null where a document's answer is not known. Of a text there are the ids alone: nothing is
asked about it.
"""


def build_probes(
    tokenizer: PreTrainedTokenizerBase,
    dataset: str,
    row: Mapping[str, Any],
    needles_path: str | Path,
    haystack_paths: Sequence[str | Path],
    *,
    model: str = "",
    default_seed: int = DEFAULT_SEED,
) -> pl.DataFrame:
    """Build the probes of a dataset for a tokenizer.

    Parameters
    ----------
    tokenizer
        The model's.
    dataset, row
        Name and content of a row of `probes:` in the config.
    needles_path, haystack_paths
        Its files.
    model
        The model's name, for messages.
    default_seed
        Seed of the sample where the row names none. Splits hang on no seed, so that they are
        disjoint between datasets of different seeds.

    Returns
    -------
    polars.DataFrame
        Columns of `SCHEMA`, sorted by haystack, context length, depth and needle: probes that share
        a prefix stand together.

    Raises
    ------
    UserError
        If files or row cannot be used, or a context length cannot hold needle, question and
        wrapper.
    """
    sources = check_sources(row, needles_path, haystack_paths, dataset)
    seed = row.get("seed", default_seed)
    encoder = Encoder(tokenizer, model or str(tokenizer.name_or_path))
    if row["format"] == "text":
        return _pieces(encoder, sources.text, dataset, row, seed)
    split = row.get("split", "all")
    cells = _cells(sources, row, seed, f"probes.{dataset}")
    characters = split_characters(sources.needles, split)
    answers = assign_answers(cells, characters, seed, f"probes.{dataset}")
    composer = _Composer(encoder, sources, row, f"probes.{dataset}")
    prompts = composer.compose(cells, answers)
    shared = {
        "dataset": dataset,
        "split": split,
        "has_bos": composer.has_bos,
        "max_new_tokens": row.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        "forced_ids": None,
        "max_thinking_tokens": row.get("max_thinking_tokens", DEFAULT_MAX_THINKING_TOKENS),
        "seed": seed,
    }
    rows = []
    for cell, answer, prompt in zip(cells, answers, prompts, strict=True):
        record = _record(cell, answer, prompt) | shared
        if row.get("answer") == "gold":
            forced = list(answer_ids(encoder, int(prompt.input_ids[-1]), answer))
            record |= {"forced_ids": forced, "max_new_tokens": len(forced)}
        rows.append(record)
    return pl.DataFrame(rows, schema=SCHEMA).sort(
        "haystack_id", "context_length", "depth_percent", "needle_id", "probe_id", nulls_last=True
    )


def _pieces(
    encoder: Encoder, text: str, dataset: str, row: Mapping[str, Any], seed: int
) -> pl.DataFrame:
    """Return a sample of a text's pieces of every context length, in the order of the text."""
    rows = [
        {
            "probe_id": f"{length}/{number:04d}",
            "dataset": dataset,
            "split": "all",
            "needle_id": f"T{number:04d}",
            "question_type": "text",
            "aliases": [],
            "other_answers": [],
            "context_length": length,
            "input_ids": ids,
            "has_bos": bool(before_text(encoder)),
            "max_new_tokens": 0,
            "max_thinking_tokens": 0,
            "seed": seed,
        }
        for length in sorted(row["context_lengths"])
        for number, ids in enumerate(cut_text(encoder, text, length), 1)
    ]
    size = row.get("size", len(rows))
    if not rows or size > len(rows):
        raise UserError(
            f"probes.{dataset}.size: {size} pieces asked for, but the text makes {len(rows)}; lower "
            "size or context_lengths, or lengthen the text"
        )
    chosen = np.random.default_rng(seed).permutation(len(rows))[:size]
    return pl.DataFrame([rows[i] for i in sorted(chosen)], schema=SCHEMA)


class _Composer:
    """Composes prompts; template frames and haystacks are tokenised once each."""

    def __init__(
        self, encoder: Encoder, sources: Sources, row: Mapping[str, Any], where: str
    ) -> None:
        self._encoder = encoder
        self._wrapper = chat_wrapper(encoder, sources.prompt)
        self._texts = {haystack.haystack_id: haystack for haystack in sources.haystacks}
        self._removed = row.get("needle") == "removed"
        self._where = where
        self._frames: dict[str, Frame] = {}
        self._haystacks: dict[tuple[str, bool], TokenHaystack] = {}
        self.has_bos = self._wrapper.has_bos

    def compose(self, cells: Sequence[Cell], answers: Sequence[str]) -> list[Prompt]:
        """Compose a prompt for each cell and answer."""
        # One length for all, so that the place of a depth hangs on no needle or question.
        reserved = self._reserve(cells, answers)
        return [
            self._prompt(cell, answer, reserved)
            for cell, answer in zip(cells, answers, strict=True)
        ]

    def _reserve(self, cells: Sequence[Cell], answers: Sequence[str]) -> int:
        """Return the most tokens that any prompt has besides its haystack.

        Raises
        ------
        UserError
            If a context length has no room for more.
        """
        most = 0
        for cell, answer in zip(cells, answers, strict=True):
            if cell.context_length is None:
                continue
            frame = self._frame(cell.needle)
            length = frame.length + len(question_ids(self._encoder, frame, cell.question.text))
            length += longest_needle(self._encoder, cell.needle.sentence(answer))
            if cell.context_length <= length:
                raise UserError(
                    f"{self._where}.context_lengths: {cell.context_length} tokens cannot hold "
                    f"needle {cell.needle.needle_id}, its question, the template and a haystack; "
                    f"at least {length + 1} are needed"
                )
            most = max(most, length)
        return most

    def _prompt(self, cell: Cell, answer: str, reserved: int) -> Prompt:
        encoder, needle, frame = self._encoder, cell.needle, self._frame(cell.needle)
        if needle.document is not None:
            return compose_document(encoder, frame, needle.document, cell.question.text)
        if cell.haystack_id is None or cell.context_length is None or cell.depth_percent is None:
            return compose_question(encoder, frame, cell.question.text)
        haystack = self._haystack(cell.haystack_id, frame.haystack_space)
        room = max(0, cell.context_length - reserved)
        return compose(
            encoder,
            frame,
            haystack,
            cell.question.text,
            cell.context_length,
            haystack.place(cell.depth_percent, room),
            needle.sentence(answer),
            needle.real_needle,
            removed=self._removed,
        )

    def _frame(self, needle: Needle) -> Frame:
        if needle.template not in self._frames:
            frame = make_frame(self._encoder, self._wrapper, needle.template)
            self._frames[needle.template] = frame
        return self._frames[needle.template]

    def _haystack(self, haystack_id: str, space_before: bool) -> TokenHaystack:
        key = (haystack_id, space_before)
        if key not in self._haystacks:
            text = self._texts[haystack_id]
            self._haystacks[key] = tokenize_haystack(self._encoder, text, space_before=space_before)
        return self._haystacks[key]


def _cells(sources: Sources, row: Mapping[str, Any], seed: int, where: str) -> list[Cell]:
    pairs = split_pairs(
        sources.needles,
        [haystack.haystack_id for haystack in sources.haystacks],
        row.get("split", "all"),
        one_each=row["format"] == "niah",
    )
    if not pairs:
        raise UserError(
            f"{where}.split: too few needles for a {row['split']} split; add needles, or set all"
        )
    return sample_cells(
        pairs, row.get("context_lengths", ()), row.get("depths", ()), row.get("size"), seed
    )


def _record(cell: Cell, answer: str, prompt: Prompt) -> dict[str, Any]:
    needle = cell.needle
    record: dict[str, Any] = {
        "probe_id": _probe_id(cell, answer),
        "needle_id": needle.needle_id,
        "haystack_id": cell.haystack_id,
        "question": cell.question.text,
        "question_type": cell.question.kind,
        "answer": answer or None,
        "aliases": list(needle.aliases),
        "other_answers": [name for name in needle.answers if name != answer],
        "context_length": len(prompt.input_ids),
        "depth_percent": cell.depth_percent,
        "input_ids": prompt.input_ids,
    }
    for name in ("needle", "real_needle", "haystack", "question"):
        record[f"{name}_start"], record[f"{name}_end"] = getattr(prompt, name) or (None, None)
    return record


def _probe_id(cell: Cell, answer: str) -> str:
    parts = [cell.needle.needle_id]
    if cell.haystack_id is not None:
        parts += [
            cell.question.kind,
            cell.haystack_id,
            str(cell.context_length),
            f"{cell.depth_percent:g}",
        ]
    if cell.needle.has_characters:
        parts.append(re.sub(r"\s+", "-", answer))
    return "/".join(parts)
