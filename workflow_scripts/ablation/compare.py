"""Tell which ablations differ from none and from as many random heads, probe by probe."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from workflow_scripts.ablation.selection import UNABLATED, read_selection, sort_heads
from workflow_scripts.ablation.statistics import holm, paired_difference
from workflow_scripts.ablation.tabulate import Answers, read_all_answers
from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.script import run_script

REFERENCES = ("none", "random")

SCHEMA: dict[str, Any] = {
    "model": pl.String,
    "task": pl.String,
    "metric": pl.String,
    "selector": pl.String,
    "end": pl.String,
    "k": pl.Int32,
    "seed": pl.Int32,
    "reference": pl.String,
    "difference": pl.Float64,
    "ci_low": pl.Float64,
    "ci_high": pl.Float64,
    "p_value": pl.Float64,
    "p_holm": pl.Float64,
    "reason": pl.String,
}

Floats = NDArray[np.float64]


def comparison_table(
    model: str,
    selection: pl.DataFrame,
    answers: Mapping[tuple[str, str], Answers],
    random: frozenset[str],
    seed: int,
) -> pl.DataFrame:
    """Return a row per condition, metric and reference.

    Parameters
    ----------
    selection
        The conditions.
    answers
        By task and key of the generations.
    random
        Names of the selectors that draw heads at random. The reference "random" is each probe's mean
        over their seeds at the same k, in the same mode.
    seed
        Of the bootstrap.

    Returns
    -------
    polars.DataFrame
        `p_holm` is corrected over the conditions of a task, for each metric and reference. Where there
        is nothing to compare with, the values are null and `reason` says why. Damage makes the
        difference negative, but that of a loss positive.
    """
    rows: list[dict[str, Any]] = []
    for (task,), conditions in selection.group_by("task", maintain_order=True):
        by_condition = [
            answers[str(task), row["key"]].values[tuple(sort_heads(row["heads"]))]
            for row in conditions.iter_rows(named=True)
        ]
        for metric in by_condition[0]:
            values = [one[metric] for one in by_condition]
            for reference in REFERENCES:
                found = _compare(conditions, values, reference, random, seed)
                p_values = holm([row["p_value"] for row in found])
                rows += [
                    row | {"model": model, "task": task, "metric": metric, "p_holm": corrected}
                    for row, corrected in zip(found, p_values, strict=True)
                ]
    return pl.DataFrame(rows, schema=SCHEMA)


def _compare(
    conditions: pl.DataFrame,
    values: list[Floats],
    reference: str,
    random: frozenset[str],
    seed: int,
) -> list[dict[str, Any]]:
    """Compare every condition of a task with a reference, in one metric."""
    named = conditions.to_dicts()
    rows = []
    for row, found in zip(named, values, strict=True):
        if row["selector"] == "none" or (reference == "random" and row["selector"] in random):
            continue
        against = [
            other
            for candidate, other in zip(named, values, strict=True)
            if (
                candidate["selector"] == "none"
                if reference == "none"
                else candidate["selector"] in random and _alike(candidate, row)
            )
        ]
        base = {name: row[name] for name in ("selector", "end", "k", "seed")}
        base |= {"reference": reference, "p_value": None}
        if not against:
            reason = f"no random heads with k = {row['k']} in mode {row['mode']}"
            rows.append(base | {"reason": reason})
            continue
        difference = paired_difference(found, np.mean(against, axis=0), seed)
        rows.append(
            base
            | {
                "difference": difference.value,
                "ci_low": difference.ci_low,
                "ci_high": difference.ci_high,
                "p_value": difference.p_value,
            }
        )
    return rows


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two conditions do the same to as many heads."""
    return all(one[name] == other[name] for name in ("k", *UNABLATED))


def main(snakemake: Any) -> None:
    """Write the comparisons of a model."""
    spec = json.loads(snakemake.params.spec)
    selection = read_selection(snakemake.input.selection, spec["selection"])
    answers = read_all_answers(snakemake.input.generations, spec["selection"]["tasks"])
    table = comparison_table(
        snakemake.wildcards.model, selection, answers, frozenset(spec["random"]), spec["seed"]
    )
    write_table(table, snakemake.output[0], kind="significance", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
