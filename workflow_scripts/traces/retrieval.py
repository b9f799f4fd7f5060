"""The retrieval signal: how much of an answer the chosen heads wrote from the document.

The share means nothing by itself; it is read against the same model's shares on probes that it
answered from the text, that it failed, and whose needle was removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from workflow_scripts.common.shards import REGIONS, Shard
from workflow_scripts.scores.intervals import RESAMPLES, percentile_interval
from workflow_scripts.scores.reductions import GATES

Floats = NDArray[np.float64]
Head = tuple[int, int]

DOCUMENT = ("needle", "haystack")
"""Regions that are the document's."""

KINDS = ("passing", "failing", "removed")
"""Kinds of reference probe: answered right, answered wrong, and asked without the needle."""

PROBES_SCHEMA: dict[str, Any] = {
    "dataset": pl.String,
    "probe_id": pl.String,
    "status": pl.String,
    "kind": pl.String,
    "share": pl.Float64,
}
AUC_SCHEMA: dict[str, Any] = {
    "negative": pl.String,
    "n_passing": pl.Int64,
    "n_negative": pl.Int64,
    "auc": pl.Float64,
    "ci_low": pl.Float64,
    "ci_high": pl.Float64,
    "threshold": pl.Float64,
    "reason": pl.String,
}


def document_shares(shard: Shard, heads: Sequence[Head]) -> dict[int, float]:
    """Return the retrieval signal of every probe of a shard that has generated tokens.

    It is the sum over the answer's tokens and the chosen heads of phi from the document, divided by
    the sum over the answer's tokens, all heads and all regions of |phi of a region|: the share of
    all that attention wrote towards or against the answer. It lies between -1 and 1.

    Parameters
    ----------
    shard
        Its `phi_raw_by_region` is read, float32, (step, layer, head, region).
    heads
        (layer, head) of the chosen heads.

    Returns
    -------
    dict
        Share by index of the probe in the shard; probes that no detector reads (a mismatch, or no
        generated token) are left out.
    """
    if "step_probe" not in shard:
        return {}
    generated = shard.read("step_token") >= 0
    owner = shard.read("step_probe")[generated]
    phi = shard.read("phi_raw_by_region")[generated].astype(np.float64)
    layers, numbers = (list(part) for part in zip(*heads, strict=True))
    document = phi[:, layers, numbers][..., [REGIONS.index(name) for name in DOCUMENT]]
    written = np.abs(phi).sum((1, 2, 3))
    shares = {}
    for index in np.unique(owner):
        mine = owner == index
        if shard.probes[index]["status"] in GATES["none"] and written[mine].sum() > 0:
            shares[int(index)] = float(document[mine].sum() / written[mine].sum())
    return shares


def kind_of(status: str, *, removed: bool) -> str:
    """Return which of `KINDS` a probe with this status is."""
    if removed:
        return "removed"
    return "passing" if status == "passed" else "failing"


def roc_auc(positive: Floats, negative: Floats) -> float:
    """Return the probability that a positive exceeds a negative, ties counting half.

    This is the area under the ROC curve (Mann-Whitney U over the number of pairs).
    """
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, "left")
    not_above = np.searchsorted(ordered, positive, "right")
    return float((below + not_above).mean() / (2 * len(negative)))


def auc_interval(positive: Floats, negative: Floats, seed: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of `roc_auc`; both groups are resampled."""
    random = np.random.default_rng(seed)
    found = [
        roc_auc(
            positive[random.integers(len(positive), size=len(positive))],
            negative[random.integers(len(negative), size=len(negative))],
        )
        for _ in range(RESAMPLES)
    ]
    low, high = percentile_interval(np.array(found))
    return float(low), float(high)


def best_threshold(positive: Floats, negative: Floats) -> float:
    """Return the share from which on an answer counts as retrieved.

    The observed positive with the largest Youden index: share of positives at or above it, less the
    share of negatives there; the smallest of equals.
    """
    candidates = np.unique(positive)
    kept = 1 - np.searchsorted(np.sort(positive), candidates, "left") / len(positive)
    false = 1 - np.searchsorted(np.sort(negative), candidates, "left") / len(negative)
    return float(candidates[np.argmax(kept - false)])


def auc_table(probes: pl.DataFrame, seed: int) -> pl.DataFrame:
    """Return how well the share tells passing probes from others.

    Parameters
    ----------
    probes
        Columns `kind` and `share`, a row a probe.
    seed
        Of the bootstrap.

    Returns
    -------
    DataFrame
        A row for each group of others (failing, removed, and both): negative, n_passing,
        n_negative, auc, ci_low, ci_high, threshold; null, with the `reason`, where a group is empty.
    """
    shares = {kind: probes.filter(kind=kind)["share"].to_numpy() for kind in KINDS}
    shares["failing or removed"] = np.concatenate([shares["failing"], shares["removed"]])
    passing = shares.pop("passing")
    rows = [_auc_row(name, passing, negative, seed) for name, negative in shares.items()]
    return pl.DataFrame(rows, schema=AUC_SCHEMA)


def _auc_row(name: str, passing: Floats, negative: Floats, seed: int) -> Mapping[str, Any]:
    row: dict[str, Any] = {
        "negative": name,
        "n_passing": len(passing),
        "n_negative": len(negative),
        "auc": None,
        "ci_low": None,
        "ci_high": None,
        "threshold": None,
        "reason": None,
    }
    if not len(passing) or not len(negative):
        return row | {"reason": f"no {'passing' if not len(passing) else name} probes"}
    low, high = auc_interval(passing, negative, seed)
    return row | {
        "auc": roc_auc(passing, negative),
        "ci_low": low,
        "ci_high": high,
        "threshold": best_threshold(passing, negative),
    }
