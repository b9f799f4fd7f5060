"""Write one of the tables over heads.parquet."""

import json
from typing import Any

from workflow_scripts.analysis import views
from workflow_scripts.analysis.comparison import check_k
from workflow_scripts.common.artifacts import read_table, write_table
from workflow_scripts.common.script import run_script


def main(snakemake: Any) -> None:
    """Write the view that the `view` wildcard names."""
    view, spec = snakemake.wildcards.view, json.loads(snakemake.params.spec)
    heads = read_table(snakemake.input[0], kind="heads")
    if "k" in spec:
        check_k(spec["k"], heads.select("layer", "head").n_unique())
    arguments = {"ks" if name == "k" else name: value for name, value in spec.items()}
    table = getattr(views, view)(heads, **arguments)
    write_table(table, snakemake.output[0], kind=view, spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
