"""Run one shard of a dataset's probes through the model and store what every detector needs."""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
from tqdm import tqdm

from workflow_scripts.activations.capture_probes import (
    ProbeResult,
    capture_probes,
    probe_records,
    refuse_mostly_skipped,
    region_lengths,
    shard_arrays,
    token_texts,
)
from workflow_scripts.common.artifacts import read_table
from workflow_scripts.common.models import (
    LanguageModel,
    load_config,
    model_of_rule,
    most_positions,
    source_of_rule,
)
from workflow_scripts.common.script import log, run_script
from workflow_scripts.common.shards import (
    is_waiting,
    manifest_of,
    place_shard,
    shard_name,
    waiting_path,
    write_shard,
)
from workflow_scripts.lenses.layouts import read_lens


def shard_rows(probes: pl.DataFrame, shard: str) -> pl.DataFrame:
    """Return the probes of a shard named "003-of-008": neighbours stay together."""
    index, count = (int(part) for part in shard.split("-of-"))
    start, stop = (probes.height * i // count for i in (index, index + 1))
    return probes[start:stop]


def attributes(
    lm: LanguageModel, results: list[ProbeResult], probes: pl.DataFrame
) -> dict[str, Any]:
    """Return what the shard says of itself beside its arrays."""
    return {
        "probes": probe_records(results, probes),
        "token_text": token_texts(lm, results, probes),
        "n_layers": len(lm.layers),
        "n_heads": lm.layers[0].n_heads,
        "n_kv_heads": lm.layers[0].n_kv_heads,
    }


def main(snakemake: Any) -> None:
    """Write the shards of a job that are not there, and their manifests.

    Snakemake deletes the outputs of a job that fails. So each shard waits beside its place until the
    last is made: a job that is sent again goes on from there.
    """
    spec = json.loads(snakemake.params.spec)
    missing = [path for path in map(Path, snakemake.output.shards) if not path.exists()]
    unmade = [path for path in missing if not is_waiting(path, spec)]
    if unmade:
        make_shards(snakemake, unmade, spec)
    for path in missing:
        place_shard(path)


def make_shards(snakemake: Any, paths: list[Path], spec: dict[str, Any]) -> None:
    """Load the model and write shards where they wait for their place."""
    started = time.monotonic()
    table = read_table(snakemake.input.probes, kind="probes", spec=spec["probes"])
    positions = most_positions(load_config(source_of_rule(snakemake)))
    row = snakemake.config["models"][snakemake.wildcards.model]
    dataset = snakemake.wildcards.dataset
    lm = model_of_rule(snakemake)
    if "tuned_lens" in spec["directions"]:
        width = lm.unembedding().shape[1]
        lm.lens = read_lens(snakemake.input.lens[0], len(lm.layers), width)
    for path in paths:
        shard = shard_name(path)
        probes = shard_rows(table, shard)
        log.info("capture %s: %d probes on %s", path, probes.height, lm.device)
        with tqdm(total=probes.height, desc="capture", unit="probe", file=sys.stderr) as bar:
            results = capture_probes(
                lm,
                probes,
                directions=spec["directions"],
                batch_tokens=row["batch_tokens"],
                max_length=positions,
                progress=bar.update,
            )
        max_skipped = snakemake.config["probes"][dataset]["max_skipped"]
        refuse_mostly_skipped(results, max_skipped, f"probes {dataset}, shard {shard}")
        statuses = Counter(result.status for result in results)
        log.info("statuses: %s", dict(sorted(statuses.items())))
        arrays = shard_arrays(results)
        arrays["region_length"] = region_lengths(results, probes)
        waiting = waiting_path(path)
        write_shard(
            waiting,
            manifest_of(waiting),
            arrays,
            attributes(lm, results, probes),
            spec,
            device=str(lm.device),
            wall_seconds=round(time.monotonic() - started, 1),
        )
        started = time.monotonic()


if __name__ == "__main__":
    outputs = snakemake.output  # type: ignore[name-defined]  # noqa: F821
    run_script(
        main,
        snakemake,  # type: ignore[name-defined]  # noqa: F821
        artifacts=zip(outputs.shards, outputs.manifests, strict=True),
    )
