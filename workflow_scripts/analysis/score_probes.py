"""Write a score by probe, computed again from the shards (or from the effects of patching)."""

import json
from typing import Any

from workflow_scripts.analysis.per_probe import KIND, per_probe_table
from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.script import run_script
from workflow_scripts.scores.score import scores_of_evidence


def main(snakemake: Any) -> None:
    """Write the per-probe table of one score."""
    spec = json.loads(snakemake.params.spec)
    scores = scores_of_evidence(spec, snakemake.input.evidence)
    write_table(per_probe_table(scores), snakemake.output[0], kind=KIND, spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
