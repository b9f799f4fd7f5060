"""Run a task's probes under every condition of one file: measure the answers, or the loss of texts."""

import json
import sys
from typing import Any

import polars as pl
from tqdm import tqdm

from workflow_scripts.ablation.calibration import read_means
from workflow_scripts.ablation.generation import generate
from workflow_scripts.ablation.interventions import OUTPUT_MODES, Intervention
from workflow_scripts.ablation.losses import losses
from workflow_scripts.ablation.metrics import LOSS, METRICS, measure
from workflow_scripts.ablation.selection import (
    UNABLATED,
    conditions_of,
    parse_head,
    read_selection,
)
from workflow_scripts.common.artifacts import read_table, write_table
from workflow_scripts.common.decoding import Generation
from workflow_scripts.common.models import LanguageModel, model_of_rule
from workflow_scripts.common.script import log, run_script

_CONDITION: dict[str, Any] = {
    "heads": pl.List(pl.String),
    "mode": pl.String,
    "site": pl.String,
    "factor": pl.Float64,
    "calibration": pl.String,
    "probe_id": pl.String,
}

SCHEMA: dict[str, Any] = {
    **_CONDITION,
    "generated_ids": pl.List(pl.Int32),
    "stopped": pl.Boolean,
    "status": pl.String,
    "text": pl.String,
} | dict.fromkeys(METRICS, pl.Float64)

LOSS_SCHEMA: dict[str, Any] = {**_CONDITION, LOSS: pl.Float64}
"""Columns for texts, which are read and not answered."""


def intervention_for(
    snakemake: Any, head_sets: list[list[str]], how: dict[str, Any], probes: pl.DataFrame
) -> Intervention:
    """Return the intervention of a job, with the calibration means where the mode needs them."""
    means = {}
    mode, site, factor = how["mode"], how["site"], how["factor"]
    if mode.startswith("mean_"):
        table = read_table(snakemake.input.calibration[0], kind="calibration")
        means = read_means(table, "output" if mode in OUTPUT_MODES else site)
    spans = zip(probes["needle_start"], probes["needle_end"], strict=True)
    return Intervention(
        mode=mode,
        site=site,
        head_sets=[[parse_head(name) for name in heads] for heads in head_sets],
        means=means,
        factor=1.0 if factor is None else factor,
        needles=[None if start is None else (start, stop) for start, stop in spans],
    )


def status_of(generation: Generation) -> str:
    """Return how an answer ended; without an answer, what its metrics measure is empty."""
    if not generation.closed:
        return "unclosed_thinking"
    return "answered" if generation.stopped else "truncated"


def generations_table(
    lm: LanguageModel,
    probes: pl.DataFrame,
    how: dict[str, Any],
    head_sets: list[list[str]],
    answers: list[list[Generation]],
) -> pl.DataFrame:
    """Return the table of generations: a row per set of heads and probe, in order."""
    rows = []
    for heads, generations in zip(head_sets, answers, strict=True):
        for probe, generation in zip(probes.iter_rows(named=True), generations, strict=True):
            text = lm.decode(generation.ids, skip_special_tokens=True)
            row = {
                "heads": heads,
                **how,
                "probe_id": probe["probe_id"],
                "generated_ids": generation.ids,
                "stopped": generation.stopped,
                "status": status_of(generation),
                "text": text,
            }
            rows.append(
                row
                | measure(
                    lm.decode(generation.answer_ids, skip_special_tokens=True),
                    len(generation.answer_ids),
                    probe["answer"],
                    probe["aliases"],
                    probe["other_answers"],
                )
            )
    return pl.DataFrame(rows, schema=SCHEMA)


def losses_table(
    probes: pl.DataFrame, how: dict[str, Any], head_sets: list[list[str]], found: list[list[float]]
) -> pl.DataFrame:
    """Return the table of losses: a row per set of heads and text, in order."""
    rows = [
        {"heads": heads, **how, "probe_id": probe, LOSS: loss}
        for heads, values in zip(head_sets, found, strict=True)
        for probe, loss in zip(probes["probe_id"], values, strict=True)
    ]
    return pl.DataFrame(rows, schema=LOSS_SCHEMA)


def main(snakemake: Any) -> None:
    """Write one file of generations."""
    task, key = snakemake.wildcards.task, snakemake.wildcards.key
    selection = read_selection(snakemake.input.selection)
    head_sets = list(conditions_of(selection, task, key))
    how = selection.filter(pl.col("key") == key).select(*UNABLATED).row(0, named=True)
    spec = json.loads(snakemake.params.spec)
    probes = read_table(snakemake.input.probes, kind="probes", spec=spec["probes"])
    intervention = intervention_for(snakemake, head_sets, how, probes)
    lm = model_of_rule(snakemake)
    log.info("%s: %d conditions x %d probes", task, len(head_sets), probes.height)
    prompts = probes["input_ids"].to_list()
    batch_tokens = snakemake.config["models"][snakemake.wildcards.model]["batch_tokens"]
    with tqdm(total=len(head_sets) * len(prompts), desc=task, unit="probe", file=sys.stderr) as bar:
        batches: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": bar.update}
        if spec["probes"]["row"]["format"] == "text":
            found = losses(lm, prompts, intervention, **batches)
            table = losses_table(probes, how, head_sets, found)
        else:
            answers = generate(
                lm,
                prompts,
                intervention,
                max_new_tokens=max(probes["max_new_tokens"]),
                max_thinking_tokens=max(probes["max_thinking_tokens"]),
                **batches,
            )
            table = generations_table(lm, probes, how, head_sets, answers)
    write_table(table, snakemake.output[0], kind="generations", spec={**spec, "key": key})


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
