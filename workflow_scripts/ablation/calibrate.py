"""Take the calibration means of a model's heads."""

import json
from typing import Any

from workflow_scripts.ablation.calibration import calibrate, choose_prompts
from workflow_scripts.common.artifacts import read_table, write_table
from workflow_scripts.common.models import model_of_rule
from workflow_scripts.common.script import log, run_script


def main(snakemake: Any) -> None:
    """Write the mean query and output of every head."""
    spec = json.loads(snakemake.params.spec)
    probes = read_table(snakemake.input.probes, kind="probes", spec=spec["probes"])
    prompts = choose_prompts(
        probes, count=spec["count"], seed=spec["seed"], max_tokens=spec["max_tokens"]
    )
    log.info("calibrating on %d prompts", len(prompts))
    means = calibrate(model_of_rule(snakemake), prompts)
    write_table(means, snakemake.output[0], kind="calibration", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
