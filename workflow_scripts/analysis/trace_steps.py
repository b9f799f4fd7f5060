"""Write the values of every formula over answer steps, by answer token."""

import json
from typing import Any

import polars as pl

from workflow_scripts.analysis.steps import values_by_step
from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.script import run_script
from workflow_scripts.scores.settings import parse_score


def main(snakemake: Any) -> None:
    """Write steps.parquet: `values_by_step` of each score, after a column model."""
    specs = json.loads(snakemake.params.spec)
    tables = [
        values_by_step(
            snakemake.input[f"of_{spec['score']}"],
            parse_score(spec["score"], spec["row"]),
            spec=spec["activations"]["spec"],
            seed=spec["seed"],
        )
        for spec in specs
    ]
    table = pl.concat(tables).select(pl.lit(snakemake.wildcards.model).alias("model"), pl.all())
    write_table(table, snakemake.output[0], kind="steps", spec=specs)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
