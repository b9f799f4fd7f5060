"""Which heads are chosen, and which generations share a file."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import polars as pl
import pytest

from workflow_scripts.ablation.selection import (
    HeadSet,
    conditions_of,
    head_sets,
    matched_heads,
    random_order,
    selection_table,
)
from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.errors import UserError

LAYERS, HEADS = 4, 3
GRID = [f"{layer}-{head}" for layer in range(LAYERS) for head in range(HEADS)]

LOCOS = {"3-1": 9.0, "2-0": 5.0, "3-2": 2.0, "0-0": 0.5, "1-1": -0.1, "1-0": -7.0}
"""Values by head; the others have 0 and a rank that their place does not tell."""


def score_rows(score: str, values: dict[str, float], tie_seed: int) -> list[dict[str, Any]]:
    """Return the rows of a score, ties ranked in a shuffled order."""
    shuffled = np.random.default_rng(tie_seed).permutation(GRID).tolist()
    best_first = sorted(shuffled, key=lambda name: -values.get(name, 0.0))
    return [
        {
            "model": "m",
            "score": score,
            "layer": int(name.split("-")[0]),
            "head": int(name.split("-")[1]),
            "value": values.get(name, 0.0),
            "rank": place + 1,
        }
        for place, name in enumerate(best_first)
    ]


def heads_table() -> pl.DataFrame:
    """Return two scores, their rows in no order."""
    rows = score_rows("locos", LOCOS, 1) + score_rows("alpha", {"3-1": 2.0, "0-2": 1.0}, 2)
    return pl.DataFrame(rows).sample(fraction=1.0, shuffle=True, seed=3)


def spec_of(
    selectors: dict[str, Any], how: dict[str, Any] = MappingProxyType({}), **changes: Any
) -> dict[str, Any]:
    return {
        "model": "m",
        "selectors": selectors,
        "k": [1, 3],
        "interventions": {
            name: {"mode": "mean_query", "site": "q_proj", "factor": None, "calibration": "c"} | how
            for name in selectors
        },
        "tasks": {"nonliteral": {"probes": "a"}, "literal": {"probes": "b"}},
        "seed": 42,
    } | changes


def chosen(selectors: dict[str, Any], **changes: Any) -> list[list[HeadSet]]:
    """Return the conditions without `none`."""
    return head_sets(spec_of(selectors, **changes), heads_table())[1:]


def sets_of(row: dict[str, Any], **changes: Any) -> list[list[str]]:
    """Return the heads of each condition of a selector with one end."""
    (group,) = chosen({"one": row}, **changes)
    return [list(condition.heads) for condition in group]


# --- selectors


def test_top_takes_the_largest_values_best_first() -> None:
    assert sets_of({"score": "locos", "ends": ["top"]}) == [["3-1"], ["3-1", "2-0", "3-2"]]


def test_bottom_takes_the_smallest_values_worst_first() -> None:
    assert sets_of({"score": "locos", "ends": ["bottom"]}, k=[1, 2]) == [["1-0"], ["1-0", "1-1"]]


def test_smallest_takes_the_values_nearest_to_zero() -> None:
    zeros = [name for name in GRID if name not in LOCOS]
    (found,) = sets_of({"score": "locos", "ends": ["smallest"]}, k=[len(zeros) + 2])
    assert sorted(found[: len(zeros)]) == sorted(zeros)
    assert found[len(zeros) :] == ["1-1", "0-0"]


def test_ties_follow_the_rank_column_and_not_the_layer() -> None:
    ranks = {(f"{r['layer']}-{r['head']}"): r["rank"] for r in score_rows("locos", LOCOS, 1)}
    zeros = sorted((name for name in GRID if name not in LOCOS), key=ranks.__getitem__)
    assert zeros != sorted(zeros)
    assert sets_of({"score": "locos", "ends": ["top"]}, k=[10])[0][4:] == zeros
    assert sets_of({"score": "locos", "ends": ["smallest"]}, k=[6])[0] == zeros


def test_each_end_is_a_group_of_its_own() -> None:
    groups = chosen({"locos": {"score": "locos", "ends": ["top", "bottom"]}})
    assert [{(s.selector, s.end) for s in group} for group in groups] == [
        {("locos", "top")},
        {("locos", "bottom")},
    ]
    assert [[s.k for s in group] for group in groups] == [[1, 3], [1, 3]]


def test_a_threshold_takes_every_head_above_it_whatever_k_is() -> None:
    (group,) = chosen({"strong": {"score": "locos", "above": 2.0}})
    assert group == [HeadSet("strong", None, 2, None, ("3-1", "2-0"))]


def test_a_threshold_above_all_values_names_the_best() -> None:
    with pytest.raises(UserError, match=r"selectors\.strong\.above: no head .* 9\.5; .* has 9$"):
        chosen({"strong": {"score": "locos", "above": 9.5}})


def test_a_list_of_heads_is_one_condition() -> None:
    (group,) = chosen({"mine": {"heads": ["2-1", "0-2"]}})
    assert group == [HeadSet("mine", None, 2, None, ("2-1", "0-2"))]


@pytest.mark.parametrize("bad", ["4-0", "0-3", "01-1", "x", "-1-0"])
def test_a_listed_head_outside_the_model_is_refused_by_name(bad: str) -> None:
    with pytest.raises(UserError, match=rf"selectors\.mine\.heads: .* no head '{bad}'.*0-0 to 3-2"):
        chosen({"mine": {"heads": ["2-1", bad]}})


def test_a_head_listed_twice_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="head 2-1 is named twice"):
        chosen({"mine": {"heads": ["2-1", "0-0", "2-1"]}})


def test_a_union_holds_the_top_heads_of_either_score() -> None:
    assert sets_of({"union": ["locos", "alpha"]}, k=[1, 2]) == [["3-1"], ["3-1", "2-0", "0-2"]]


def test_a_difference_holds_the_top_heads_that_only_the_first_score_has() -> None:
    assert sets_of({"difference": ["locos", "alpha"]}, k=[1, 2]) == [[], ["2-0"]]


def test_more_heads_than_the_model_has_are_refused() -> None:
    with pytest.raises(UserError, match=r"ablation\.k: 13 is more than the 12 heads of m"):
        chosen({}, k=[1, 13])


# --- random


def test_random_heads_hang_on_the_seed_and_the_grid_alone() -> None:
    row = {"random": True, "seeds": [7]}
    alone = sets_of(row, k=[5])
    beside = chosen({"locos": {"score": "locos", "ends": ["top"]}, "r": row}, k=[2, 5])[1]
    assert [list(s.heads) for s in beside if s.k == 5] == alone
    other = head_sets(spec_of({"r": row}, k=[5]), heads_table().filter(pl.col("score") == "alpha"))
    assert list(other[1][0].heads) == alone[0]


def test_random_sets_of_a_seed_are_nested() -> None:
    (group,) = chosen({"r": {"random": True, "seeds": [1, 2]}}, k=[1, 5, 9])
    for seed in (1, 2):
        one, five, nine = (s.heads for s in group if s.seed == seed)
        assert five[:1] == one
        assert nine[:5] == five
        assert len(set(nine)) == 9


def test_random_seeds_differ_and_share_a_file() -> None:
    (group,) = chosen({"r": {"random": True, "seeds": [1, 2, 3]}}, k=[6])
    assert len({frozenset(s.heads) for s in group}) == 3


def test_every_head_is_drawn_first_equally_often() -> None:
    first = [random_order(GRID, seed)[0] for seed in range(1200)]
    counts = np.array([first.count(name) for name in GRID])
    # Chi-square with 11 degrees of freedom: the 99.9 % point is 31.3.
    assert ((counts - 100) ** 2 / 100).sum() < 31.3


def test_matched_heads_lie_in_the_same_layers_and_are_others() -> None:
    (group,) = chosen({"r": {"random": True, "seeds": [4, 5], "matched_to": "locos"}})
    for condition in group:
        wanted = ["3-1", "2-0", "3-2"][: condition.k]
        assert sorted(n[0] for n in condition.heads) == sorted(n[0] for n in wanted)
        spare = {n for n in GRID if n not in wanted}
        # Two of the three heads of layer 3 are chosen at k = 3: one spare head, one filled up.
        assert len(set(condition.heads) - spare) == (1 if condition.k == 3 else 0)


def test_matched_heads_are_drawn_in_the_seeded_order() -> None:
    order = ["1-2", "0-1", "1-0", "0-0", "1-1", "0-2"]
    assert matched_heads(["1-0", "0-1"], order) == ["1-2", "0-0"]
    # Layer 1 has one spare head for two: the first of the chosen in the order comes in.
    assert matched_heads(["1-0", "1-1"], order) == ["1-2", "1-0"]
    assert matched_heads([], order) == []


# --- imported scores


def write_scores(folder: Path, scores: Any) -> str:
    path = folder / "heads.json"
    path.write_text(json.dumps({"meta": {"needle": "x"}, "scores": scores}), encoding="utf-8")
    return str(path)


def test_an_imported_head_is_scored_by_the_mean_of_its_values(tmp_path: Path) -> None:
    path = write_scores(tmp_path, {"0-1": [1.0, 0.0], "3-0": [0.4, 0.8], "2-2": [0.1]})
    assert sets_of({"heads_file": path, "ends": ["top"]}) == [["3-0"], ["3-0", "0-1", "2-2"]]
    assert sets_of({"heads_file": path, "ends": ["bottom"]}, k=[1]) == [["2-2"]]


def test_ties_of_an_imported_score_follow_neither_layer_nor_file(tmp_path: Path) -> None:
    flat = {name: [0.5] for name in GRID}
    row = {"ends": ["top"]}
    forward = sets_of(row | {"heads_file": write_scores(tmp_path, flat)}, k=[12])
    backward = sets_of(
        row | {"heads_file": write_scores(tmp_path, dict(reversed(flat.items())))}, k=[12]
    )
    assert forward == backward
    assert forward[0] not in (GRID, GRID[::-1])


def test_an_imported_head_outside_the_model_is_refused_by_name(tmp_path: Path) -> None:
    path = write_scores(tmp_path, {"0-1": [1.0], "31-7": [2.0]})
    with pytest.raises(UserError, match=r"heads\.json: the model has no head '31-7'"):
        sets_of({"heads_file": path, "ends": ["top"]})


@pytest.mark.parametrize("values", [[], [float("nan")], [[1.0], [2.0]]])
def test_an_imported_head_without_finite_values_is_refused_by_name(
    tmp_path: Path, values: Any
) -> None:
    path = write_scores(tmp_path, {"0-1": [1.0], "2-1": values})
    with pytest.raises(UserError, match=r"heads\.json: head 2-1 needs a list"):
        sets_of({"heads_file": path, "ends": ["top"]})


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"3-1": [1.0]}', '{"scores": [1]}', '{"scores": {"0-1": ["a"]}}']
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "heads.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"heads\.json: not a JSON file of the form"):
        sets_of({"heads_file": str(path), "ends": ["top"]})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: no such file"):
        sets_of({"heads_file": str(tmp_path / "none.json"), "ends": ["top"]})


def test_more_heads_than_an_imported_score_has_are_refused(tmp_path: Path) -> None:
    path = write_scores(tmp_path, {"0-1": [1.0]})
    with pytest.raises(UserError, match=r"heads\.json: scores 1 heads, fewer than k = 3"):
        sets_of({"heads_file": path, "ends": ["top"]})


# --- the table and its keys

SELECTORS: dict[str, Any] = {
    "locos": {"score": "locos", "ends": ["top", "bottom"]},
    "random": {"random": True, "seeds": [42, 43]},
}


def table(selectors: dict[str, Any] = SELECTORS, **changes: Any) -> pl.DataFrame:
    return selection_table(spec_of(selectors, **changes), heads_table())


def keys(selection: pl.DataFrame, task: str = "literal") -> dict[tuple[str, str | None], str]:
    """Return the key of each selector and end of a task, which its conditions share."""
    rows = selection.filter(pl.col("task") == task)
    pairs = rows.select("selector", "end", "key").unique(maintain_order=True)
    found = {(selector, end): key for selector, end, key in pairs.iter_rows()}
    assert len(found) == pairs.height
    return found


def test_none_is_there_once_a_task_whatever_the_selectors() -> None:
    for selectors in ({}, SELECTORS):
        rows = table(selectors).filter(pl.col("selector") == "none")
        assert rows.select("task", "end", "k", "seed", "heads").rows() == [
            ("literal", None, 0, None, []),
            ("nonliteral", None, 0, None, []),
        ]


def test_a_row_a_condition_with_its_heads() -> None:
    rows = table()
    assert rows.height == 2 * (1 + 2 + 2 + 2 * 2)
    top = rows.filter((pl.col("task") == "literal") & (pl.col("end") == "top"))
    assert top["k"].to_list() == [1, 3]
    assert top["heads"].to_list() == [["3-1"], ["3-1", "2-0", "3-2"]]
    assert set(zip(top["mode"], top["site"], strict=True)) == {("mean_query", "q_proj")}


def test_the_same_rankings_in_another_order_of_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for name, heads in (("a", heads_table()), ("b", heads_table().reverse())):
        selection = selection_table(spec_of(SELECTORS), heads)
        write_table(selection, tmp_path / name, kind="selection", spec={})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_each_selector_end_and_task_has_a_file_of_its_own() -> None:
    selection = table()
    assert len({*keys(selection).values(), *keys(selection, "nonliteral").values()}) == 2 * 4


def test_selectors_that_choose_the_same_heads_share_a_file() -> None:
    listed = {"mine": {"heads": ["3-2", "3-1", "2-0"]}, "strong": {"score": "locos", "above": 1.0}}
    found = keys(table(listed))
    assert found["mine", None] == found["strong", None]


def test_a_selector_that_chooses_nothing_shares_the_unablated_file() -> None:
    found = keys(table({"same": {"difference": ["locos", "locos"]}}))
    assert found["same", None] == found["none", None]


def test_another_selector_changes_no_key() -> None:
    more = SELECTORS | {"alpha": {"score": "alpha", "ends": ["top"]}}
    before, after = keys(table()), keys(table(more))
    assert {name: after[name] for name in before} == before


def test_another_seed_changes_the_key_of_random_alone() -> None:
    before = keys(table())
    after = keys(table(SELECTORS | {"random": {"random": True, "seeds": [42, 44]}}))
    assert {name for name in before if before[name] != after[name]} == {("random", None)}


@pytest.mark.parametrize(
    "how", [{"mode": "zero_query"}, {"site": "query"}, {"factor": 2.0}, {"calibration": "d"}]
)
def test_another_intervention_changes_every_key_but_that_of_none(how: dict[str, Any]) -> None:
    before, after = keys(table()), keys(table(how=how))
    assert {name for name in before if before[name] == after[name]} == {("none", None)}


def test_another_task_spec_changes_that_tasks_keys_alone() -> None:
    tasks = {"nonliteral": {"probes": "a"}, "literal": {"probes": "other"}}
    before, after = table(), table(tasks=tasks)
    assert not set(keys(before).values()) & set(keys(after).values())
    assert keys(before, "nonliteral") == keys(after, "nonliteral")


def test_a_file_holds_each_set_of_heads_once_and_sorted() -> None:
    selection = table({"random": {"random": True, "seeds": [1, 2]}}, k=[2, 12])
    key = keys(selection)["random", None]
    found = list(conditions_of(selection, "literal", key))
    assert found.count(GRID) == 1
    assert len(found) == 3
    assert all(heads == sorted(heads, key=GRID.index) for heads in found)


def test_a_key_that_the_selection_does_not_name_is_refused() -> None:
    with pytest.raises(UserError, match="literal/0123: the present selection does not name"):
        list(conditions_of(table(), "literal", "0123"))
