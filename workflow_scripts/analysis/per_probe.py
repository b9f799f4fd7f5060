"""Scores by probe, which the tables of heads are means of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from workflow_scripts.common.artifacts import read_provenance, read_table
from workflow_scripts.scores.pooling import Floats, PerProbe, choose, weighted_terms
from workflow_scripts.scores.score import files_of, pair_probes, read_evidence

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


def per_probe_table(scores: ProbeScores) -> pl.DataFrame:
    """Return a score by probe.

    Columns dataset, probe_id, layer and head (int32), sum (float64, over the probe's rows), count
    (float64, its rows) and steps (int64, what they were made from); by probe, layer and head.
    """
    sums = scores.probes.sums
    probe, layer, head = (axis.ravel() for axis in np.indices(sums.shape, dtype=np.int32))
    datasets, names = zip(*scores.ids, strict=True)
    return pl.DataFrame(
        {
            "dataset": np.array(datasets)[probe],
            "probe_id": np.array(names)[probe],
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
    table, about = read_table(path, kind=KIND), read_provenance(path)
    n_layers, n_heads = (int(table[axis].to_numpy().max()) + 1 for axis in ("layer", "head"))
    probes = table[:: n_layers * n_heads]
    return ProbeScores(
        model=about["spec"]["model"],
        score=about["spec"]["score"],
        pool=about["pool"],
        ids=probes.select("dataset", "probe_id").rows(),
        probes=PerProbe(
            table["sum"].to_numpy().reshape(probes.height, n_layers, n_heads),
            probes["count"].to_numpy(),
            probes["steps"].to_numpy(),
        ),
    )


def probe_values(probes: PerProbe, pool: str) -> Floats:
    """Return a value a probe whose mean over probes is the head's value, (probe, layer, head).

    With `pool: probes`, the mean of the probe's steps. With `pool: steps`, that mean times the
    probe's steps over the mean number of steps.
    """
    numerator, denominator = weighted_terms(probes, pool)
    values: Floats = numerator / denominator.mean()
    return values.reshape(probes.sums.shape)


def per_probe(spec: dict[str, Any], paths: list[str]) -> ProbeScores:
    """Compute a score by probe from what it is made of.

    Parameters
    ----------
    spec
        See `common.layout.score_spec`.
    paths
        Its shards or patching effects; for a difference, those of both scores.

    Returns
    -------
    ProbeScores
        For a difference, over the probes that count in both: each probe's `probe_values` in the one
        less those in the other, whose mean is the difference of the two pooled values.
    """
    if "terms" not in spec:
        settings, scores = read_evidence(spec, paths)
        evidence = spec["patching"] if "patching" in spec else spec["activations"]
        dataset = evidence["spec"]["probes"]["dataset"]
        ids = [(dataset, probe) for probe in scores.probe_ids]
        return ProbeScores(spec["model"], spec["score"], settings.pool, ids, scores.probes)
    terms = [per_probe(term, files_of(term, paths)) for term in spec["terms"]]
    paired, places = pair_probes(
        spec["score"],
        [term.score for term in terms],
        [[probe for _, probe in term.ids] for term in terms],
    )
    chosen = [choose(term.probes, place) for term, place in zip(terms, places, strict=True)]
    first, second = (
        probe_values(probes, term.pool) for probes, term in zip(chosen, terms, strict=True)
    )
    ids = [terms[0].ids[place] for place in places[0]]
    steps = chosen[0].steps + chosen[1].steps
    probes = PerProbe(first - second, np.ones(len(paired)), steps)
    return ProbeScores(spec["model"], spec["score"], "probes", ids, probes)
