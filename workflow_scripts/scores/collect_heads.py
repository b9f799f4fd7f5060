"""Collect the score tables of a model into one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from workflow_scripts.common.artifacts import read_provenance, read_table, write_table
from workflow_scripts.common.script import run_script


def collect_heads(paths: Sequence[str | Path], specs: Mapping[str, Any]) -> pl.DataFrame:
    """Return the rows of several score tables, by score and rank.

    Parameters
    ----------
    paths
        Score tables of one model, at .../{score}.parquet.
    specs
        By score, what its table must have been made for.

    Raises
    ------
    UserError
        If one was made for something else.
    """
    tables = [read_table(path, kind="scores", spec=specs[Path(path).stem]) for path in paths]
    return pl.concat(tables).sort("score", "rank")


def main(snakemake: Any) -> None:
    """Write heads.parquet."""
    paths, spec = snakemake.input.scores, json.loads(snakemake.params.spec)
    counts = {Path(path).stem: read_provenance(path)["counts"] for path in paths}
    table = collect_heads(paths, spec)
    write_table(table, snakemake.output[0], kind="heads", spec=spec, counts=counts)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
