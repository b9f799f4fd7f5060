"""Gather generations into the ablation table."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from workflow_scripts.ablation.metrics import LOSS, METRICS
from workflow_scripts.ablation.selection import CONDITION, read_selection, sort_heads
from workflow_scripts.ablation.statistics import bootstrap_interval, relative_to
from workflow_scripts.common.artifacts import read_provenance, read_table, write_table
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.script import run_script

SCHEMA: dict[str, Any] = {
    "model": pl.String,
    "task": pl.String,
    "split": pl.String,
    **CONDITION,
    "metric": pl.String,
    "value": pl.Float64,
    "ci_low": pl.Float64,
    "ci_high": pl.Float64,
    "baseline": pl.Float64,
    "relative": pl.Float64,
    "relative_low": pl.Float64,
    "relative_high": pl.Float64,
    "n_probes": pl.Int32,
    "heads": pl.List(pl.String),
}

Heads = tuple[str, ...]


@dataclass(frozen=True)
class Answers:
    """What a file of generations holds.

    Attributes
    ----------
    path
        The file.
    split
        Split of its probes.
    probe_ids
        By sorted set of heads, its probes in the order of the rows.
    values
        By sorted set of heads, then metric: a float64 value a probe. Those of answers, or the loss.
    """

    path: str
    split: str
    probe_ids: dict[Heads, list[str]]
    values: dict[Heads, dict[str, NDArray[np.float64]]]


def read_answers(path: str | Path, spec: Any = None) -> Answers:
    """Read a file of generations, made for a spec if one is given.

    Raises
    ------
    UserError
        If it is not one, was made for something else, or holds no answers.
    """
    table = read_table(path, kind="generations", spec=spec)
    if table.is_empty():
        raise UserError(f"{path}: holds no answers; delete it and run again")
    metrics = [metric for metric in (*METRICS, LOSS) if metric in table.columns]
    probe_ids, values = {}, {}
    for (heads,), rows in table.group_by("heads", maintain_order=True):
        condition = tuple(heads)
        probe_ids[condition] = rows["probe_id"].to_list()
        values[condition] = {metric: rows[metric].to_numpy() for metric in metrics}
    split = read_provenance(path)["spec"]["probes"]["row"]["split"]
    return Answers(str(path), split, probe_ids, values)


def read_all_answers(
    paths: Iterable[str | Path], tasks: Mapping[str, Any]
) -> dict[tuple[str, str], Answers]:
    """Read files of generations at .../{task}/{key}.parquet; return them by task and key.

    Parameters
    ----------
    tasks
        By task, what its generations must have been made for.
    """
    found = [(path.parent.name, path.stem, path) for path in map(Path, paths)]
    return {
        (task, key): read_answers(path, tasks[task] | {"key": key}) for task, key, path in found
    }


def ablation_table(
    model: str, selection: pl.DataFrame, answers: Mapping[tuple[str, str], Answers], seed: int
) -> pl.DataFrame:
    """Return the ablation table: a row per condition and metric, in the order of the selection.

    `relative` is the value over the baseline, with its paired interval, so that tasks of unlike
    difficulty compare; null where the baseline is 0. Damage lowers it, but raises that of a loss.

    Parameters
    ----------
    selection
        The conditions.
    answers
        By task and key of the generations.
    seed
        Of the bootstrap; conditions over the same probes share their resamples.

    Raises
    ------
    UserError
        If a file lacks a condition, or was answered over other probes than the unablated run.
    """
    baselines = {
        row["task"]: answers[row["task"], row["key"]]
        for row in selection.filter(pl.col("selector") == "none").iter_rows(named=True)
    }
    rows = []
    for condition in selection.iter_rows(named=True):
        found, baseline = answers[condition["task"], condition["key"]], baselines[condition["task"]]
        heads = tuple(sort_heads(condition["heads"]))
        check_condition(found, heads, baseline)
        for metric, values in found.values[heads].items():
            low, high = bootstrap_interval(values, seed)
            unablated = baseline.values[()][metric]
            relative = relative_to(unablated, values, seed)
            rows.append(
                {name: condition[name] for name in SCHEMA if name in condition}
                | {
                    "model": model,
                    "split": found.split,
                    "metric": metric,
                    "value": float(values.mean()),
                    "ci_low": low,
                    "ci_high": high,
                    "baseline": float(unablated.mean()),
                    "relative": relative[0],
                    "relative_low": relative[1],
                    "relative_high": relative[2],
                    "n_probes": len(values),
                }
            )
    return pl.DataFrame(rows, schema=SCHEMA)


def check_condition(found: Answers, heads: Heads, baseline: Answers) -> None:
    """Raise UserError unless a file has a condition, over the probes of the unablated run."""
    if heads not in found.values:
        raise UserError(
            f"{found.path}: lacks the answers with heads {', '.join(heads) or 'none'} ablated; "
            "delete it and run again"
        )
    if found.probe_ids[heads] != baseline.probe_ids[()]:
        raise UserError(
            f"{found.path}: answers other probes than {baseline.path}; delete both and run again"
        )


def main(snakemake: Any) -> None:
    """Write the ablation table of a model."""
    spec = json.loads(snakemake.params.spec)
    selection = read_selection(snakemake.input.selection, spec["selection"])
    answers = read_all_answers(snakemake.input.generations, spec["selection"]["tasks"])
    table = ablation_table(snakemake.wildcards.model, selection, answers, spec["seed"])
    write_table(table, snakemake.output[0], kind="ablation", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
