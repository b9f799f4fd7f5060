"""A few questions with the model's answers, intact and ablated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from workflow_scripts.ablation.metrics import verdict_of
from workflow_scripts.ablation.selection import sort_heads
from workflow_scripts.report.headline import TaskTable

COUNT = 4


@dataclass(frozen=True)
class Example:
    """A question of a task.

    Attributes
    ----------
    question, answer
        From the probe.
    intact, ablated
        What the model said, and what it said with the heads of the headline ablated; None where no
        selector takes top heads.
    intact_right, ablated_right
        Whether that counts as right.
    """

    question: str
    answer: str
    intact: str
    intact_right: bool
    ablated: str | None
    ablated_right: bool | None


def examples(
    table: TaskTable,
    selection: pl.DataFrame,
    generations: Mapping[tuple[str, str], pl.DataFrame],
    probes: pl.DataFrame,
) -> list[Example]:
    """Return the first `COUNT` probes of a task whose questions differ, with their answers.

    Parameters
    ----------
    table
        The headline, which names selector and k.
    selection
        The conditions.
    generations
        By task and key, the generations.
    probes
        The probes of the task.
    """
    conditions = selection.filter(pl.col("task") == table.task)
    verdict = verdict_of(table.metric)
    intact = _answers(conditions.filter(pl.col("selector") == "none"), generations, verdict)
    ablated: dict[str, tuple[str, bool]] = {}
    if table.selector is not None:
        chosen = conditions.filter(
            pl.col("selector") == table.selector, pl.col("end") == "top", pl.col("k") == table.k
        )
        ablated = _answers(chosen, generations, verdict)
    shown = probes.unique("question", keep="first", maintain_order=True).head(COUNT)
    rows = shown.select("probe_id", "question", "answer").iter_rows()
    return [
        Example(question, answer, *intact[probe], *ablated.get(probe, (None, None)))
        for probe, question, answer in rows
    ]


def _answers(
    condition: pl.DataFrame, generations: Mapping[tuple[str, str], pl.DataFrame], verdict: str
) -> dict[str, tuple[str, bool]]:
    """Return by probe what was said under a condition, and whether it was right by a metric."""
    row = condition.row(0, named=True)
    heads = sort_heads(row["heads"])
    table = generations[row["task"], row["key"]]
    rows = table.select("heads", "probe_id", "text", verdict).iter_rows()
    return {probe: (text, right == 1) for found, probe, text, right in rows if found == heads}
