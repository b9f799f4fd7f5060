"""Write where the heads' contributions come from, for every dataset that heads are scored on."""

import json
from typing import Any

import polars as pl

from workflow_scripts.analysis.provenance import provenance_of
from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.script import run_script


def main(snakemake: Any) -> None:
    """Write provenance.parquet: `provenance_of` each dataset, after a column model."""
    specs = json.loads(snakemake.params.spec)
    tables = [
        provenance_of(dataset, snakemake.input[f"of_{dataset}"], spec=spec)
        for dataset, spec in sorted(specs.items())
    ]
    table = pl.concat(tables).select(pl.lit(snakemake.wildcards.model).alias("model"), pl.all())
    write_table(table, snakemake.output[0], kind="provenance", spec=specs)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
