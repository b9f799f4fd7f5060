"""Shards of random attention and values, with the whole rows kept to check against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workflow_scripts.common.shards import REGIONS, manifest_of, write_shard

Array = NDArray[Any]
WINDOW = 8


@dataclass
class Row:
    """One step: token -1 where nothing was generated; alpha and phi of shape (L, H, N_t)."""

    probe: int
    step: int
    token: int
    is_answer: bool
    u_norm: float
    alpha: Array
    phi: Array

    @property
    def length(self) -> int:
        return self.alpha.shape[-1]


@dataclass
class World:
    """Some probes with all their rows."""

    layers: int
    heads: int
    kv_heads: int
    probes: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    token_text: dict[str, str] | None = None

    def needle(self, row: Row) -> tuple[int, int]:
        probe = self.probes[row.probe]
        return probe["needle_start"], probe["needle_end"]

    def region(self, row: Row, position: int) -> str:
        probe = self.probes[row.probe]
        if position >= len(probe["input_ids"]):
            return "generated"
        if position == 0 and probe["has_bos"]:
            return "bos"
        for name in ("needle", "question", "haystack"):
            if probe[f"{name}_start"] is None:
                continue
            if probe[f"{name}_start"] <= position < probe[f"{name}_end"]:
                return name
        return "template"

    def top(self, row: Row, layer: int, head: int, count: int) -> list[int]:
        """Return the positions of the `count` largest weights above zero."""
        weights = row.alpha[layer, head]
        order = sorted(range(len(weights)), key=lambda j: (-weights[j], j))
        return [j for j in order[:count] if weights[j] > 0]


def probe_record(number: int, **changes: Any) -> dict[str, Any]:
    """Return a probe of 20 prompt tokens, needle 6 to 10, answered at steps 1 and 2."""
    record: dict[str, Any] = {
        "probe_id": f"probe-{number}",
        "needle_id": "needle",
        "haystack_id": "filler",
        "question_type": "onehop",
        "context_length": 20,
        "depth_percent": 50.0,
        "answer": "Anna",
        "needle_start": 6,
        "needle_end": 10,
        "haystack_start": 2,
        "haystack_end": 14,
        "question_start": 15,
        "question_end": 18,
        "has_bos": True,
        "input_ids": [(7 * j + number) % 50 for j in range(20)],
        "generated_ids": [3, 4, 5, 6],
        "generated_text": "text",
        "rouge1_recall": 1.0,
        "status": "passed",
        "answer_steps": [1, 2],
    } | changes
    record.setdefault("real_needle_start", record["needle_start"])
    record.setdefault("real_needle_end", record["needle_end"])
    record["passed"] = record["status"] == "passed"
    return record


def make_world(
    probes: list[dict[str, Any]],
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    attention: Callable[[Row], Array] | None = None,
) -> World:
    """Give every probe random rows; query head h reads KV head h // (heads / kv_heads).

    `attention` may replace a row's alpha, of shape (layers, heads, N_t).
    """
    random = np.random.default_rng(seed)
    world = World(layers, heads, kv_heads, probes)
    for index, probe in enumerate(probes):
        prompt, generated = len(probe["input_ids"]), probe["generated_ids"]
        window = min(WINDOW, prompt)
        total = prompt + max(0, len(generated) - 1)
        values = random.standard_normal((layers, kv_heads, total, 3))
        for step in range(1 - window, max(1, len(generated))):
            token = generated[step] if 0 <= step < len(generated) else -1
            length = prompt + step
            alpha = random.dirichlet(np.full(length, 0.3), (layers, heads))
            writes = random.standard_normal((layers, heads, 3))
            row = Row(
                index, step, token, step in probe["answer_steps"], 1 + random.random(), alpha, alpha
            )
            if attention is not None:
                row.alpha = attention(row)
            omega = np.empty((layers, heads, length))
            for layer in range(layers):
                for head in range(heads):
                    kv_head = head // (heads // kv_heads)
                    omega[layer, head] = values[layer, kv_head, :length] @ writes[layer, head]
            row.alpha = row.alpha.astype(np.float32).astype(np.float64)
            row.phi = (row.alpha * omega).astype(np.float32).astype(np.float64)
            world.rows.append(row)
    return world


def write_world(world: World, path: Path, *, spec: Any = "made up") -> Path:
    """Write a world as a shard without rounding."""
    attributes: dict[str, Any] = {
        "probes": world.probes,
        "n_layers": world.layers,
        "n_heads": world.heads,
        "n_kv_heads": world.kv_heads,
    }
    if world.token_text is not None:
        attributes["token_text"] = world.token_text
    write_shard(path, manifest_of(path), _arrays(world), attributes, spec, keep_bits=23)
    return path


def _arrays(world: World) -> dict[str, Array]:
    rows, dense = world.rows, [row for row in world.rows if row.is_answer]
    if not rows:
        return {}
    lengths = np.array([row.length for row in dense], np.int64)
    arrays: dict[str, Array] = {
        "row_probe": np.array([row.probe for row in dense], np.int32),
        "row_step": np.array([row.step for row in dense], np.int32),
        "row_token": np.array([row.token for row in dense], np.int32),
        "row_logprob": np.full(len(dense), -0.5, np.float32),
        "row_offset": np.cumsum(lengths) - lengths,
        "row_length": lengths.astype(np.int32),
        "row_u_norm": np.array([row.u_norm for row in dense], np.float32),
        "step_probe": np.array([row.probe for row in rows], np.int32),
        "step_index": np.array([row.step for row in rows], np.int32),
        "step_token": np.array([row.token for row in rows], np.int32),
        "step_logprob": np.full(len(rows), -0.5, np.float32),
        "step_length": np.array([row.length for row in rows], np.int32),
        "step_u_norm": np.array([row.u_norm for row in rows], np.float32),
        "step_is_answer": np.array([row.is_answer for row in rows]),
    }
    empty = np.zeros((world.layers, world.heads, 0))
    for name, values in (
        ("alpha", [row.alpha for row in dense]),
        ("phi_raw", [row.phi for row in dense]),
    ):
        arrays[name] = np.concatenate([empty, *values], -1).astype(np.float32)
    shape = (len(rows), world.layers, world.heads)
    sums = {"alpha": np.zeros((*shape, 6)), "phi_raw": np.zeros((*shape, 6))}
    lengths_by_region = np.zeros((len(rows), 6), np.int32)
    extra = {name: np.zeros(shape) for name in ("argmax", "top10_in_needle", "topn_needle_alpha")}
    peak = np.full(shape, np.nan)
    for r, row in enumerate(rows):
        for position in range(row.length):
            region = REGIONS.index(world.region(row, position))
            lengths_by_region[r, region] += 1
            sums["alpha"][r, ..., region] += row.alpha[..., position]
            sums["phi_raw"][r, ..., region] += row.phi[..., position]
        if row.token < 0:
            sums["phi_raw"][r] = np.nan
        start, stop = world.needle(row) if world.needle(row)[0] is not None else (0, 0)
        for layer, head in np.ndindex(world.layers, world.heads):
            weights = row.alpha[layer, head]
            extra["argmax"][r, layer, head] = np.argmax(weights)
            hits = [j for j in world.top(row, layer, head, 10) if start <= j < stop]
            extra["top10_in_needle"][r, layer, head] = len(hits)
            kept = [j for j in world.top(row, layer, head, stop - start) if start <= j < stop]
            extra["topn_needle_alpha"][r, layer, head] = weights[kept].sum()
            if row.token >= 0 and stop > start:
                at = max(range(start, stop), key=lambda j: weights[j])
                peak[r, layer, head] = row.phi[layer, head, at]
    arrays["region_length"] = lengths_by_region
    arrays |= {f"{name}_by_region": plane.astype(np.float32) for name, plane in sums.items()}
    arrays["topn_needle_alpha"] = extra["topn_needle_alpha"].astype(np.float32)
    arrays["peak_phi_raw"] = peak.astype(np.float32)
    arrays["argmax"] = extra["argmax"].astype(np.int32)
    arrays["top10_in_needle"] = extra["top10_in_needle"].astype(np.int32)
    return arrays
