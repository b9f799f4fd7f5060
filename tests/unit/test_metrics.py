"""Metrics of one answer, by hand."""

from __future__ import annotations

import pytest

from workflow_scripts.ablation.metrics import METRICS, measure, normalise

OTHERS = ["Ann", "Mary", "Veronica"]


def test_a_right_answer_in_a_sentence() -> None:
    # Words yuki, has, been, there: ROUGE-L P = 1 / 4, R = 1, F1 = 0.4.
    assert measure("Yuki has been there.", 5, "Yuki", [], OTHERS) == {
        "accuracy": 1.0,
        "rouge_l_f1": pytest.approx(0.4),
        "rouge1_recall": 1.0,
        "contains": 1.0,
        "exact_match": 0.0,
        "empty": 0.0,
        "other_character": 0.0,
        "length": 5.0,
    }


def test_the_measures_are_those_named_in_their_order() -> None:
    assert tuple(measure("Yuki", 1, "Yuki")) == METRICS


def test_a_wrong_character_is_told_from_an_empty_answer() -> None:
    wrong, empty = measure("Mary.", 2, "Yuki", [], OTHERS), measure(" \n", 1, "Yuki", [], OTHERS)
    assert (wrong["accuracy"], wrong["other_character"], wrong["empty"]) == (0.0, 1.0, 0.0)
    assert (empty["accuracy"], empty["other_character"], empty["empty"]) == (0.0, 0.0, 1.0)


def test_a_right_answer_that_also_names_another_is_right() -> None:
    both = measure("Yuki, not Mary", 4, "Yuki", [], OTHERS)
    assert (both["accuracy"], both["other_character"]) == (1.0, 0.0)


def test_a_name_inside_a_longer_word_is_not_named() -> None:
    assert measure("The annex, a summary", 5, "Yuki", [], OTHERS)["other_character"] == 0.0


def test_a_name_in_a_script_without_spaces_is_named_inside_a_sentence() -> None:
    named = measure("住在那里的是陈静。", 6, "林涛", [], ["陈静"])
    assert (named["accuracy"], named["other_character"]) == (0.0, 1.0)


def test_a_recall_of_exactly_one_half_is_not_accurate() -> None:
    half = measure("Anna Li", 2, "Anna Orlova", [], [])
    assert (half["rouge1_recall"], half["accuracy"]) == (0.5, 0.0)


@pytest.mark.parametrize("text", ["the Big Apple", "New York City"])
def test_the_best_of_answer_and_aliases_counts(text: str) -> None:
    found = measure(text, 3, "New York City", ["Big Apple", "NYC"])
    for metric in ("accuracy", "rouge1_recall", "contains", "exact_match"):
        assert found[metric] == 1.0


def test_contains_ignores_case_and_spans_words() -> None:
    assert measure("in NEW YORK.", 4, "New York")["contains"] == 1.0
    assert measure("in New  York.", 4, "New York")["contains"] == 0.0


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("so <answer>Rome</answer>", 1.0),
        ("<answer>Paris</answer> or rather <answer>rome.</answer> it is", 1.0),
        ("<answer>Rome</answer> no: <answer>Paris</answer>", 0.0),
        ("<ANSWER>Rome", 1.0),
        ("<answer></answer>", 0.0),
        ("Rome, surely", 0.0),
        ("The Rome!", 1.0),
    ],
)
def test_exact_match_takes_the_last_answer_tag(text: str, match: float) -> None:
    assert measure(text, 5, "Rome")["exact_match"] == match


@pytest.mark.parametrize(
    ("text", "gold", "match"),
    [
        ("-3", "3", 0.0),
        ("\u22123", "-3", 1.0),
        ("3.5", "35", 0.0),
        ("7.", "7", 1.0),
        ("$7", "7", 1.0),
    ],
)
def test_the_value_of_a_number_survives_normalisation(text: str, gold: str, match: float) -> None:
    assert measure(text, 1, gold)["exact_match"] == match


def test_normalisation_of_a_hand_worked_text() -> None:
    assert normalise("  The  U.S. - a “Land”, 1-2 of  AN_X。 ") == "us land 12 of anx"


def test_a_blank_gold_matches_nothing() -> None:
    found = measure("", 0, "", [" "])
    assert (found["contains"], found["exact_match"], found["accuracy"]) == (0.0, 0.0, 0.0)


def test_a_blank_gold_beside_an_alias_leaves_the_alias() -> None:
    assert measure("Rome", 1, "", ["Rome"])["accuracy"] == 1.0


def test_thoughts_are_not_measured() -> None:
    found = measure("<think>Mary or Yuki?</think>\n\nVeronica", 9, "Yuki", [], OTHERS)
    assert (found["accuracy"], found["contains"], found["other_character"]) == (0.0, 0.0, 1.0)
    assert measure("<think>Yuki", 3, "Yuki")["empty"] == 1.0
