"""Choose the query heads of the KV groups that lose the needle."""

import json
from typing import Any

from workflow_scripts.ablation.selection import conditions_table
from workflow_scripts.common.artifacts import read_table, write_table
from workflow_scripts.common.script import run_script
from workflow_scripts.kv_plan.plan import SELECTOR, conditions


def main(snakemake: Any) -> None:
    """Write the selection of a model's KV plan."""
    spec = json.loads(snakemake.params.spec)
    scores = read_table(snakemake.input.score, kind="scores", spec=spec["score"])
    blinded = conditions(scores, spec["seed"], spec["budgets"])
    table = conditions_table([blinded], spec["tasks"], {SELECTOR: spec["intervention"]})
    write_table(table, snakemake.output[0], kind="selection", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
