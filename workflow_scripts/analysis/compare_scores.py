"""Compare the rankings of pairs of scores: overlap.parquet and agreement.parquet."""

import json
from typing import Any

from workflow_scripts.analysis.comparison import compare_scores
from workflow_scripts.analysis.per_probe import read_per_probe
from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.script import run_script


def main(snakemake: Any) -> None:
    """Write the comparison of the pairs that the spec names."""
    spec = json.loads(snakemake.params.spec)
    scores = [read_per_probe(path) for path in snakemake.input]
    table = compare_scores(scores, spec["pairs"], spec["measures"], spec["k"], spec["seed"])
    write_table(table, snakemake.output[0], kind="comparison", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
