"""Gather generations into the ablation table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from workflow_scripts.ablation.metrics import METRICS
from workflow_scripts.ablation.selection import read_selection, sort_heads
from workflow_scripts.common.artifacts import read_table, write_table
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.script import run_script

RESAMPLES = 1000

SCHEMA: dict[str, Any] = {
    "model": pl.String,
    "task": pl.String,
    "split": pl.String,
    "selector": pl.String,
    "end": pl.String,
    "k": pl.Int32,
    "seed": pl.Int32,
    "mode": pl.String,
    "site": pl.String,
    "metric": pl.String,
    "value": pl.Float64,
    "ci_low": pl.Float64,
    "ci_high": pl.Float64,
    "baseline": pl.Float64,
    "n_probes": pl.Int32,
    "heads": pl.List(pl.String),
}

Values = dict[tuple[str, ...], NDArray[np.float64]]


def bootstrap_interval(values: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of a mean over probes.

    The resamples hang on the seed and the number of probes alone, so conditions over the same probes
    share them (paired).
    """
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(values[draws].mean(1), [2.5, 97.5])
    return float(low), float(high)


def read_values(path: str | Path) -> dict[str, Values]:
    """Return, by metric and sorted set of heads, the value of every probe in a file."""
    table = read_table(path, kind="generations")
    if table.is_empty():
        raise UserError(f"{path}: holds no answers; delete it and run again")
    groups = table.group_by("heads", maintain_order=True)
    return {
        metric: {tuple(heads): rows[metric].to_numpy() for (heads,), rows in groups}
        for metric in METRICS
    }


def ablation_table(
    model: str, selection: pl.DataFrame, values: dict[str, dict[str, Values]], seed: int
) -> pl.DataFrame:
    """Return the ablation table: a row per condition and metric.

    Parameters
    ----------
    selection
        The conditions.
    values
        By key of the generations, then metric, then set of heads: a value a probe.
    seed
        Of the bootstrap.
    """
    baselines = {
        row["task"]: values[row["key"]]
        for row in selection.filter(pl.col("selector") == "none").iter_rows(named=True)
    }
    rows = []
    for condition in selection.iter_rows(named=True):
        for metric in METRICS:
            probes = values[condition["key"]][metric][tuple(sort_heads(condition["heads"]))]
            low, high = bootstrap_interval(probes, seed)
            rows.append(
                {name: condition[name] for name in SCHEMA if name in condition}
                | {
                    "model": model,
                    "split": "evaluate",
                    "metric": metric,
                    "value": float(probes.mean()),
                    "ci_low": low,
                    "ci_high": high,
                    "baseline": float(baselines[condition["task"]][metric][()].mean()),
                    "n_probes": len(probes),
                }
            )
    return pl.DataFrame(rows, schema=SCHEMA)


def generation_paths(paths: Sequence[str | Path]) -> dict[str, Path]:
    """Return the files of generations by key."""
    return {Path(path).stem: Path(path) for path in paths}


def main(snakemake: Any) -> None:
    """Write the ablation table of a model."""
    spec = json.loads(snakemake.params.spec)
    selection = read_selection(snakemake.input.selection)
    paths = generation_paths(snakemake.input.generations)
    values = {key: read_values(path) for key, path in paths.items()}
    table = ablation_table(snakemake.wildcards.model, selection, values, spec["seed"])
    write_table(table, snakemake.output[0], kind="ablation", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
