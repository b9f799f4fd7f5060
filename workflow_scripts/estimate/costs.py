"""FLOPs, device memory and bytes on disk of the workflow's stages; docs/speed.md derives them.

A multiplication and an addition are two FLOPs. Attention is counted over all keys that a chunk of the
prompt is multiplied with, masked or not, because that is what runs. What shared prefixes and trunks
save depends on the probes and the heads; it is not subtracted, so the figures are upper bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workflow_scripts.ablation.losses import LOGIT_TOKENS
from workflow_scripts.activations.score_block import WINDOW
from workflow_scripts.common.decoding import CHUNK_TOKENS
from workflow_scripts.estimate.shapes import Shape

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

CELL_BYTES = 1.23
"""Of a rounded and compressed dense cell, measured on SmolLM2 at 256 tokens (benchmarks/report.md)."""

STEP_PACKING = 0.57
"""Compressed share of the exact sums of a step, measured likewise."""

ANSWER_TOKENS = 4
"""Tokens of a gold answer where the config alone is known: a name."""


@dataclass(frozen=True)
class Stage:
    """What a stage of the workflow costs on one model.

    Attributes
    ----------
    name
        Rule and dataset.
    flops
        Of prefill and block forwards, and of decoding.
    steps
        Decoding steps; each reads all weights once.
    device_bytes
        Peak beside the weights.
    disk_bytes
        What it leaves in the store.
    """

    name: str
    flops: float
    steps: int = 0
    device_bytes: int = 0
    disk_bytes: int = 0


def forward_flops(shape: Shape, tokens: int, held: int, logits: int) -> int:
    """Return the FLOPs of running tokens behind `held` ones, in chunks, with logits of the last few."""
    total = 2 * shape.width * shape.vocabulary * logits
    for start in range(0, tokens, CHUNK_TOKENS):
        chunk = min(CHUNK_TOKENS, tokens - start)
        attention = 4 * shape.heads * shape.head_dim * chunk * (held + start + chunk)
        layer = 2 * shape.layer_weights_used() * chunk + attention
        # Chunks before the last one end at the last layer's keys and values.
        ended = start + chunk < tokens
        total += (shape.layers - ended) * layer + ended * 2 * shape.input_weights * chunk
    return total


def answer_flops(shape: Shape, prompt: int, generated: int) -> int:
    """Return the FLOPs of reading a prompt and generating an answer token by token."""
    decoding = sum(forward_flops(shape, 1, prompt + t, 1) for t in range(generated))
    return forward_flops(shape, prompt, 0, 1) + decoding


def capture_flops(shape: Shape, prompt: int, generated: int) -> int:
    """Return the FLOPs of capturing a probe: its answer, and the block forward over the scored rows."""
    rows = WINDOW - 1 + max(1, generated)
    block = forward_flops(shape, rows, prompt - WINDOW, max(1, generated))
    return answer_flops(shape, prompt, generated) + block


def cache_bytes(shape: Shape, positions: int, dtype: str) -> int:
    """Return the size of keys and values."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * positions * BYTES[dtype]


def batch_bytes(shape: Shape, rows: int, positions: int, dtype: str) -> int:
    """Return the device memory of a batch: cache and kept prefix, a chunk's activations, logits."""
    chunk = rows * min(CHUNK_TOKENS, positions)
    wide = 3 * shape.mlp * shape.active_experts + 4 * shape.width
    logits = rows * shape.vocabulary * (4 + BYTES[dtype])
    return cache_bytes(shape, (rows + 1) * positions, dtype) + chunk * wide * BYTES[dtype] + logits


def reading_bytes(shape: Shape, rows: int, positions: int, generated: int, planes: int) -> int:
    """Return what capture adds: the scored rows' weights and contributions of one layer, float32.

    Logits, softmax, contributions of each direction and the needle's copy are alive together.
    """
    cells = rows * shape.heads * (WINDOW - 1 + generated) * positions
    return 4 * cells * (3 + 2 * (planes - 1))


def shard_bytes(
    shape: Shape, probes: int, positions: int, generated: int, answer: int, directions: int
) -> int:
    """Return the bytes of a dataset's shards.

    Parameters
    ----------
    shape, probes, positions
        The model, and how many probes of how many tokens.
    generated, answer
        Generated tokens a probe, and those of them that spell the gold answer.
    directions
        Planes of phi.
    """
    heads = shape.layers * shape.heads
    cells = probes * answer * positions * heads * (1 + directions)
    # alpha and phi by six regions, three counts and the peak; see the table of `common/shards.py`.
    step = 4 * (6 * (1 + directions) + 3 + directions)
    rows = probes * (WINDOW - 1 + generated) * heads
    return round(cells * CELL_BYTES + rows * step * STEP_PACKING)


def stages(config: dict[str, Any], model: str, shape: Shape) -> list[Stage]:
    """Return the stages that a model's main target runs, from the validated config."""
    row = config["models"][model]
    batch, dtype = row["batch_tokens"], row["dtype"]
    planes = 1 + len(config["directions"])
    found = []
    for dataset in sorted({s["dataset"] for s in config["scores"].values() if "dataset" in s}):
        lengths, new = _lengths(config, dataset), config["probes"][dataset]["max_new_tokens"]
        count, longest = len(lengths), max(lengths)
        rows = max(1, batch // longest)
        found.append(
            Stage(
                f"capture {dataset}",
                sum(capture_flops(shape, length, new) for length in lengths),
                _batches(lengths, batch, 1) * new,
                batch_bytes(shape, rows, longest + new, dtype)
                + reading_bytes(shape, rows, longest + new, new, planes),
                shard_bytes(
                    shape,
                    count,
                    sum(lengths) // count,
                    new,
                    min(new, ANSWER_TOKENS),
                    planes - 1,
                ),
            )
        )
    for name, patching in config["patching"].items():
        lengths = _lengths(config, patching["dataset"])
        mean = sum(lengths) // len(lengths)
        forwards = patching["probes"] * (shape.layers * shape.heads / 2 + 2)
        rows = max(1, batch // max(lengths))
        found.append(
            Stage(
                f"patch {name}",
                forwards * forward_flops(shape, mean, 0, 1),
                device_bytes=batch_bytes(shape, rows, max(lengths), dtype),
            )
        )
    conditions = count_conditions(config)
    for task, about in config["tasks"].items():
        lengths = _lengths(config, about["dataset"])
        dataset = config["probes"][about["dataset"]]
        if dataset["format"] == "text":  # read, with the logits of every token, and not answered
            new, logit_rows = 0, LOGIT_TOKENS
            flops = sum(forward_flops(shape, length, 0, length) for length in lengths)
        else:
            new, logit_rows = dataset["max_new_tokens"], 0
            flops = sum(answer_flops(shape, length, new) for length in lengths)
        rows = max(1, batch // max(lengths))
        found.append(
            Stage(
                f"generate {task}, {conditions} conditions",
                conditions * flops,
                _batches(lengths, batch, conditions) * new,
                batch_bytes(shape, rows, max(lengths) + new, dtype)
                + logit_rows * shape.vocabulary * (4 + BYTES[dtype]),
                conditions * len(lengths) * (4 * new + 200),
            )
        )
    return found


def count_conditions(config: dict[str, Any]) -> int:
    """Return how many sets of heads are ablated, the empty one included."""
    total, sizes = 1, len(config["ablation"]["k"])
    for row in config["selectors"].values():
        if "above" in row or "heads" in row:
            total += 1
        else:
            total += sizes * len(row.get("ends", row.get("seeds", [None])))
    return total


def _lengths(config: dict[str, Any], dataset: str) -> list[int]:
    """Return the prompt lengths of a dataset's probes, spread evenly over its context lengths.

    Where no size is set, one probe for each length and depth; questions without a haystack are
    counted as 100 tokens.
    """
    row = config["probes"][dataset]
    lengths = row.get("context_lengths", [100])
    size = row.get("size", len(lengths) * len(row.get("depths", [0])))
    return [lengths[i * len(lengths) // size] for i in range(size)]


def _batches(lengths: list[int], tokens: int, copies: int) -> int:
    """Return how many batches a number of prompts takes, each under `copies` conditions."""
    rows = sum(copies * length for length in lengths)
    return max(-(-rows // tokens), len(set(lengths)))
