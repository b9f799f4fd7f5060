"""Probes through the model: generate, gate, and read the answer's rows into a shard's arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from workflow_scripts.activations.score_block import WINDOW, Answer, Capture, score_block
from workflow_scripts.common.answers import (
    PASS_RECALL,
    find_answer_steps,
    rouge1_recall,
)
from workflow_scripts.common.decoding import (
    Conditions,
    Generation,
    Group,
    PrefixRunner,
    decode_greedily,
    halve_on_out_of_memory,
    opens_thought,
    plan_batches,
    prefill_batch,
)
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.models import LanguageModel
from workflow_scripts.common.shards import REGIONS

_PROBE_COLUMNS = (
    "probe_id needle_id haystack_id question_type context_length depth_percent answer needle_start "
    "needle_end real_needle_start real_needle_end haystack_start haystack_end question_start "
    "question_end has_bos input_ids"
).split()

Probe = dict[str, Any]


@dataclass
class ProbeResult:
    """What became of a probe; `capture` is None where the model did not run on it.

    `generation` holds the gold answer's tokens where these were forced.
    """

    status: str
    generation: Generation
    text: str = ""
    recall: float = 0.0
    answer_steps: Sequence[int] = ()
    capture: Capture | None = None


@torch.inference_mode()
def capture_probes(
    lm: LanguageModel,
    probes: pl.DataFrame,
    *,
    directions: list[str],
    batch_tokens: int,
    max_length: int,
    progress: Callable[[int], object],
) -> list[ProbeResult]:
    """Generate an answer to every probe, or force the gold one, and read its rows.

    Parameters
    ----------
    probes
        Rows of the probes table, in an order in which neighbours share prefixes.
    directions
        Names of directions in the residual stream, see `activations/directions.py`.
    batch_tokens
        Bound on probes times tokens that run at once.
    max_length
        Most positions the model was made for.
    progress
        Called with the number of probes done.
    """
    rows = probes.to_dicts()
    results: list[ProbeResult | None] = [None] * len(rows)
    fitting = []
    for index, row in enumerate(rows):
        budget = row["max_new_tokens"] + row["max_thinking_tokens"]
        if len(row["input_ids"]) + budget > max_length:
            results[index] = ProbeResult("too_long", Generation([], False))
        else:
            fitting.append(index)
    prompts = [rows[index]["input_ids"] for index in fitting]
    runner = PrefixRunner(lm, Conditions.unchanged())

    def run(batch: list[Group]) -> None:
        members = [fitting[i] for group in batch for i in group.members]
        batch_rows = [rows[i] for i in members]
        done = _capture_batch(lm, runner, prompts, batch, batch_rows, directions)
        for index, result in zip(members, done, strict=True):
            results[index] = result
        progress(len(members))

    def give_up(prompt: int) -> None:
        results[fitting[prompt]] = ProbeResult("out_of_memory", Generation([], False))
        progress(1)

    for batch in plan_batches(prompts, tokens=batch_tokens):
        halve_on_out_of_memory(prompts, batch, run, give_up)
    return [result for result in results if result is not None]


def _capture_batch(
    lm: LanguageModel,
    runner: PrefixRunner,
    prompts: Sequence[Sequence[int]],
    batch: list[Group],
    rows: list[Probe],
    directions: list[str],
) -> list[ProbeResult]:
    """Prefill, decode, and run one block forward over the answers' rows on the same cache."""
    cache, logits = prefill_batch(runner, prompts, batch)
    if _forced(rows[0]):  # a dataset forces all its answers or none
        generations = [Generation(row["forced_ids"], stopped=True) for row in rows]
    else:
        generations = decode_greedily(
            lm,
            cache,
            logits,
            max(row["max_new_tokens"] for row in rows),
            thinking=[opens_thought(lm, row["input_ids"]) for row in rows],
            max_thinking_tokens=max(row["max_thinking_tokens"] for row in rows),
            conditions=runner.conditions,
            drop_finished=False,
        )
    prompt = len(rows[0]["input_ids"])
    cache.crop(prompt - min(WINDOW, prompt) - cache.get_seq_length())
    answers = [_answer(lm, row, gen) for row, gen in zip(rows, generations, strict=True)]
    captures = score_block(lm, cache, answers, directions)
    return [_judge(lm, *parts) for parts in zip(rows, generations, answers, captures, strict=True)]


def _forced(row: Probe) -> bool:
    return row["forced_ids"] is not None


def _answer(lm: LanguageModel, row: Probe, generation: Generation) -> Answer:
    needle = None
    if row["needle_start"] is not None:
        needle = (row["needle_start"], row["needle_end"])
    if _forced(row):
        steps = list(range(len(generation.ids)))
    else:
        said = generation.answer_ids
        found = find_answer_steps(lm.tokenizer, said, row["answer"]) if row["answer"] else []
        if row["question_type"] == "document" and not found:
            # Of a user's document it is the answer given that is traced, whatever was expected.
            found = list(range(len(said)))
        steps = [generation.thinking + step for step in found]
    return Answer(
        row["input_ids"], generation.ids, steps, regions_of(row), needle, generation.thinking
    )


def _judge(
    lm: LanguageModel, row: Probe, generation: Generation, answer: Answer, capture: Capture
) -> ProbeResult:
    """Give a probe its status: the gate of the method, and what kept it from passing."""
    text = lm.decode(generation.ids, skip_special_tokens=True)
    said = lm.decode(generation.answer_ids, skip_special_tokens=True)
    recall = rouge1_recall(row["answer"], said) if row["answer"] else 0.0
    if _forced(row):
        status = "forced"
    elif not capture.reproduced:
        status = "mismatch"
    elif not generation.closed:
        status = "unclosed_thinking"
    elif not row["answer"]:
        status = "answered" if generation.stopped else "truncated"
    elif recall > PASS_RECALL:
        status = "passed" if answer.answer_steps else "no_answer_step"
    else:
        status = "wrong" if generation.stopped else "truncated"
    return ProbeResult(status, generation, text, recall, answer.answer_steps, capture)


def regions_of(row: Probe) -> NDArray[np.int64]:
    """Return the region of each prompt position, as indices into `REGIONS`."""
    regions = np.full(len(row["input_ids"]), REGIONS.index("template"), np.int64)
    # The needle lies inside the haystack's span, so it is painted after it.
    for name in ("haystack", "question", "needle"):
        if row[f"{name}_start"] is not None:
            regions[row[f"{name}_start"] : row[f"{name}_end"]] = REGIONS.index(name)
    if row["has_bos"]:
        regions[0] = REGIONS.index("bos")
    return regions


def shard_arrays(results: list[ProbeResult]) -> dict[str, NDArray[Any]]:
    """Join the captures of a shard into the arrays of the shard contract (`common/shards.py`)."""
    captured = [(i, r, r.capture) for i, r in enumerate(results) if r.capture is not None]
    if not captured:
        return {}
    arrays: dict[str, NDArray[Any]] = {}

    def join(name: str, parts: list[Any], axis: int = 0) -> None:
        arrays[name] = np.concatenate(parts, axis)

    join("step_probe", [np.full(len(c.step), i, np.int32) for i, _, c in captured])
    for name, attribute in (
        ("step_index", "step"),
        ("step_token", "token"),
        ("step_logprob", "logprob"),
        ("step_length", "length"),
        ("step_u_norm", "u_norm"),
        ("argmax", "argmax"),
        ("top10_in_needle", "top10_in_needle"),
        ("topn_needle_alpha", "topn_needle_alpha"),
    ):
        join(name, [getattr(c, attribute) for _, _, c in captured])
    join("step_is_answer", [np.isin(c.step, r.answer_steps) for _, r, c in captured])
    for name in captured[0][2].by_region:
        join(f"{name}_by_region", [c.by_region[name] for _, _, c in captured])
    for name in captured[0][2].peak:
        join(f"peak_{name}", [c.peak[name] for _, _, c in captured])

    dense = [(i, c, np.isin(c.step, r.answer_steps)) for i, r, c in captured]
    join("row_probe", [np.full(keep.sum(), i, np.int32) for i, _, keep in dense])
    for name, attribute in (
        ("row_step", "step"),
        ("row_token", "token"),
        ("row_logprob", "logprob"),
        ("row_length", "length"),
        ("row_u_norm", "u_norm"),
    ):
        join(name, [getattr(c, attribute)[keep] for _, c, keep in dense])
    lengths = arrays["row_length"].astype(np.int64)
    arrays["row_offset"] = np.cumsum(lengths) - lengths
    for name in captured[0][2].dense:
        join(name, [c.dense[name] for _, _, c in captured], axis=2)
    return arrays


def region_lengths(results: list[ProbeResult], probes: pl.DataFrame) -> NDArray[np.int32]:
    """Return how many key positions of each region each step sees, int32, (steps, regions)."""
    parts = []
    for row, result in zip(probes.to_dicts(), results, strict=True):
        if result.capture is None:
            continue
        regions = regions_of(row)
        for length in result.capture.length:
            counts = np.bincount(regions[:length], minlength=len(REGIONS))
            counts[REGIONS.index("generated")] += max(0, length - len(regions))
            parts.append(counts)
    return np.asarray(parts, np.int32).reshape(-1, len(REGIONS))


def probe_records(results: list[ProbeResult], probes: pl.DataFrame) -> list[Probe]:
    """Return the per-probe attributes of a shard."""
    return [
        {name: row[name] for name in _PROBE_COLUMNS}
        | {
            "generated_ids": result.generation.ids,
            "generated_text": result.text,
            "rouge1_recall": result.recall,
            "status": result.status,
            "answer_steps": list(result.answer_steps),
            "passed": result.status == "passed",
        }
        for row, result in zip(probes.to_dicts(), results, strict=True)
    ]


def token_texts(
    lm: LanguageModel, results: list[ProbeResult], probes: pl.DataFrame
) -> dict[str, str]:
    """Return the text of every needle and generated token id, by its decimal string.

    With it, detectors can compare tokens by their text without a tokenizer.
    """
    ids = {token for result in results for token in result.generation.ids}
    spans = probes.select("input_ids", "needle_start", "needle_end").iter_rows()
    for prompt, start, stop in spans:
        ids.update(prompt[start:stop] if start is not None else [])
    return {str(token): lm.decode([token]) for token in sorted(ids)}


def refuse_mostly_skipped(results: list[ProbeResult], max_skipped: float, name: str) -> None:
    """Raise UserError if more than a share of a shard's probes could not be run."""
    skipped = Counter(r.status for r in results if r.status in ("too_long", "out_of_memory"))
    if skipped.total() > max_skipped * len(results):
        counts = ", ".join(f"{status} {count}" for status, count in sorted(skipped.items()))
        raise UserError(
            f"{name}: {skipped.total()} of {len(results)} probes could not be run ({counts}), more "
            f"than max_skipped = {max_skipped}; shorten context_lengths or use a larger device"
        )
