"""Write a score by probe, computed again from the shards (or from the effects of patching)."""

import json
from typing import Any

from workflow_scripts.analysis.per_probe import KIND, per_probe, per_probe_table
from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.script import run_script


def main(snakemake: Any) -> None:
    """Write the per-probe table of one score."""
    spec = json.loads(snakemake.params.spec)
    scores = per_probe(spec, list(snakemake.input.evidence))
    table = per_probe_table(scores)
    write_table(table, snakemake.output[0], kind=KIND, spec=spec, pool=scores.pool)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
