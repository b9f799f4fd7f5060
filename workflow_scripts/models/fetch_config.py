"""Fetch the config of a hub model, and refuse at once a model that cannot be had or used."""

from typing import Any

from workflow_scripts.common.artifacts import atomic_path
from workflow_scripts.common.config import check_heads
from workflow_scripts.common.models import load_config, source_of_rule
from workflow_scripts.common.script import run_script


def main(snakemake: Any) -> None:
    """Write the config, completed by the family's defaults."""
    config = load_config(source_of_rule(snakemake))
    check_heads(snakemake.config, snakemake.wildcards.model, config.to_dict())
    with atomic_path(snakemake.output[0]) as path:
        config.to_json_file(path, use_diff=False)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
