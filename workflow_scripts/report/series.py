"""From tables to the arrays that the figures show: pure functions, no drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import polars as pl
from numpy.typing import NDArray

from workflow_scripts.analysis import views
from workflow_scripts.analysis.rankings import jaccard
from workflow_scripts.scores.intervals import LEVEL
from workflow_scripts.scores.ranking import top_heads

Floats = NDArray[np.float64]

TOP = 10
"""Best heads of a score that are marked and counted."""

SCALE_QUANTILE = 0.99
"""The colours of a head map end at this quantile of |value|: a few heads write most of the answer,
and up to the largest of them all others would look white."""

_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True)
class Curve:
    """A metric against the number of ablated heads, for one selector and end.

    Attributes
    ----------
    label
        "selector end", or the selector alone.
    selector, end
        What it is.
    k
        Numbers of heads, ascending, shape (n,).
    value
        The metric; for random heads the mean over seeds.
    low, high
        95 % interval over probes; for random heads the least and the most of the seeds.
    random
        Whether the heads were drawn.
    """

    label: str
    selector: str
    end: str | None
    k: NDArray[np.int64]
    value: Floats
    low: Floats
    high: Floats
    random: bool


def with_metrics(table: pl.DataFrame, metrics: Mapping[str, str]) -> pl.DataFrame:
    """Return a table of tasks with a column `judged_by`: the metric that each task is judged by."""
    return table.with_columns(pl.col("task").replace_strict(metrics).alias("judged_by"))


def metric_of(table: pl.DataFrame, task: str) -> str:
    """Return the metric that a task is judged by, from a table of `with_metrics`."""
    return str(table.filter(task=task)["judged_by"][0])


def ablation_curves(table: pl.DataFrame, task: str, metric: str) -> tuple[float, list[Curve]]:
    """Return the unablated value of a metric and a curve for every selector and end.

    Parameters
    ----------
    table
        The ablation table.

    Returns
    -------
    baseline, curves
        The curves in the order of the table, random heads last.
    """
    rows = table.filter(pl.col("task") == task, pl.col("metric") == metric)
    baseline = float(rows["baseline"][0])
    return baseline, _curves(rows.filter(pl.col("selector") != "none"))


def dissociation_curves(table: pl.DataFrame, target: str, control: str) -> list[Curve]:
    """Return DS(k) of a target and a control task, a curve for every selector and end.

    Parameters
    ----------
    table
        The dissociation table; rows where DS(k) is undefined are left out.
    """
    rows = table.filter(target=target, control=control).drop_nulls("ds")
    return _curves(rows.rename({"ds": "value"}))


def _curves(ablated: pl.DataFrame) -> list[Curve]:
    """Return a curve of the column value for every selector and end, random heads last."""
    curves = []
    for (selector, end), group in ablated.group_by("selector", "end", maintain_order=True):
        drawn = group["seed"].is_not_null().any()
        low, high = (
            (pl.col("value").min(), pl.col("value").max())
            if drawn
            else (
                pl.col("ci_low").first(),
                pl.col("ci_high").first(),
            )
        )
        by_k = (
            group.group_by("k")
            .agg(pl.col("value").mean(), low.alias("low"), high.alias("high"))
            .sort("k")
        )
        curves.append(
            Curve(
                label=f"{selector} {end}" if end is not None else str(selector),
                selector=str(selector),
                end=None if end is None else str(end),
                k=by_k["k"].to_numpy().astype(np.int64),
                value=by_k["value"].to_numpy(),
                low=by_k["low"].to_numpy(),
                high=by_k["high"].to_numpy(),
                random=drawn,
            )
        )
    return sorted(curves, key=lambda curve: curve.random)


def head_grid(heads: pl.DataFrame, score: str, column: str = "value") -> Floats:
    """Return a column of a score as an array of shape (layer, head)."""
    rows = heads.filter(pl.col("score") == score)
    layer, head = rows["layer"].to_numpy(), rows["head"].to_numpy()
    grid = np.full((layer.max() + 1, head.max() + 1), np.nan)
    grid[layer, head] = rows[column].to_numpy()
    return grid


def group_grid(heads: pl.DataFrame, score: str) -> Floats:
    """Return the mean of a score over the query heads of each KV group, shape (layer, KV group)."""
    groups = views.kv_groups(heads.filter(score=score), [1])  # the mean is the same for every k
    return head_grid(groups.rename({"kv_group": "head"}), score, "mean_value")


def colour_limit(values: Floats) -> float:
    """Return where the colour scale of a head map ends, above and below zero."""
    found = np.abs(values[np.isfinite(values)])
    limit = float(np.quantile(found, SCALE_QUANTILE))
    return limit or float(found.max()) or 1.0


def best_heads(heads: pl.DataFrame, score: str, k: int = TOP) -> list[tuple[int, int]]:
    """Return the (layer, head) of the k best heads of a score, best first."""
    return top_heads(heads.filter(score=score), k)


def overlap(heads: pl.DataFrame, scores: Sequence[str], k: int = TOP) -> Floats:
    """Return the Jaccard index of the k best heads of each two scores.

    Returns
    -------
    array
        Shape (score, score), symmetric; the diagonal is 1.
    """
    ranks = np.stack([head_grid(heads, score, "rank").ravel() for score in scores])
    return jaccard(ranks[:, None], ranks[None], min(k, ranks.shape[1]))


def layer_counts(heads: pl.DataFrame, score: str, k: int = TOP) -> NDArray[np.int64]:
    """Return how many of the k best heads of a score lie in each layer, shape (layer,)."""
    counts = views.layers(heads.filter(score=score), [k])
    return counts["n_top"].to_numpy().astype(np.int64)


@dataclass(frozen=True)
class Rates:
    """A share of passed probes against length or depth.

    Attributes
    ----------
    at
        Lengths in tokens, or depths in percent, ascending, shape (n,).
    value, low, high
        The share and its 95 % Wilson interval.
    n_probes
        Probes at each.
    """

    at: Floats
    value: Floats
    low: Floats
    high: Floats
    n_probes: NDArray[np.int64]


def rates_by(table: pl.DataFrame, name: str, role: str, column: str) -> Rates:
    """Return the pass rate of a set of probes by `context_length` or `depth_percent`.

    Parameters
    ----------
    table
        The table of pass rates.
    name, role
        The set; a detection set and a task may have the same name.

    Returns
    -------
    Rates
        Without points where the probes have no length or depth.
    """
    rows = (
        table.filter(pl.col("set") == name, pl.col("role") == role, pl.col(column).is_not_null())
        .group_by(column)
        .agg(pl.col("n_probes", "n_passed").sum())
        .sort(column)
    )
    n = rows["n_probes"].to_numpy().astype(np.int64)
    passed = rows["n_passed"].to_numpy().astype(np.int64)
    low, high = wilson_interval(passed, n)
    return Rates(rows[column].to_numpy().astype(np.float64), passed / n, low, high, n)


def wilson_interval(passed: NDArray[np.int64], n: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return the 95 % Wilson score interval of shares `passed / n` (Wilson 1927)."""
    share = passed / n
    centre = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * np.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return np.clip(centre - half, 0, 1), np.clip(centre + half, 0, 1)
