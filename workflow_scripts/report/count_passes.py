"""Count the probes that the intact model answers, by length and depth."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from workflow_scripts.ablation.metrics import LOSS
from workflow_scripts.common.artifacts import read_table, write_table
from workflow_scripts.common.script import run_script
from workflow_scripts.common.shards import open_shard
from workflow_scripts.report.pass_rates import detection_passes, pass_rates, task_passes


def main(snakemake: Any) -> None:
    """Write pass_rates.parquet."""
    captured: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in map(Path, snakemake.input.shards):
        # Shards lie at .../{dataset}/{key}/{shard}.zarr.zip, generations at .../{task}/{key}.parquet.
        with open_shard(path) as shard:
            captured[path.parents[1].name] += shard.probes
    passes = [detection_passes(dataset, probes) for dataset, probes in sorted(captured.items())]
    spec = json.loads(snakemake.params.spec)
    for probes, answers in zip(snakemake.input.probes, snakemake.input.generations, strict=True):
        task = Path(answers).parent.name
        if spec[task] != LOSS:  # a text is not answered
            tables = read_table(probes, kind="probes"), read_table(answers, kind="generations")
            passes.append(task_passes(task, spec[task], *tables))
    write_table(pass_rates(passes), snakemake.output[0], kind="pass_rates", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
