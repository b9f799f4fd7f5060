"""Patch every head of a model into corrupt runs of some probes."""

import json
import sys
from typing import Any

import numpy as np
import polars as pl
from tqdm import tqdm

from workflow_scripts.common.artifacts import read_table, write_table
from workflow_scripts.common.decoding import Conditions, PrefixRunner
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.models import model_of_rule
from workflow_scripts.common.script import log, run_script
from workflow_scripts.patching.corruption import corrupt
from workflow_scripts.patching.patch_heads import Effects, Pair, patch_heads
from workflow_scripts.probes.compose import answer_ids
from workflow_scripts.probes.prompts import Encoder


def choose_pairs(
    encoder: Encoder, probes: pl.DataFrame, corruption: str, count: int, seed: int
) -> list[tuple[str, Pair]]:
    """Return a seeded sample of probes with their corrupt twins, in the order of the table.

    Raises
    ------
    UserError
        If the corruption can be made for no probe.
    """
    pairs: list[tuple[int, str, Pair]] = []
    for index in np.random.default_rng(seed).permutation(probes.height):
        if len(pairs) == count:
            break
        probe = probes.row(int(index), named=True)
        twin = corrupt(probe, corruption, encoder.encode)
        if twin is not None:
            answer = answer_ids(encoder, probe["input_ids"][-1], probe["answer"])
            pair = Pair(probe["input_ids"], twin, probe["needle_start"], list(answer))
            pairs.append((int(index), probe["probe_id"], pair))
    if not pairs:
        raise UserError(
            f"patching: no probe allows the corruption '{corruption}': no other character's name has "
            "as many tokens; use corruption: filler"
        )
    return [(probe_id, pair) for _, probe_id, pair in sorted(pairs, key=lambda item: item[0])]


def effects_table(found: list[tuple[str, Effects]]) -> pl.DataFrame:
    """Return a row per probe, layer and head with the effect on both metrics."""
    tables = []
    for probe_id, effects in found:
        layers, heads = np.indices(effects.heads["logit"].shape, dtype=np.int32)
        columns: dict[str, Any] = {"layer": layers.ravel(), "head": heads.ravel()}
        for metric, values in effects.heads.items():
            columns[metric] = values.double().numpy().ravel()
        constants = [pl.lit(probe_id).alias("probe_id")]
        for metric in effects.heads:
            constants.append(pl.lit(effects.clean[metric]).alias(f"clean_{metric}"))
            constants.append(pl.lit(effects.corrupt[metric]).alias(f"corrupt_{metric}"))
        tables.append(pl.DataFrame(columns).with_columns(constants))
    return pl.concat(tables)


def main(snakemake: Any) -> None:
    """Write the patching effects of a model."""
    spec = json.loads(snakemake.params.spec)
    probes = read_table(snakemake.input.probes, kind="probes", spec=spec["probes"])
    lm = model_of_rule(snakemake)
    encoder = Encoder(lm.tokenizer, snakemake.wildcards.model)
    pairs = choose_pairs(encoder, probes, spec["corruption"], spec["count"], spec["seed"])
    log.info("patching %d heads on %d probes", len(lm.layers) * lm.n_heads, len(pairs))
    runner = PrefixRunner(lm, Conditions.unchanged())
    batch_tokens = snakemake.config["models"][snakemake.wildcards.model]["batch_tokens"]
    found = [
        (probe_id, patch_heads(lm, pair, runner, batch_tokens=batch_tokens))
        for probe_id, pair in tqdm(pairs, desc="patching", unit="probe", file=sys.stderr)
    ]
    kv_heads = lm.layers[0].n_kv_heads
    write_table(
        effects_table(found), snakemake.output[0], kind="patching", spec=spec, n_kv_heads=kv_heads
    )


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
