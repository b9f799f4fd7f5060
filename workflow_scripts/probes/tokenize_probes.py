"""Make the probes of a dataset for a model's tokenizer."""

import json
import logging
from typing import Any

from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.models import (
    load_config,
    load_tokenizer,
    most_positions,
    source_of_rule,
)
from workflow_scripts.common.script import run_script
from workflow_scripts.probes.build import build_probes
from workflow_scripts.probes.sources import refuse_long_questions, refuse_too_long

log = logging.getLogger("locos")


def main(snakemake: Any) -> None:
    """Read needles and haystacks, compose the probes and write them as one Parquet file."""
    spec = json.loads(snakemake.params.spec)
    source, row = source_of_rule(snakemake), snakemake.config["probes"][spec["dataset"]]
    positions = most_positions(load_config(source))
    where, model = f"probes.{spec['dataset']}", snakemake.wildcards.model
    refuse_too_long(row, positions, where, model)
    probes = build_probes(
        load_tokenizer(source),
        spec["dataset"],
        row,
        snakemake.input.needles,
        snakemake.input.haystacks,
        model=model,
        default_seed=spec["seed"],
    )
    refuse_long_questions(probes, row, positions, where, model)
    log.info("%s: %d probes", spec["dataset"], len(probes))
    write_table(probes, snakemake.output[0], kind="probes", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
