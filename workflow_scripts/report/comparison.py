"""Several models in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from workflow_scripts.report.headline import Cell
from workflow_scripts.report.series import ablation_curves, best_heads


@dataclass(frozen=True)
class Row:
    """A condition, with a cell a model; None for a model without it."""

    label: str
    k: int
    random: bool
    cells: list[Cell | None]


@dataclass(frozen=True)
class Table:
    """The conditions of a task, unablated first, and the metric that it is judged by."""

    task: str
    metric: str
    rows: list[Row]


def comparison_table(
    task: str, metric: str, ablation: pl.DataFrame, models: Sequence[str]
) -> Table:
    """Return a metric of every model under every condition of a task.

    Parameters
    ----------
    ablation
        The ablation tables of the models, one below the other.
    models
        The columns.
    """
    found: dict[tuple[str, int], dict[str, Cell]] = {}
    drawn = set()
    for model in models:
        rows = ablation.filter(pl.col("model") == model)
        none = rows.filter(task=task, metric=metric, selector="none").row(0, named=True)
        cell = Cell(none["value"], none["ci_low"], none["ci_high"], False)
        found.setdefault(("nothing ablated", 0), {})[model] = cell
        for curve in ablation_curves(rows, task, metric)[1]:
            drawn |= {curve.label} if curve.random else set()
            points = zip(curve.k, curve.value, curve.low, curve.high, strict=True)
            for k, value, low, high in points:
                cell = Cell(float(value), float(low), float(high), False)
                found.setdefault((curve.label, int(k)), {})[model] = cell
    return Table(
        task,
        metric,
        [
            Row(label, k, label in drawn, [cells.get(model) for model in models])
            for (label, k), cells in found.items()
        ],
    )


def model_row(model: str, heads: pl.DataFrame, score: str) -> dict[str, Any]:
    """Return how many layers a model has, query heads and KV groups a layer, and its best heads."""
    rows = heads.filter(pl.col("model") == model)
    sizes = rows.select(pl.col("layer", "head", "kv_group").max() + 1).row(0)
    return {
        "name": model,
        **dict(zip(("layers", "heads", "kv_groups"), sizes, strict=True)),
        "best": [f"{layer}-{head}" for layer, head in best_heads(rows, score)],
    }
