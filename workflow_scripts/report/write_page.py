"""Write the report page of a model."""

import json
from pathlib import Path
from typing import Any

import polars as pl

from workflow_scripts.ablation.metrics import LOSS
from workflow_scripts.ablation.selection import read_selection
from workflow_scripts.common.artifacts import atomic_path, read_provenance, read_table
from workflow_scripts.common.layout import figures_spec, model_spec, task_metric
from workflow_scripts.common.script import run_script
from workflow_scripts.report.catalogue import figures_of
from workflow_scripts.report.examples import examples
from workflow_scripts.report.headline import task_table
from workflow_scripts.report.page import (
    citation,
    figure_data,
    head_data,
    render,
    settings_text,
)

TABLES = ("ablation", "significance", "heads", "pass_rates")


def main(snakemake: Any) -> None:
    """Write report.html."""
    spec = json.loads(snakemake.params.spec)
    model = snakemake.wildcards.model
    tables = {kind: read_table(snakemake.input[kind], kind=kind) for kind in TABLES}
    provenance = read_provenance(snakemake.input.heads)
    ablation, heads = tables["ablation"], tables["heads"]
    selection = read_selection(snakemake.input.selection)
    # Generations lie at .../{task}/{key}.parquet.
    generations = {
        (path.parent.name, path.stem): read_table(path, kind="generations")
        for path in map(Path, snakemake.input.generations)
    }
    results = [
        task_table(task, task_metric(spec, task), ablation, tables["significance"])
        for task in sorted(spec["tasks"])
    ]
    asked = {
        result.task: examples(result, selection, generations, read_table(path, kind="probes"))
        for result, path in zip(results, snakemake.input.probes, strict=True)
        if result.metric != LOSS
    }
    how = ablation.filter(pl.col("mode") != "none").select("mode", "site").unique().sort("mode")
    page = render(
        "report.html.j2",
        model=model,
        n_layers=heads["layer"].max() + 1,  # type: ignore[operator]
        n_heads=heads["head"].max() + 1,  # type: ignore[operator]
        tables=results,
        asked=asked,
        traces=sorted(spec["traces"]),
        kv_plan=spec.get("kv_plan"),
        kv_checks=[
            row
            for path in snakemake.input.kv_check
            for row in read_table(path, kind="kv_check").to_dicts()
        ],
        how=[f"{mode} at {site}" for mode, site in how.iter_rows()],
        counts=provenance["counts"],
        data=head_data(heads),
        figures=figure_data(
            figures_of(**figures_spec(spec)),
            [Path(path).read_bytes() for path in snakemake.input.figures],
        ),
        settings=settings_text(spec),
        identity=settings_text(model_spec(spec, model)),
        versions=provenance["versions"],
        cite=citation(snakemake.input.citation),
    )
    with atomic_path(Path(snakemake.output[0])) as temporary:
        temporary.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
