"""Measure the retrieval signal on the reference probes of a model."""

import json
from typing import Any

import polars as pl

from workflow_scripts.common.artifacts import read_table, write_table
from workflow_scripts.common.script import log, run_script
from workflow_scripts.common.shards import open_shard
from workflow_scripts.scores.ranking import top_heads
from workflow_scripts.traces.retrieval import PROBES_SCHEMA, auc_table, document_shares, kind_of


def main(snakemake: Any) -> None:
    """Write the share of every reference probe, and how well it tells them apart."""
    spec = json.loads(snakemake.params.spec)
    heads = top_heads(read_table(snakemake.input.score, kind="scores"), spec["k"])
    rows: list[tuple[Any, ...]] = []
    for role in ("present", "removed"):
        about = spec[role]
        for path in snakemake.input[role]:
            with open_shard(path, spec=about["spec"]) as shard:
                for index, share in document_shares(shard, heads).items():
                    probe = shard.probes[index]
                    kind = kind_of(probe["status"], removed=role == "removed")
                    rows.append((about["dataset"], probe["probe_id"], probe["status"], kind, share))
    probes = pl.DataFrame(rows, schema=PROBES_SCHEMA, orient="row")
    table = auc_table(probes, spec["seed"])
    log.info("retrieval signal, ROC AUC: %s", table.select("negative", "auc").rows())
    write_table(probes, snakemake.output.probes, kind="retrieval probes", spec=spec)
    write_table(table, snakemake.output.auc, kind="retrieval auc", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
