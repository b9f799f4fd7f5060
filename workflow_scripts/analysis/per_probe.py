"""Scores by probe, which the tables of heads are means of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from workflow_scripts.common.artifacts import read_provenance, read_table
from workflow_scripts.scores.pooling import Floats, PerProbe, weighted_terms
from workflow_scripts.scores.score import ShardScores
from workflow_scripts.scores.settings import parse_score

KIND = "per_probe"


@dataclass(frozen=True)
class ProbeScores:
    """A score by probe.

    Attributes
    ----------
    model, score, pool
        Whose, which, and how probes become a head's value.
    ids
        (dataset, probe id) of each probe.
    probes
        The sums.
    """

    model: str
    score: str
    pool: str
    ids: list[tuple[str, str]]
    probes: PerProbe


def per_probe_table(scores: ShardScores) -> pl.DataFrame:
    """Return a score by probe.

    Columns probe_id, layer and head (int32), sum (float64, over the probe's rows), count (float64,
    its rows) and steps (int64, what they were made from); by probe, layer and head.
    """
    sums = scores.probes.sums
    probe, layer, head = (axis.ravel() for axis in np.indices(sums.shape, dtype=np.int32))
    return pl.DataFrame(
        {
            "probe_id": np.array(scores.probe_ids)[probe],
            "layer": layer,
            "head": head,
            "sum": sums.ravel(),
            "count": scores.probes.counts[probe],
            "steps": scores.probes.steps[probe],
        }
    )


def read_per_probe(path: str | Path) -> ProbeScores:
    """Read a table of `per_probe_table`.

    Raises
    ------
    UserError
        If it cannot be read or is another table.
    """
    table = read_table(path, kind=KIND)
    spec: dict[str, Any] = read_provenance(path)["spec"]
    settings = parse_score(spec["score"], spec["row"])
    evidence = spec["patching"] if "patching" in spec else spec["activations"]
    ids = table["probe_id"].unique(maintain_order=True).to_list()
    n_layers, n_heads = (int(table[axis].to_numpy().max()) + 1 for axis in ("layer", "head"))
    sums = table["sum"].to_numpy().reshape(len(ids), n_layers, n_heads)
    per_head = n_layers * n_heads
    return ProbeScores(
        model=spec["model"],
        score=spec["score"],
        pool=settings.pool,
        ids=[(evidence["spec"]["probes"]["dataset"], probe) for probe in ids],
        probes=PerProbe(
            sums, table["count"].to_numpy()[::per_head], table["steps"].to_numpy()[::per_head]
        ),
    )


def probe_values(scores: ProbeScores) -> Floats:
    """Return a value a probe whose mean over probes is the head's value, (probe, layer, head).

    With `pool: probes`, the mean of the probe's steps. With `pool: steps`, that mean times the
    probe's steps over the mean number of steps.
    """
    numerator, denominator = weighted_terms(scores.probes, scores.pool)
    values: Floats = numerator / denominator.mean()
    return values.reshape(scores.probes.sums.shape)
