"""From rows to heads: per-probe sums, and their mean over steps or over probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Values:
    """What a formula or a detector makes of a shard; R rows, L layers, H heads.

    Attributes
    ----------
    probe
        Index of each row's probe in the shard, ascending, shape (R,).
    values
        Shape (R, L, H).
    steps
        How many steps each row was made from, shape (R,).
    """

    probe: NDArray[Any]
    values: Floats
    steps: NDArray[np.int64]


@dataclass(frozen=True)
class PerProbe:
    """Sums over the rows of each of P probes that have any.

    Attributes
    ----------
    sums
        Shape (P, L, H).
    counts
        Rows a probe, shape (P,), all positive.
    steps
        Steps a probe, shape (P,).
    """

    sums: Floats
    counts: Floats
    steps: NDArray[np.int64]


def per_step(probe: NDArray[Any], values: Floats) -> Values:
    """Return values whose rows are one step each."""
    return Values(probe, values, np.ones(len(probe), np.int64))


def sum_by_probe(rows: Values) -> PerProbe:
    """Sum the rows of each probe (they stand together)."""
    if len(rows.probe) == 0:
        return PerProbe(rows.values, np.zeros(0), rows.steps)
    starts = np.flatnonzero(np.diff(rows.probe, prepend=-1))
    return PerProbe(
        np.add.reduceat(rows.values, starts, axis=0),
        np.diff(np.append(starts, len(rows.probe))).astype(np.float64),
        np.add.reduceat(rows.steps, starts),
    )


def join(parts: Sequence[PerProbe]) -> PerProbe:
    """Put the probes of several shards behind each other."""
    return PerProbe(
        np.concatenate([part.sums for part in parts]),
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.steps for part in parts]),
    )


def choose(probes: PerProbe, index: Sequence[int]) -> PerProbe:
    """Return some of the probes, in the order of their indices."""
    chosen = np.asarray(index, np.int64)
    return PerProbe(probes.sums[chosen], probes.counts[chosen], probes.steps[chosen])


def weighted_terms(probes: PerProbe, pool: str) -> tuple[Floats, Floats]:
    """Return numerators (P, L * H) and denominators (P,): a pooled value is sum / sum.

    Parameters
    ----------
    probes
        At least one.
    pool
        "steps": all rows weigh the same (the paper's equation); "probes": the mean of probe means.
    """
    flat = probes.sums.reshape(len(probes.sums), -1)
    if pool == "steps":
        return flat, probes.counts
    return flat / probes.counts[:, None], np.ones_like(probes.counts)


def pool_heads(probes: PerProbe, pool: str) -> Floats:
    """Return the value of each head, shape (L, H); see `weighted_terms`."""
    numerator, denominator = weighted_terms(probes, pool)
    pooled: Floats = numerator.sum(0) / denominator.sum()
    return pooled.reshape(probes.sums.shape[1:])
