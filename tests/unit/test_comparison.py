"""Comparisons of conditions by hand: who is compared with whom, and over which probes."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from workflow_scripts.ablation.compare import comparison_table
from workflow_scripts.ablation.metrics import METRICS
from workflow_scripts.ablation.selection import SCHEMA
from workflow_scripts.ablation.tabulate import Answers

NONE = [1.0, 1.0, 1.0, 0.0]
TOP = [0.0, 0.0, 1.0, 0.0]
SEEDS = {42: [1.0, 0.0, 1.0, 0.0], 43: [1.0, 1.0, 0.0, 0.0]}


def condition(selector: str, k: int, seed: int | None, heads: list[str]) -> tuple[object, ...]:
    return ("t", selector, None, k, seed, "mean_query", "q_proj", None, None, heads, "key")


@pytest.fixture
def table() -> pl.DataFrame:
    rows = [
        condition("none", 0, None, []),
        condition("locos", 1, None, ["1-0"]),
        condition("locos", 2, None, ["1-0", "1-1"]),
        condition("random", 1, 42, ["0-0"]),
        condition("random", 1, 43, ["0-1"]),
    ]
    values = {
        (): NONE,
        ("1-0",): TOP,
        ("1-0", "1-1"): TOP,
        ("0-0",): SEEDS[42],
        ("0-1",): SEEDS[43],
    }
    arrays = {k: {metric: np.array(v) for metric in METRICS} for k, v in values.items()}
    answers = Answers("p", "evaluate", {k: ["a", "b", "c", "d"] for k in values}, arrays)
    selection = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    found = comparison_table("m", selection, {("t", "key"): answers}, frozenset({"random"}), 1)
    return found.filter(pl.col("metric") == "accuracy")


def test_a_condition_is_compared_with_none_over_its_own_probes(table: pl.DataFrame) -> None:
    row = table.filter(
        (pl.col("selector") == "locos") & (pl.col("k") == 1) & (pl.col("reference") == "none")
    )
    assert row["difference"].to_list() == [-0.5]  # 1/4 against 3/4


def test_random_is_the_mean_over_seeds_at_the_same_k(table: pl.DataFrame) -> None:
    row = table.filter((pl.col("selector") == "locos") & (pl.col("reference") == "random"))
    # Per probe, random is 1, .5, .5, 0; top is 0, 0, 1, 0: the mean difference is -.25.
    assert row.filter(pl.col("k") == 1)["difference"].to_list() == [-0.25]


def test_without_random_heads_of_that_k_the_reason_is_given(table: pl.DataFrame) -> None:
    row = table.filter((pl.col("k") == 2) & (pl.col("reference") == "random"))
    assert row["difference"].to_list() == [None]
    assert row["reason"].to_list() == ["no random heads with k = 2 in mode mean_query"]


def test_holm_corrects_over_the_conditions_of_a_task(table: pl.DataFrame) -> None:
    none = table.filter(pl.col("reference") == "none")
    assert none.height == 4  # two of locos, two seeds
    smallest = none.sort("p_value").row(0, named=True)
    assert smallest["p_holm"] == pytest.approx(min(1.0, 4 * smallest["p_value"]))
    assert all(row["p_holm"] >= row["p_value"] for row in none.iter_rows(named=True))
