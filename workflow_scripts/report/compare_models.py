"""Write the page that shows several models side by side."""

import json
from pathlib import Path
from typing import Any

import polars as pl

from workflow_scripts.common.artifacts import atomic_path, read_table
from workflow_scripts.common.script import run_script
from workflow_scripts.report.catalogue import Figure, main_score
from workflow_scripts.report.comparison import comparison_table, model_row
from workflow_scripts.report.page import figure_data, render
from workflow_scripts.report.plots import models_ablation, models_layers, style, svg
from workflow_scripts.report.series import with_metrics


def main(snakemake: Any) -> None:
    """Write compare.html."""
    spec = json.loads(snakemake.params.spec)
    models, metrics = spec["models"], spec["tasks"]
    ablation = pl.concat(read_table(path, kind="ablation") for path in snakemake.input.ablation)
    ablation = with_metrics(ablation, metrics)
    heads = pl.concat(read_table(path, kind="heads") for path in snakemake.input.heads)
    score = main_score(heads["score"].unique())
    tasks = ablation["task"].unique().sort().to_list()
    figures = [Figure("models_layers", None, "Models", f"Layers of the best heads by {score}")]
    with style():
        drawn = [svg(models_layers(heads, score))]
        if set(ablation["selector"]) != {"none"}:
            figures += [Figure("models_ablation", t, "Models", f"Ablation: {t}") for t in tasks]
            drawn += [svg(models_ablation(ablation, task)) for task in tasks]
    page = render(
        "compare.html.j2",
        models=[model_row(model, heads, score) for model in models],
        score=score,
        tables=[comparison_table(task, metrics[task], ablation, models) for task in tasks],
        figures=figure_data(figures, drawn),
    )
    with atomic_path(Path(snakemake.output[0])) as temporary:
        temporary.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
