"""Make the probes of a dataset for a model's tokenizer."""

from __future__ import annotations

import json
import logging
from typing import Any

from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.models import load_tokenizer
from workflow_scripts.common.script import run_script
from workflow_scripts.probes.build import build_probes

log = logging.getLogger("locos")


def main(snakemake: Any) -> None:
    """Read needles and haystacks, compose the probes and write them as one Parquet file."""
    spec = json.loads(snakemake.params.spec)
    probes = build_probes(
        load_tokenizer(snakemake.params.tokenizer),
        spec["dataset"],
        spec["probes"],
        snakemake.input.needles,
        snakemake.input.haystacks,
        model=snakemake.wildcards.model,
        default_seed=spec["seed"],
    )
    log.info("%s: %d probes", spec["dataset"], len(probes))
    write_table(probes, snakemake.output[0], kind="probes", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
