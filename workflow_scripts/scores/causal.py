"""Scores from causal activation patching: the mean effect of a head over probes (cri)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from workflow_scripts.common.artifacts import read_provenance, read_table
from workflow_scripts.scores.pooling import PerProbe


def patching_effects(path: str | Path, metric: str, spec: Any) -> tuple[PerProbe, list[str], int]:
    """Return the effects of every head by probe.

    Parameters
    ----------
    path
        A table of patching effects.
    metric
        "logit" or "logprob".
    spec
        What the table must have been made for.

    Returns
    -------
    probes
        One row a probe.
    probe_ids
        Of the probes.
    group_size
        Query heads of a KV group.

    Raises
    ------
    UserError
        If the table cannot be read or was made for something else.
    """
    table = read_table(path, kind="patching", spec=spec)
    probe_ids = table["probe_id"].unique(maintain_order=True).to_list()
    layers, heads = (
        int(table["layer"].to_numpy().max()) + 1,
        int(table["head"].to_numpy().max()) + 1,
    )
    # Rows stand by probe, layer and head.
    sums = table[metric].to_numpy().reshape(len(probe_ids), layers, heads)
    ones = np.ones(len(probe_ids))
    group_size = heads // read_provenance(path)["n_kv_heads"]
    return PerProbe(sums, ones, ones.astype(np.int64)), probe_ids, group_size
