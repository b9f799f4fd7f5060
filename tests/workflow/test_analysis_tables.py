"""The analyses on the planted model: what they say of its circuit, and what they leave alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from snakemake_project import Project, Run

HEADS = "results/tiny/heads.parquet"
LOCOS = "needle_phi - off_phi * needle_len / off_len"
TABLES = (
    "agreement consensus distribution kv_groups layers overlap provenance specificity steps".split()
)
MODEL_FREE: dict[str, dict[str, Any]] = {
    name: {"detector": name}
    for name in "wu wu_text contrastive_top10 contrastive_mass snapkv_window headkv_r2 argmax_ov".split()
} | {
    "dla": {"formula": "needle_phi + off_phi"},
    "locos_unit": {"formula": LOCOS, "direction": "unit"},
    "locos_context": {"formula": LOCOS, "off": "context"},
    "locos_official": {"formula": LOCOS, "compat": "official"},
}


@pytest.fixture(scope="module")
def analysed(
    finished: tuple[Project, Run], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Project, Run]:
    """All analyses, with a literal and a causal score that are made before them."""
    folder = tmp_path_factory.mktemp("analysed") / "a copy"
    shutil.copytree(finished[0].folder, folder)
    project = Project(folder)

    def add_scores(config: dict[str, Any]) -> None:
        config["patching"] = {"filler": {"dataset": "nolima", "corruption": "filler", "probes": 2}}
        config["scores"]["locos_literal"] = {"dataset": "literal", "formula": LOCOS}
        config["scores"]["cri"] = {"patching": "filler", "metric": "logit"}
        config["analysis"] = {
            "k": [1, 3],
            "specificity": {"literal": "locos_literal", "nonliteral": "locos"},
        }

    project.edit_config(add_scores)
    project.make(HEADS)
    run = project.run("analysis", "results/tiny/heads/locos.json")
    assert run.code == 0, run.text
    return project, run


def table(analysed: tuple[Project, Run], name: str) -> pl.DataFrame:
    return pl.read_parquet(analysed[0].folder / f"results/tiny/analysis/{name}.parquet")


def head(rows: pl.DataFrame, layer: int, number: int) -> dict[str, Any]:
    """Return the one row of a head."""
    return rows.row(
        by_predicate=(pl.col("layer") == layer) & (pl.col("head") == number), named=True
    )


def test_one_word_makes_every_analysis_and_nothing_above_them(analysed):
    made = analysed[0].folder / "results/tiny/analysis"
    assert sorted(path.stem for path in made.glob("*.parquet")) == TABLES
    assert analysed[1].jobs == {
        "score_probes": 4,
        "compare_scores": 2,
        "view_heads": 5,
        "trace_steps": 1,
        "trace_provenance": 1,
        "export_heads": 1,
        "analysis": 1,
    }
    again = analysed[0].would_run("analysis")
    assert set(again.jobs) <= {"analysis"}


def test_the_planted_retrieval_head_is_non_literal_and_the_copying_head_is_literal(analysed):
    rows = table(analysed, "provenance")
    nonliteral, literal = (rows.filter(pl.col("dataset") == d) for d in ("nolima", "literal"))
    retrieval, copying = head(nonliteral, 2, 0), head(literal, 3, 0)
    assert retrieval["non_literality"] > 0.99
    assert retrieval["share_needle"] > 0.99
    assert copying["non_literality"] < 0.01
    assert copying["share_answer"] == pytest.approx(copying["share_equal"])
    assert copying["share_equal"] > 0.99
    assert head(nonliteral, 3, 3)["share_haystack"] > 0.99


def test_shares_of_the_sources_sum_to_one(analysed):
    rows = table(analysed, "provenance").filter(pl.col("positive") > 0)
    shares = [n for n in rows.columns if n.startswith("share_") and n != "share_equal"]
    assert rows.height > 0
    for total in rows.select(pl.sum_horizontal(shares)).to_series():
        assert total == pytest.approx(1)


def test_the_specificity_of_the_planted_heads_is_seen(analysed):
    rows = table(analysed, "specificity")
    assert head(rows, 2, 0)["rank_nonliteral"] == 1
    assert head(rows, 3, 0)["rank_literal"] == 1


def test_the_causal_score_and_locos_name_the_same_best_head(analysed):
    rows = table(analysed, "agreement").filter(pl.col("measure") == "jaccard", pl.col("k") == 1)
    found = dict(rows.select("score_a", "value").iter_rows())
    assert found == {"alpha_spatial": 0.0, "locos": 1.0, "locos_literal": 0.0}
    assert rows["score_b"].unique().to_list() == ["cri"]


def test_an_exported_file_selects_the_same_heads_as_the_score(analysed, tmp_path: Path):
    folder = tmp_path / "a copy"
    shutil.copytree(analysed[0].folder, folder)
    project = Project(folder)
    theirs = {"heads_file": "results/tiny/heads/locos.json", "ends": ["top", "bottom"]}
    project.edit_config(lambda config: config["selectors"].update(theirs=theirs))
    project.make("results/tiny/selection.parquet")
    selection = pl.read_parquet(folder / "results/tiny/selection.parquet")
    sets = {
        name: selection.filter(pl.col("selector") == name)
        .select("task", "end", "k", "heads")
        .rows()
        for name in ("locos", "theirs")
    }
    assert len(sets["locos"]) == 8
    assert sets["theirs"] == sets["locos"]


def test_every_other_model_free_detector_reads_the_same_capture(project):
    rows = {name: {"dataset": "nolima", **row} for name, row in MODEL_FREE.items()}
    project.edit_config(lambda config: config["scores"].update(rows))
    assert project.would_run(HEADS).jobs == {"score": len(rows), "collect_heads": 1}


@pytest.mark.parametrize(
    ("name", "mend"),
    [("specificity", "set analysis.specificity"), ("agreement", "add a score with patching")],
)
def test_an_analysis_that_the_config_cannot_make_says_what_to_add(project, name, mend):
    run = project.run("--dry-run", f"results/tiny/analysis/{name}.parquet")
    assert run.code != 0
    assert f"config: analysis {name}: {mend}" in run.text
    assert name not in "".join(project.would_run("analysis").lines_of("analysis", "input"))


@pytest.mark.parametrize(
    ("analysis", "message"),
    [
        ({"specificity": {"literal": "lokos", "nonliteral": "locos"}}, "did you mean 'locos'"),
        ({"k": [1, 33]}, "analysis.k: 33 is more than the 32 heads"),
    ],
)
def test_a_wrong_analysis_block_is_refused_by_key(project, analysis, message):
    project.edit_config(lambda config: config.update(analysis=analysis))
    run = project.run("--dry-run", HEADS)
    assert run.code != 0
    assert message in run.text
