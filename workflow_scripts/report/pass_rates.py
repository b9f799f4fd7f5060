"""How many probes a model answers, unablated, by the length of the prompt and the needle's depth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

from workflow_scripts.ablation.metrics import verdict_of

SCHEMA: Any = {
    "set": pl.String,
    "role": pl.String,
    "context_length": pl.Int32,
    "depth_percent": pl.Float64,
    "n_probes": pl.Int32,
    "n_passed": pl.Int32,
}

_ROW_SCHEMA: Any = {
    "set": pl.String,
    "role": pl.String,
    "passed": pl.Boolean,
    "context_length": pl.Int32,
    "depth_percent": pl.Float64,
}

_PLACE = ("context_length", "depth_percent")


def detection_passes(dataset: str, probes: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Return one row a probe of a detection set: where it stands and whether it passed the gate."""
    rows = [
        {"set": dataset, "role": "detect", "passed": probe["status"] == "passed"}
        | {name: probe[name] for name in _PLACE}
        for probe in probes
    ]
    return pl.DataFrame(rows, schema=_ROW_SCHEMA)


def task_passes(
    task: str, metric: str, probes: pl.DataFrame, answers: pl.DataFrame
) -> pl.DataFrame:
    """Return one row a probe of a task: where it stands and whether the intact model is right.

    Parameters
    ----------
    metric
        What the task is judged by; right is a 1 of `verdict_of` it.
    probes
        The probes table of the task.
    answers
        The generations of the unablated run.
    """
    return (
        answers.select("probe_id", (pl.col(verdict_of(metric)) == 1).alias("passed"))
        .join(probes.select("probe_id", *_PLACE), on="probe_id", validate="1:1")
        .select(pl.lit(task).alias("set"), pl.lit("task").alias("role"), "passed", *_PLACE)
        .cast(_ROW_SCHEMA)
    )


def pass_rates(passes: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Count probes and passes by set, length and depth."""
    return (
        pl.concat(list(passes))
        .group_by("set", "role", *_PLACE)
        .agg(
            pl.len().cast(pl.Int32).alias("n_probes"),
            pl.col("passed").sum().cast(pl.Int32).alias("n_passed"),
        )
        .sort("role", "set", *_PLACE)
        .select(list(SCHEMA))
        .cast(SCHEMA)
    )
