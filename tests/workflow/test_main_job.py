"""The main target on the planted model finds its retrieval head and shows what it does."""

from __future__ import annotations

import polars as pl
from snakemake_project import Project, Run

COLUMNS = (
    "model task split selector end k seed mode site factor metric value ci_low ci_high "
    "baseline relative relative_low relative_high n_probes heads"
).split()


def ablation(finished: tuple[Project, Run]) -> pl.DataFrame:
    return pl.read_parquet(finished[0].folder / "results/tiny/ablation.parquet")


def accuracies(
    table: pl.DataFrame, task: str, selector: str, end: str | None = None
) -> list[float]:
    rows = table.filter(
        pl.col("task") == task,
        pl.col("selector") == selector,
        pl.col("end").eq_missing(end),
        pl.col("metric") == "accuracy",
    )
    return rows["value"].to_list()


def test_the_table_has_the_columns_of_the_design_in_their_order(finished):
    assert ablation(finished).columns == COLUMNS


def test_every_row_counts_all_probes_of_its_task(finished):
    assert ablation(finished)["n_probes"].to_list() == [8] * ablation(finished).height


def test_heads_are_lists_of_k_layer_head_names(finished):
    table = ablation(finished)
    assert table.schema["heads"] == pl.List(pl.String)
    assert table["heads"].list.len().to_list() == table["k"].to_list()
    assert table["heads"].explode().drop_nulls().str.contains("^[0-3]-[0-7]$").all()


def test_every_condition_stands_for_every_metric(finished):
    table = ablation(finished)
    # none, locos top and bottom x 2 k, random x 2 seeds x 2 k; on 2 tasks
    assert table.height == 2 * (1 + 4 + 4) * table["metric"].n_unique()


def test_locos_ranks_the_planted_retrieval_head_first_and_the_off_needle_head_last(finished):
    scores = pl.read_parquet(finished[0].folder / "results/tiny/scores/locos.parquet").sort("rank")
    heads = scores.select("layer", "head").rows()
    assert (heads[0], heads[-1]) == ((2, 0), (3, 3))


def test_alpha_spatial_falls_for_the_read_only_decoys(finished):
    heads = pl.read_parquet(finished[0].folder / "results/tiny/heads.parquet")
    ranked = heads.filter(pl.col("score") == "alpha_spatial").sort("rank")
    assert ranked.select("layer", "head").rows()[:3] == [(2, 4), (2, 1), (2, 0)]


def test_the_unablated_model_answers_both_tasks(finished):
    table = ablation(finished)
    assert accuracies(table, "nonliteral", "none") == [1.0]
    assert accuracies(table, "literal", "none") == [1.0]


def test_ablating_the_planted_head_destroys_the_nonliteral_answer(finished):
    table = ablation(finished)
    assert accuracies(table, "nonliteral", "locos", "top") == [0.0, 0.0]


def test_ablating_the_planted_head_alone_leaves_the_literal_answer(finished):
    table = ablation(finished)
    alone = table.filter(pl.col("selector") == "locos", pl.col("end") == "top", pl.col("k") == 1)
    assert alone["heads"].to_list() == [["2-0"]] * alone.height
    assert accuracies(alone, "literal", "locos", "top") == [1.0]


def test_ablating_the_bottom_heads_or_random_ones_leaves_the_nonliteral_answer(finished):
    table = ablation(finished)
    random = table.filter(pl.col("selector") == "random")
    assert "2-0" not in random["heads"].explode().to_list()
    assert accuracies(table, "nonliteral", "locos", "bottom") == [1.0, 1.0]
    assert accuracies(table, "nonliteral", "random") == [1.0] * 4


def test_the_first_run_makes_every_artifact_once(finished):
    # Unablated, locos top, locos bottom, random: four files of generations a task.
    jobs = finished[1].jobs
    assert jobs["tokenize_probes"] == 3
    assert jobs["capture"] == 2
    assert jobs["calibrate"] == 1
    assert jobs["score"] == 2
    assert jobs["generate"] == 2 * 4
    assert jobs["ablation"] == 1


def test_everything_works_in_a_folder_with_a_space_in_its_path(project):
    # The finished run and its copies lie in such folders; this rule goes through a shell besides.
    assert " " in str(project.folder)
    assert project.make("results/tiny/probes/nolima.parquet").jobs["show_probes"] == 1
