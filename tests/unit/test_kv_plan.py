"""The KV plan by hand: two layers of four heads, two heads a KV group."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import transformers as tf
from report_tables import LOCOS, heads_table
from tiny_models import COMMON, random_model
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from workflow_scripts.ablation.tabulate import Answers
from workflow_scripts.common.errors import UserError
from workflow_scripts.kv_plan.cache import CacheShape, cache_shape
from workflow_scripts.kv_plan.check import check_table
from workflow_scripts.kv_plan.plan import conditions, kept_groups, plan_table, rank_groups

SCORES = heads_table().filter(score="locos")
# Means of two heads each: 3.0, 0.025, -0.05, -1.35.
ORDER = [(1, 0), (0, 1), (0, 0), (1, 1)]
# A layer that looks back 16 tokens, and one that looks at all.
CACHE = CacheShape(head_dim=8, windows=(16, None))
BEST, SECOND, THIRD, WORST = ("1-0", "1-1"), ("0-2", "0-3"), ("0-0", "0-1"), ("1-2", "1-3")


def plan() -> pl.DataFrame:
    return plan_table(
        rank_groups(SCORES, 1),
        [75, 25, 50],
        CACHE,
        context_length=100,
        bytes_per_number=2,
        kept_tokens=10,
    )


def test_a_group_scores_the_mean_of_its_heads_and_holds_its_share_of_what_is_above_zero() -> None:
    ranked = rank_groups(SCORES, 1)
    assert ranked.select("layer", "kv_group").rows() == ORDER
    means = [np.mean([LOCOS[layer, 2 * group + i] for i in (0, 1)]) for layer, group in ORDER]
    np.testing.assert_allclose(ranked["value"], means)
    np.testing.assert_allclose(ranked["share"], [3 / 3.025, 0.025 / 3.025, 0, 0])
    assert ranked["rank"].to_list() == [1, 2, 3, 4]


def test_groups_without_anything_above_zero_have_no_share() -> None:
    ranked = rank_groups(SCORES.with_columns(-pl.col("value").abs()), 1)
    assert ranked["share"].to_list() == [None] * 4


def test_equal_groups_are_not_ranked_by_layer() -> None:
    flat = SCORES.with_columns(pl.lit(0.0).alias("value"))
    orders = {
        tuple(rank_groups(flat, seed).select("layer", "kv_group").rows()) for seed in range(9)
    }
    assert len(orders) > 1


@pytest.mark.parametrize(
    ("budget", "n_groups", "kept"),
    [(25, 4, 1), (50, 4, 2), (75, 4, 3), (25, 90, 22), (75, 90, 68), (1, 4, 1), (99, 4, 3)],
)
def test_a_budget_is_a_share_of_the_groups_and_leaves_one_on_each_side(
    budget: int, n_groups: int, kept: int
) -> None:
    assert kept_groups(budget, n_groups) == kept


def test_a_budget_keeps_the_best_groups_and_saves_the_tokens_of_the_others() -> None:
    rows = plan()
    assert rows["budget"].unique(maintain_order=True).to_list() == [25, 50, 75]
    kept = {b: rows.filter(budget=b, action="keep")["rank"].to_list() for b in (25, 50, 75)}
    assert kept == {25: [1], 50: [1, 2], 75: [1, 2, 3]}
    # Keys and values of 8 numbers of 2 bytes: 32 bytes a token. Of 16 or 100 tokens 10 are kept.
    at_25 = rows.filter(budget=25).select("layer", "tokens", "bytes_full", "bytes_saved").rows()
    assert at_25 == [
        (1, 100, 3200, 0),
        (0, 16, 512, 32 * 6),
        (0, 16, 512, 32 * 6),
        (1, 100, 3200, 32 * 90),
    ]


def test_a_window_shorter_than_the_kept_tokens_saves_nothing() -> None:
    rows = plan_table(
        rank_groups(SCORES, 1),
        [25],
        CACHE,
        context_length=100,
        bytes_per_number=2,
        kept_tokens=20,
    )
    assert rows["bytes_saved"].to_list() == [0, 0, 0, 32 * 80]


def test_the_check_compares_as_many_of_the_worst_and_of_the_best_groups() -> None:
    sets = {(s.end, s.k): s.heads for s in conditions(SCORES, 1, [25, 50, 75])}
    expected = {
        ("bottom", 2): WORST,
        ("bottom", 4): (*THIRD, *WORST),
        ("bottom", 6): (*THIRD, *SECOND, *WORST),
        ("top", 2): BEST,
        ("top", 4): (*SECOND, *BEST),
    }
    assert sets.keys() == expected.keys()
    assert {key: set(heads) for key, heads in sets.items()} == {
        key: set(heads) for key, heads in expected.items()
    }


# A value a probe, by the groups that lose the needle.
ANSWERS = {
    frozenset(WORST): [1, 1, 1, 0],
    frozenset((*THIRD, *WORST)): [1, 1, 0, 0],
    frozenset((*SECOND, *THIRD, *WORST)): [1, 0, 0, 0],
    frozenset(BEST): [0, 0, 0, 0],
    frozenset((*BEST, *SECOND)): [0, 0, 1, 0],
}
PROBES = ["a", "b", "c", "d"]


def answers(values: dict, probes: list[str] = PROBES) -> Answers:
    found = {
        tuple(sorted(heads)): {"accuracy": np.array(row, float)} for heads, row in values.items()
    }
    return Answers("a file", "evaluate", dict.fromkeys(found, probes), found)


def check(values: dict, probes: list[str] = PROBES) -> pl.DataFrame:
    intact = answers({(): [1, 1, 1, 0]})
    found = {"find": answers(values, probes)}
    return check_table(plan(), SCORES, found, {"find": intact}, {"find": "accuracy"}, 1)


def test_the_check_tells_what_compression_costs_and_that_the_kept_groups_matter_more() -> None:
    table = check(ANSWERS)
    columns = ("budget", "n_kept", "n_compressed", "n_compared", "compressed", "worst", "best")
    assert table.select(columns).rows() == [
        (25, 1, 3, 1, 0.25, 0.75, 0.0),
        (50, 2, 2, 2, 0.5, 0.5, 0.25),
        (75, 3, 1, 1, 0.75, 0.75, 0.0),
    ]
    assert table["difference"].to_list() == [-0.75, -0.25, -0.75]
    assert table["baseline"].to_list() == [0.75] * 3
    np.testing.assert_allclose(table["share_kept"], [3 / 3.025, 1, 1])
    assert table["bytes_full"].to_list() == [2 * 512 + 2 * 3200] * 3
    assert table["bytes_saved"].to_list() == [2 * 192 + 2880, 192 + 2880, 2880]
    # Paired by probe: at 50 % one probe gains and two lose, so the sign is open.
    at_50 = table.row(1, named=True)
    assert at_50["difference_low"] == -1 and at_50["difference_high"] == 0.5
    assert at_50["p_value"] > 0.05


def test_answers_to_other_probes_are_refused() -> None:
    with pytest.raises(UserError, match="answers other probes"):
        check(ANSWERS, ["a", "b", "c", "e"])


def test_answers_without_a_condition_are_refused() -> None:
    with pytest.raises(UserError, match="lacks the answers with heads 1-0, 1-1 ablated"):
        check({heads: row for heads, row in ANSWERS.items() if heads != frozenset(BEST)})


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "phi3", "gpt_oss", "gpt2"])
def test_a_layer_caches_what_transformers_own_cache_keeps(family: str) -> None:
    config = random_model(family).model.config
    shape = cache_shape(config)
    expected = tuple(
        layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        for layer in DynamicCache(config=config).layers
    )
    assert shape == CacheShape(head_dim=8, windows=expected)


def test_a_head_dimension_is_read_where_it_is_not_the_width_over_the_heads() -> None:
    shape = cache_shape(tf.Qwen3Config(**COMMON | {"head_dim": 32}))
    assert shape == CacheShape(head_dim=32, windows=(None, None))
