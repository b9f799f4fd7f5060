"""Choose the heads to ablate from the rankings."""

import json
from typing import Any

from workflow_scripts.ablation.selection import selection_table
from workflow_scripts.common.artifacts import read_table, write_table
from workflow_scripts.common.script import run_script


def main(snakemake: Any) -> None:
    """Write the selection of a model."""
    spec = json.loads(snakemake.params.spec)
    heads = read_table(snakemake.input.heads, kind="heads", key=spec["heads"])
    write_table(selection_table(spec, heads), snakemake.output[0], kind="selection", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
