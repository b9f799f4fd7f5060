"""Write the KV plan of a model, and the check of it by ablation."""

import json
from typing import Any

from workflow_scripts.ablation.selection import read_selection
from workflow_scripts.ablation.tabulate import Answers, read_all_answers
from workflow_scripts.common.artifacts import read_table, write_table
from workflow_scripts.common.models import load_config, source_of_rule
from workflow_scripts.common.script import log, run_script
from workflow_scripts.estimate.costs import BYTES
from workflow_scripts.kv_plan.cache import cache_shape
from workflow_scripts.kv_plan.check import check_table
from workflow_scripts.kv_plan.plan import plan_table, rank_groups


def by_task(paths: list[str], tasks: dict[str, Any]) -> dict[str, Answers]:
    """Return files of generations, one a task, by task."""
    return {task: answers for (task, _), answers in read_all_answers(paths, tasks).items()}


def main(snakemake: Any) -> None:
    """Write kv_plan.parquet and kv_check.parquet."""
    spec = json.loads(snakemake.params.spec)
    selection = spec["selection"]
    read_selection(snakemake.input.selection, selection)
    scores = read_table(snakemake.input.score, kind="scores", spec=selection["score"])
    plan = plan_table(
        rank_groups(scores, selection["seed"]),
        selection["budgets"],
        cache_shape(load_config(source_of_rule(snakemake))),
        context_length=spec["context_length"],
        bytes_per_number=BYTES[spec["dtype"]],
        kept_tokens=spec["kept_tokens"],
    )
    check = check_table(
        plan,
        scores,
        by_task(snakemake.input.blinded, selection["tasks"]),
        by_task(snakemake.input.unablated, selection["tasks"]),
        spec["metrics"],
        selection["seed"],
    )
    log.info(
        "best less worst KV groups: %s", check.select("task", "budget", "difference", "p_value")
    )
    write_table(plan, snakemake.output.plan, kind="kv_plan", spec=spec)
    write_table(check, snakemake.output.check, kind="kv_check", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
