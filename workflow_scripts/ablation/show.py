"""Write the result of a model as a page that a person can read, and print it."""

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from workflow_scripts.ablation.metrics import LOSS
from workflow_scripts.common.artifacts import atomic_path, read_provenance, read_table
from workflow_scripts.common.script import run_script

LOW = 0.1
"""Baseline below which an ablation has too little to take away."""

TOP = 10
"""Heads listed of each score."""

WIDTH = 100
"""Columns of a terminal that a line may take."""

LEGEND = (
    "Each task by its own metric. accuracy: share of answers with a ROUGE-1 recall of the gold answer "
    "above 0.5; exact_match: share of answers that are the gold answer; loss: mean cross-entropy of a "
    "text's tokens in nats, lower is better. In brackets: the 95 % bootstrap interval over probes. "
    "Random heads: mean over the seeds, in parentheses the least and the most."
)


def task_section(task: str, metric: str, table: pl.DataFrame) -> list[str]:
    """Return the lines of one task: a row a selector and end, a column a k.

    Selectors that choose a number of heads of their own (a list, a threshold) stand below the
    table, and so do explanations of every value of exactly 0.
    """
    all_rows = table.filter(pl.col("task") == task)
    rows = all_rows.filter(pl.col("metric") == metric)
    none = rows.filter(pl.col("selector") == "none").row(0, named=True)
    ablated = rows.filter(pl.col("selector") != "none")
    groups = {
        (selector, end): group
        for (selector, end), group in ablated.group_by("selector", "end", maintain_order=True)
    }
    ks = max((sorted(set(group["k"])) for group in groups.values()), key=len, default=[])
    swept = {name: group for name, group in groups.items() if set(group["k"]) <= set(ks)}
    lines = [
        f"## {task}: {_titled(metric)} over {none['n_probes']} probes (split {none['split']})",
        "",
        f"nothing ablated: {_interval(none)}",
        "",
    ]
    if metric != LOSS and none["value"] < LOW:
        lines += ["Too low to say anything: the intact model hardly ever answers right.", ""]
    if swept:
        cells = [
            [_label(*name, group), *(_cell(group.filter(pl.col("k") == k)) for k in ks)]
            for name, group in swept.items()
        ]
        # A selector that chose no head ran unablated: it names no mode.
        how = (
            ablated.filter(pl.col("mode") != "none")
            .select("mode", "site")
            .unique()
            .sort("mode", "site")
        )
        named = "; ".join(f"{mode} at {site}" for mode, site in how.iter_rows())
        lines += [f"k heads ablated ({named}):", ""]
        lines += table_lines(["heads", *(f"k = {k}" for k in ks)], cells)
    notes = [
        f"- {_label(*name, part)}, {k} heads: {_cell(part)}"
        for name, group in groups.items()
        if name not in swept
        for (k,), part in group.group_by("k", maintain_order=True)
    ]
    if metric != LOSS:
        notes += _zeros(metric, all_rows)
    return [*lines, *notes, ""] if notes else lines


def _titled(metric: str) -> str:
    """Return a metric's name, with its direction where damage raises it."""
    return f"{metric} (lower is better)" if metric == LOSS else metric


def table_lines(header: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned Markdown tables of at most `WIDTH` columns, one below the other.

    Columns that do not fit go into a further table; the first one, of labels, is repeated.
    """
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines: list[str] = []
    for columns in _fitting(widths):
        shown = [0, *columns]
        for row in (header, [f":{'-' * (width - 1)}" for width in widths], *cells):
            padded = (row[column].ljust(widths[column]) for column in shown)
            lines.append(f"| {' | '.join(padded)} |")
        lines.append("")
    return lines


def _fitting(widths: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of columns after the first that fit beside it; one at least."""
    start = taken = widths[0] + 4
    columns: list[int] = []
    for column in range(1, len(widths)):
        if columns and taken + widths[column] + 3 > WIDTH:
            yield columns
            columns, taken = [], start
        columns.append(column)
        taken += widths[column] + 3
    yield columns


def _label(selector: str, end: str | None, group: pl.DataFrame) -> str:
    if end is not None:
        return f"{selector} {end}"
    seeds = group["seed"].drop_nulls().n_unique()
    return f"{selector}, {seeds} seeds" if seeds else selector


def _cell(rows: pl.DataFrame) -> str:
    """Return a value with its interval, or the mean over seeds with their range."""
    if rows.is_empty():
        return ""
    if rows.height == 1:
        return _interval(rows.row(0, named=True))
    values = rows["value"].to_numpy()
    return f"{_number(values.mean())} ({_number(values.min())}-{_number(values.max())})"


def _interval(row: Mapping[str, Any]) -> str:
    return f"{_number(row['value'])} [{_number(row['ci_low'])}, {_number(row['ci_high'])}]"


def _number(value: float) -> str:
    """Return a share with two decimals and no zero before the point."""
    return f"{value:.2f}".removeprefix("0")


def _zeros(metric: str, rows: pl.DataFrame) -> list[str]:
    """Return what was said instead, for every condition with a value of exactly 0."""
    lines = []
    condition = ["selector", "end", "k", "seed"]
    wide = rows.pivot("metric", index=condition, values="value", maintain_order=True)
    for row in wide.filter(pl.col(metric) == 0).iter_rows(named=True):
        name = " ".join(str(row[key]) for key in ("selector", "end") if row[key] is not None)
        seed = "" if row["seed"] is None else f", seed {row['seed']}"
        lines.append(
            f"- {name}, k = {row['k']}{seed}: never right; empty {_number(row['empty'])}, another "
            f"character {_number(row['other_character'])}, {row['length']:.0f} tokens"
        )
    return lines


def heads_section(heads: pl.DataFrame) -> list[str]:
    """Return the lines that list the best heads of every score, and how many KV groups they are."""
    lines = [f"## Top {TOP} heads (layer-head)", ""]
    for (score,), group in heads.group_by("score", maintain_order=True):
        best = group.sort("rank").head(TOP)
        names = [f"{layer}-{head}" for layer, head in best.select("layer", "head").iter_rows()]
        kv_groups = best.select("layer", "kv_group").n_unique()
        lines += _wrapped(
            f"- {score} ({best['n_probes'][0]} probes; in {kv_groups} KV groups): "
            + ", ".join(names)
        )
    return [*lines, ""]


def status_section(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the lines that count the detection probes of every score by status."""
    lines = ["## Detection probes by status", ""]
    by_counts: dict[str, list[str]] = {}
    for score, statuses in sorted(counts.items()):
        shown = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
        by_counts.setdefault(f"{shown} (of {sum(statuses.values())})", []).append(score)
    for shown, scores in by_counts.items():
        lines += _wrapped(f"- {', '.join(scores)}: {shown}")
    return lines


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def summary(
    model: str,
    table: pl.DataFrame,
    metrics: Mapping[str, str],
    heads: pl.DataFrame,
    counts: Mapping[str, Mapping[str, int]],
) -> str:
    """Return the summary page of a model, as Markdown with lines of at most `WIDTH` columns.

    Parameters
    ----------
    table
        The ablation table.
    metrics
        By task, what it is judged by.
    heads
        The heads table.
    counts
        By score, how many detection probes ended with which status.
    """
    lines = [f"# {model}", "", *textwrap.wrap(LEGEND, WIDTH), ""]
    for task in table["task"].unique(maintain_order=True):
        lines += task_section(task, metrics[task], table)
    lines += heads_section(heads) + status_section(counts)
    return "\n".join(lines) + "\n"


def main(snakemake: Any) -> None:
    """Write and print the summary."""
    table = read_table(snakemake.input.ablation, kind="ablation")
    heads = read_table(snakemake.input.heads, kind="heads")
    counts = read_provenance(snakemake.input.heads)["counts"]
    metrics = json.loads(snakemake.params.spec)
    page = summary(snakemake.wildcards.model, table, metrics, heads, counts)
    with atomic_path(Path(snakemake.output[0])) as temporary:
        temporary.write_text(page, encoding="utf-8")
    sys.stdout.write(page)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
