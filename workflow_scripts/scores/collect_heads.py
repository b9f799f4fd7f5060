"""Collect the score tables of a model into one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from workflow_scripts.common.artifacts import read_provenance, read_table, write_table
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.script import run_script


def collect_heads(paths: Sequence[str | Path], names: Sequence[str]) -> pl.DataFrame:
    """Return the rows of several score tables, by score and rank.

    Parameters
    ----------
    paths
        Score tables of one model.
    names
        The scores that they must hold.

    Raises
    ------
    UserError
        If they hold other scores, or scores of several models.
    """
    table = pl.concat([read_table(path, kind="scores") for path in paths])
    found = table["score"].unique().sort().to_list()
    if found != sorted(names):
        raise UserError(
            f"{paths[0]}: found scores {found}, expected {sorted(names)}; run them again"
        )
    models = table["model"].unique().sort().to_list()
    if len(models) != 1:
        raise UserError(f"{paths[0]}: scores of several models, {', '.join(models)}, in one table")
    return table.sort("score", "rank")


def main(snakemake: Any) -> None:
    """Write heads.parquet."""
    paths, spec = snakemake.input.scores, json.loads(snakemake.params.spec)
    counts = {}
    for path in paths:
        provenance = read_provenance(path)
        counts[provenance["spec"]["score"]] = provenance["counts"]
    table = collect_heads(paths, spec)
    write_table(table, snakemake.output[0], kind="heads", spec=spec, counts=counts)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
