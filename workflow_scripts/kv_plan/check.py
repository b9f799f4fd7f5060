"""Whether the answers bear a KV plan: groups lose the needle, and the model answers again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from workflow_scripts.ablation.selection import HeadSet, sort_heads
from workflow_scripts.ablation.statistics import bootstrap_interval, paired_difference
from workflow_scripts.ablation.tabulate import Answers, check_condition
from workflow_scripts.kv_plan.plan import blinded_by, compared_groups, totals

SCHEMA: dict[str, Any] = {
    "model": pl.String,
    "score": pl.String,
    "task": pl.String,
    "metric": pl.String,
    "budget": pl.Int32,
    "n_kept": pl.Int32,
    "n_compressed": pl.Int32,
    "share_kept": pl.Float64,
    "bytes_full": pl.Int64,
    "bytes_saved": pl.Int64,
    "n_probes": pl.Int32,
    "baseline": pl.Float64,
    "compressed": pl.Float64,
    "compressed_low": pl.Float64,
    "compressed_high": pl.Float64,
    "n_compared": pl.Int32,
    "worst": pl.Float64,
    "worst_low": pl.Float64,
    "worst_high": pl.Float64,
    "best": pl.Float64,
    "best_low": pl.Float64,
    "best_high": pl.Float64,
    "difference": pl.Float64,
    "difference_low": pl.Float64,
    "difference_high": pl.Float64,
    "p_value": pl.Float64,
}

Floats = NDArray[np.float64]


def check_table(
    plan: pl.DataFrame,
    scores: pl.DataFrame,
    answers: Mapping[str, Answers],
    unablated: Mapping[str, Answers],
    metrics: Mapping[str, str],
    seed: int,
) -> pl.DataFrame:
    """Return a row a task and budget.

    Parameters
    ----------
    plan
        See `plan.plan_table`.
    scores
        The table of the plan's score.
    answers, unablated
        By task, the answers with KV groups blind to the needle, and those of the intact model.
    metrics
        By task, the metric that it is judged by.
    seed
        Of the bootstrap.

    Returns
    -------
    DataFrame
        The columns of `SCHEMA`. What the budget comes to (`plan.totals`); baseline, the intact model;
        compressed, when all compressed groups lose the needle; worst and best, when the n_compared
        groups with the lowest and the highest scores do; each with its 95 % bootstrap interval over
        probes. difference is best minus worst, paired by probe, with its interval and p value: below
        zero where the kept groups matter more than as many compressed ones.

    Raises
    ------
    UserError
        If a file lacks a condition, or was answered over other probes than the intact run.
    """
    about = {name: plan[name][0] for name in ("model", "score")}
    rows = []
    for task, metric in sorted(metrics.items()):
        intact = unablated[task]
        for budget in plan["budget"].unique().sort():
            ranked = plan.filter(budget=budget)
            compressed, worst, best = (
                _values(condition, answers[task], intact, metric)
                for condition in blinded_by(scores, ranked, budget)
            )
            difference = paired_difference(best, worst, seed)
            rows.append(
                {
                    **about,
                    "task": task,
                    "metric": metric,
                    "budget": budget,
                    **totals(plan, budget),
                    "n_probes": len(best),
                    "baseline": float(intact.values[()][metric].mean()),
                    **_mean("compressed", compressed, seed),
                    "n_compared": compared_groups(budget, ranked.height),
                    **_mean("worst", worst, seed),
                    **_mean("best", best, seed),
                    "difference": difference.value,
                    "difference_low": difference.ci_low,
                    "difference_high": difference.ci_high,
                    "p_value": difference.p_value,
                }
            )
    return pl.DataFrame(rows, schema=SCHEMA)


def _values(condition: HeadSet, found: Answers, intact: Answers, metric: str) -> Floats:
    """Return a metric of each probe under a condition."""
    heads = tuple(sort_heads(condition.heads))
    check_condition(found, heads, intact)
    return found.values[heads][metric]


def _mean(name: str, values: Floats, seed: int) -> dict[str, float]:
    """Return a mean over probes with its interval, as columns."""
    low, high = bootstrap_interval(values, seed)
    return {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}
