"""What the figures and the page are made of: counts, shares, sentences and escaped text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml
from report_tables import LOCOS, ablation_table, heads_table, significance_table
from scipy.stats import binomtest

from workflow_scripts.report import series
from workflow_scripts.report.catalogue import main_score
from workflow_scripts.report.comparison import comparison_table, model_row
from workflow_scripts.report.examples import examples
from workflow_scripts.report.headline import task_table
from workflow_scripts.report.page import citation, head_data, render, settings_text
from workflow_scripts.report.pass_rates import detection_passes, pass_rates, task_passes


@pytest.mark.parametrize(("passed", "n"), [(0, 5), (1, 30), (15, 30), (30, 30), (1, 1)])
def test_the_wilson_interval_is_scipys(passed, n):
    expected = binomtest(passed, n).proportion_ci(method="wilson")
    low, high = series.wilson_interval(np.array([passed]), np.array([n]))
    assert (low[0], high[0]) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_colours_end_where_one_head_in_a_hundred_lies_beyond():
    values = np.arange(-50.0, 51.0)
    assert series.colour_limit(values) == pytest.approx(np.quantile(np.abs(values), 0.99))
    assert series.colour_limit(np.zeros((2, 2))) == 1.0
    assert series.colour_limit(np.array([0.0] * 999 + [-7.0])) == 7.0


def test_overlap_is_the_jaccard_index_of_the_best_heads():
    shares = series.overlap(heads_table(), ["locos", "alpha_spatial"], k=4)
    # Best four of locos: 1-0, 1-1, 1-3, 0-0; of alpha_spatial: 1-2, 0-0, 0-3, 1-0.
    # Two in common of six.
    np.testing.assert_allclose(shares, [[1, 1 / 3], [1 / 3, 1]], rtol=1e-12)
    # More than there are heads: all of them.
    np.testing.assert_array_equal(series.overlap(heads_table(), ["locos", "alpha_spatial"], k=9), 1)


def test_passes_are_counted_by_set_length_and_depth():
    detection = [
        {"status": status, "context_length": 256, "depth_percent": depth}
        for status, depth in [("passed", 0), ("wrong", 0), ("truncated", 50), ("passed", 50)]
    ]
    probes = pl.DataFrame(
        {"probe_id": ["b", "a"], "context_length": [None, 512], "depth_percent": [None, 100.0]},
        schema_overrides={"context_length": pl.Int32},
    )
    answers = pl.DataFrame(
        {"probe_id": ["a", "b"], "accuracy": [1.0, 0.0], "exact_match": [0.0, 0.0]}
    )
    table = pass_rates(
        [detection_passes("nolima", detection), task_passes("facts", "accuracy", probes, answers)]
    )
    assert table.rows() == [
        ("nolima", "detect", 256, 0.0, 2, 1),
        ("nolima", "detect", 256, 50.0, 2, 1),
        ("facts", "task", None, None, 1, 0),
        ("facts", "task", 512, 100.0, 1, 1),
    ]


@pytest.mark.parametrize(
    ("metric", "passed"), [("exact_match", [False, True]), ("rouge_l_f1", [True, False])]
)
def test_an_answer_passes_by_the_verdict_of_its_task(metric, passed):
    probes = pl.DataFrame(
        {"probe_id": ["a", "b"], "context_length": [9, 9], "depth_percent": [0.0, 0.0]}
    )
    answers = pl.DataFrame(
        {"probe_id": ["a", "b"], "accuracy": [1.0, 0.0], "exact_match": [0.0, 1.0]}
    )
    found = task_passes("facts", metric, probes, answers)
    assert found["passed"].to_list() == passed


def losses(table: pl.DataFrame) -> pl.DataFrame:
    """Return a table of accuracies as one of losses: what was lost is added, from 3 nats."""
    rows = table.filter(metric="accuracy").with_columns(metric=pl.lit("loss"))
    if "difference" in rows.columns:
        return rows.with_columns(
            -pl.col("difference"), ci_low=-pl.col("ci_high"), ci_high=-pl.col("ci_low")
        )
    return rows.with_columns(
        value=3.8 - pl.col("value"), ci_low=3.8 - pl.col("ci_high"), ci_high=3.8 - pl.col("ci_low")
    )


def test_the_headline_of_a_loss_speaks_of_what_raises_it():
    tests = losses(significance_table({1: 0.2, 5: 0.004}))
    table = task_table("nonliteral", "loss", losses(ablation_table()), tests)
    assert table.sentence == (
        "Ablating the 5 best heads by locos takes nonliteral loss from 3.00 to 3.70; 5 random "
        "heads leave 3.25 (difference +0.45, 95 % interval [+0.35, +0.60], Holm-corrected p = 0.004)."
    )
    # A loss that falls is no damage.
    falls = tests.with_columns(-pl.col("difference"))
    sentence = task_table("nonliteral", "loss", losses(ablation_table()), falls).sentence
    assert sentence.startswith("No number of best heads by locos harms nonliteral loss more")
    assert sentence.endswith("unablated, the model reads nonliteral with loss 3.00.")


def test_the_headline_speaks_of_the_least_k_that_costs_more_than_random_heads():
    table = task_table(
        "nonliteral", "accuracy", ablation_table(), significance_table({1: 0.2, 5: 0.004})
    )
    assert (table.selector, table.k) == ("locos", 5)
    # Random heads at k = 5: the mean of 0.7 and 0.4.
    assert table.sentence == (
        "Ablating the 5 best heads by locos takes nonliteral accuracy from 0.80 to 0.10; 5 random "
        "heads leave 0.55 (difference −0.45, 95 % interval [−0.60, −0.35], Holm-corrected p = 0.004)."
    )


def test_the_headline_says_when_no_k_costs_more_than_random_heads():
    table = task_table(
        "nonliteral", "accuracy", ablation_table(), significance_table({1: 0.2, 5: 0.06})
    )
    assert table.k == 5
    assert table.sentence.startswith(
        "No number of best heads by locos harms nonliteral accuracy more"
    )


def test_the_headline_says_when_no_random_heads_were_run():
    table = task_table(
        "nonliteral", "accuracy", ablation_table(), significance_table({1: None, 5: None})
    )
    assert "from 0.80 to 0.10; no random heads were run" in table.sentence


def test_the_headline_gives_the_baseline_where_nothing_was_ablated():
    unablated = ablation_table().filter(pl.col("selector") == "none")
    table = task_table("nonliteral", "accuracy", unablated, significance_table({}))
    assert table.sentence == "Unablated, the model answers nonliteral with accuracy 0.80."
    assert (table.ks, table.rows, table.k) == ([], [], None)


def test_the_headline_table_holds_every_condition_and_marks_those_unlike_random_heads():
    table = task_table(
        "nonliteral", "accuracy", ablation_table(), significance_table({1: 0.2, 5: 0.004})
    )
    assert table.ks == [1, 3, 5]
    found = {row.label: row.cells for row in table.rows}
    assert list(found) == ["locos top", "locos bottom", "listed", "random"]
    top = found["locos top"]
    assert [(c.value, c.low, c.high, c.differs) for c in (top[0], top[2])] == [
        (0.5, 0.35, 0.6, False),
        (0.1, 0.0, 0.25, True),
    ]
    assert top[1] is None
    assert [cell is None for cell in found["listed"]] == [True, False, True]
    assert (found["random"][0].value, found["random"][0].low, found["random"][0].high) == (
        pytest.approx(0.7),
        0.6,
        0.8,
    )


def test_models_side_by_side_leave_a_gap_where_one_lacks_a_condition():
    other = ablation_table("b").filter(pl.col("selector") != "listed")
    table = comparison_table(
        "nonliteral", "accuracy", pl.concat([ablation_table("a"), other]), ["a", "b"]
    )
    rows = {(row.label, row.k): row.cells for row in table.rows}
    assert [cell.value for cell in rows["nothing ablated", 0]] == [0.8, 0.8]
    assert rows["listed", 3][1] is None
    assert rows["listed", 3][0].value == 0.3
    assert table.rows[0].label == "nothing ablated"


def test_a_model_is_described_by_its_sizes_and_best_heads():
    row = model_row("a", heads_table("a"), "locos")
    assert (row["layers"], row["heads"], row["kv_groups"]) == (2, 4, 2)
    assert row["best"][:2] == ["1-0", "1-1"]


def test_examples_pair_each_question_with_the_answers_of_the_headline():
    table = task_table(
        "nonliteral", "accuracy", ablation_table(), significance_table({1: 0.2, 5: 0.004})
    )
    selection = pl.DataFrame(
        {
            "task": ["nonliteral"] * 3,
            "selector": ["none", "locos", "locos"],
            "end": [None, "top", "top"],
            "k": [0, 1, 5],
            "heads": [[], ["3-1"], ["10-0", "3-1"]],
            "key": ["intact", "cut", "cut"],
        }
    )
    said = {
        "intact": [([], "Yuki.", 1.0)],
        "cut": [(["3-1"], "Yu", 0.0), (["3-1", "10-0"], "Bo", 0.0)],
    }
    generations = {
        ("nonliteral", key): pl.DataFrame(
            [
                {"heads": heads, "probe_id": probe, "text": f"{text}{probe}", "accuracy": right}
                for heads, text, right in rows
                for probe in ("p1", "p2", "p3")
            ],
            schema_overrides={"heads": pl.List(pl.String)},
        )
        for key, rows in said.items()
    }
    probes = pl.DataFrame(
        {
            "probe_id": ["p1", "p2", "p3"],
            "question": ["Who?", "Who?", "Where?"],
            "answer": ["Y"] * 3,
        }
    )
    found = examples(table, selection, generations, probes)
    assert [(e.question, e.intact, e.intact_right, e.ablated, e.ablated_right) for e in found] == [
        ("Who?", "Yuki.p1", True, "Bop1", False),
        ("Where?", "Yuki.p3", True, "Bop3", False),
    ]


def test_the_first_score_is_locos_or_the_first_by_name():
    assert main_score(["wu", "locos", "cri"]) == "locos"
    assert main_score(["wu", "cri"]) == "cri"


def test_the_pages_data_hold_every_head_by_layer_and_head():
    data = head_data(heads_table())
    assert data["heads"] == [[layer, head, head // 2] for layer in (0, 1) for head in range(4)]
    rows = dict(zip(sorted(LOCOS), data["scores"]["locos"]["rows"], strict=True))
    assert rows[1, 0] == [4.0, 3.75, 4.5, 1]
    assert rows[1, 2] == [-3.0, -3.25, -2.5, 8]
    assert data["main"] == "locos"


class Texts(HTMLParser):
    """Tags and text of a page, as a browser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.data: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.data.append(data)


def test_text_from_anywhere_is_escaped_in_html_and_in_the_data_of_the_script(tmp_path):
    hostile = "</script><!--<img src=x onerror=alert(1)>"
    data = {"name": hostile}
    (tmp_path / "page.j2").write_text(
        '<p>{{ text }}</p><script type="application/json">{{ data | tojson }}</script>'
    )
    page = render("page.j2", folder=tmp_path, text=hostile, data=data)
    seen = Texts(page)
    assert seen.tags == ["p", "script"]
    assert "".join(seen.data).startswith(hostile)
    assert json.loads(re.search(r"json\">(.*)</script>", page)[1]) == data
    assert "<!--" not in page


def test_how_to_cite_comes_from_the_citation_file():
    cite = citation("CITATION.cff")
    paper = yaml.safe_load(Path("CITATION.cff").read_text())["references"][0]
    assert paper["title"] in cite["paper"]
    assert cite["bibtex"].startswith("@misc{gema2026,\n  title = {Logit-Contribution")
    assert "Gema, Aryo Pradipta and Alex, Beatrice and Minervini, Pasquale" in cite["bibtex"]


def test_settings_read_back_as_they_were():
    settings = {"b": [1, {"c": "<x>"}], "a": None, "formula": "needle_phi - off_phi"}
    assert yaml.safe_load(settings_text(settings)) == settings
