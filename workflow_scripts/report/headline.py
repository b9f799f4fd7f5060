"""The result in a few sentences and one table a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from workflow_scripts.ablation.metrics import LOSS
from workflow_scripts.report.catalogue import main_score
from workflow_scripts.report.series import Curve, ablation_curves

SIGNIFICANT = 0.05
"""A Holm-corrected p value below it is called a difference."""


@dataclass(frozen=True)
class Cell:
    """A value of the headline table.

    Attributes
    ----------
    value, low, high
        Value and interval, as in `series.Curve`.
    differs
        Whether it differs from as many random heads.
    """

    value: float
    low: float
    high: float
    differs: bool


@dataclass(frozen=True)
class Row:
    """A selector and end, with a cell a k; None where it ablated no such number of heads."""

    label: str
    random: bool
    cells: list[Cell | None]


@dataclass(frozen=True)
class TaskTable:
    """The headline table of a task.

    Attributes
    ----------
    metric
        What the task is judged by.
    sentence
        What it says.
    selector, k
        The top heads that it speaks of; None where no selector takes top heads.
    baseline
        The unablated run.
    ks
        Numbers of heads, the columns.
    """

    task: str
    metric: str
    split: str
    n_probes: int
    sentence: str
    selector: str | None
    k: int | None
    baseline: Cell
    ks: list[int]
    rows: list[Row]


def task_table(
    task: str, metric: str, ablation: pl.DataFrame, significance: pl.DataFrame
) -> TaskTable:
    """Return the metric of a task under every condition, and the sentence above it."""
    _, curves = ablation_curves(ablation, task, metric)
    none = ablation.filter(task=task, metric=metric, selector="none").row(0, named=True)
    tests = significance.filter(task=task, metric=metric, reference="random")
    differs = {
        (row["selector"], row["end"], row["k"])
        for row in tests.filter(pl.col("p_holm") < SIGNIFICANT).iter_rows(named=True)
    }
    ks = sorted({int(k) for curve in curves for k in curve.k})
    sentence, selector, k = headline(task, metric, none["value"], curves, tests)
    return TaskTable(
        task=task,
        metric=metric,
        split=none["split"],
        n_probes=none["n_probes"],
        sentence=sentence,
        selector=selector,
        k=k,
        baseline=Cell(none["value"], none["ci_low"], none["ci_high"], False),
        ks=ks,
        rows=[Row(curve.label, curve.random, _cells(curve, ks, differs)) for curve in curves],
    )


def _cells(curve: Curve, ks: list[int], differs: set[tuple[Any, ...]]) -> list[Cell | None]:
    at = {int(k): place for place, k in enumerate(curve.k)}
    return [
        Cell(
            float(curve.value[at[k]]),
            float(curve.low[at[k]]),
            float(curve.high[at[k]]),
            (curve.selector, curve.end, k) in differs,
        )
        if k in at
        else None
        for k in ks
    ]


def headline(
    task: str, metric: str, baseline: float, curves: list[Curve], tests: pl.DataFrame
) -> tuple[str, str | None, int | None]:
    """Return the result of a task in one sentence, and the selector and k that it speaks of.

    It is told at the least k at which the main selector's top heads do more damage than as many
    random heads do, so that the k is not picked for its effect; where there is none, the largest k
    is returned.

    Parameters
    ----------
    metric
        What the task is judged by. Damage lowers it, but raises a loss.
    baseline
        Its unablated value.
    curves
        It under every selector.
    tests
        The comparisons of the task with random heads.
    """
    tops = {curve.selector: curve for curve in curves if curve.end == "top"}
    name, does = metric.replace("_", " "), "reads" if metric == LOSS else "answers"
    intact = f"unablated, the model {does} {task} with {name} {baseline:.2f}"
    if not tops:
        return f"{intact.capitalize()}.", None, None
    selector = main_score(tops)
    curve = tops[selector]
    rows = tests.filter(pl.col("selector") == selector, pl.col("end") == "top").sort("k")
    damage = pl.col("difference") > 0 if metric == LOSS else pl.col("difference") < 0
    worse = rows.filter(pl.col("p_holm") < SIGNIFICANT, damage)
    if not worse.is_empty():
        row = worse.row(0, named=True)
        value = float(curve.value[curve.k == row["k"]][0])
        return _effect(f"{task} {name}", baseline, selector, row, value), selector, row["k"]
    most = int(curve.k[-1])
    if rows["p_holm"].is_null().all():
        sentence = (
            f"Ablating the {most} best heads by {selector} takes {task} {name} from {baseline:.2f} "
            f"to {curve.value[-1]:.2f}; no random heads were run to compare with."
        )
    else:
        sentence = (
            f"No number of best heads by {selector} harms {task} {name} more than as many random heads "
            f"do (Holm-corrected p < {SIGNIFICANT}); {intact}."
        )
    return sentence, selector, most


def _effect(what: str, baseline: float, selector: str, row: Mapping[str, Any], value: float) -> str:
    k = row["k"]
    heads, random = (
        ("the best head", "a random head")
        if k == 1
        else (f"the {k} best heads", f"{k} random heads")
    )
    p_value = f"p = {row['p_holm']:.3f}" if row["p_holm"] >= 0.001 else "p < 0.001"
    return (
        f"Ablating {heads} by {selector} takes {what} from {baseline:.2f} to {value:.2f}; "
        f"{random} leave{'s' if k == 1 else ''} {value - row['difference']:.2f} "
        f"(difference {_signed(row['difference'])}, 95 % interval [{_signed(row['ci_low'])}, "
        f"{_signed(row['ci_high'])}], Holm-corrected {p_value})."
    )


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")
