"""Write the result of a model as a page that a person can read, and print it."""

import sys
from pathlib import Path
from typing import Any

import polars as pl

from workflow_scripts.common.artifacts import atomic_path, read_provenance, read_table
from workflow_scripts.common.script import run_script

SHOWN = "accuracy"
"""Metric of the tables; the others stand in the Parquet file."""

TOP = 10


def task_section(task: str, table: pl.DataFrame) -> list[str]:
    """Return the lines of one task: a row a selector, a column a k."""
    rows = table.filter((pl.col("task") == task) & (pl.col("metric") == SHOWN))
    none = rows.filter(pl.col("selector") == "none").row(0, named=True)
    ks = sorted(set(rows["k"]) - {0})
    lines = [
        f"## {task}: {SHOWN} with k heads ablated ({none['n_probes']} probes)",
        "",
        f"none ablated: {_interval(none)}",
        "",
        "| ablated heads | " + " | ".join(f"k = {k}" for k in ks) + " |",
        "|---" * (len(ks) + 1) + "|",
    ]
    ablated = rows.filter(pl.col("selector") != "none")
    for (selector, end), group in ablated.group_by("selector", "end", maintain_order=True):
        name = (
            f"{selector} {end}" if end else f"{selector}, mean of {group['seed'].n_unique()} seeds"
        )
        cells = [_cell(group.filter(pl.col("k") == k)) for k in ks]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _cell(rows: pl.DataFrame) -> str:
    """Return a value with its interval, or the mean over seeds with their range."""
    if rows.height == 1:
        return _interval(rows.row(0, named=True))
    values = rows["value"].to_numpy()
    return f"{values.mean():.2f} ({values.min():.2f} to {values.max():.2f})"


def _interval(row: dict[str, Any]) -> str:
    return f"{row['value']:.2f} [{row['ci_low']:.2f}, {row['ci_high']:.2f}]"


def heads_section(heads: pl.DataFrame) -> list[str]:
    """Return the lines that list the best heads of every score."""
    lines = [f"## Top {TOP} heads (layer-head)", ""]
    for (score,), group in heads.group_by("score", maintain_order=True):
        best = group.sort("rank").head(TOP)
        names = [f"{layer}-{head}" for layer, head in best.select("layer", "head").iter_rows()]
        probes = best["n_probes"][0]
        lines.append(f"- {score} ({probes} probes): {', '.join(names)}")
    return [*lines, ""]


def summary(model: str, table: pl.DataFrame, heads: pl.DataFrame, counts: dict[str, Any]) -> str:
    """Return the summary page of a model, as Markdown."""
    lines = [
        f"# {model}",
        "",
        "In brackets: 95 % bootstrap intervals over probes; for random heads, the range over seeds.",
        "",
    ]
    for task in table["task"].unique(maintain_order=True):
        lines += task_section(task, table)
    lines += heads_section(heads)
    lines += ["## Detection probes by status", ""]
    for score, statuses in sorted(counts.items()):
        shown = ", ".join(f"{status} {count}" for status, count in sorted(statuses.items()))
        lines.append(f"- {score}: {shown}")
    return "\n".join(lines) + "\n"


def main(snakemake: Any) -> None:
    """Write and print the summary."""
    table = read_table(snakemake.input.ablation, kind="ablation")
    heads = read_table(snakemake.input.heads, kind="heads")
    counts = read_provenance(snakemake.input.heads)["counts"]
    page = summary(snakemake.wildcards.model, table, heads, counts)
    with atomic_path(Path(snakemake.output[0])) as temporary:
        temporary.write_text(page, encoding="utf-8")
    sys.stdout.write(page)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
