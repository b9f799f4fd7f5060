"""The KV plan of the planted model: its retrieval head's group is kept, and what that saves and costs."""

from __future__ import annotations

import shutil
from typing import Any

import polars as pl
import pytest
from snakemake_project import Project, Run

PLAN = "results/tiny/kv_plan.parquet"


def plan_for(**settings: Any) -> Any:
    return lambda config: config.update(kv_plan={"score": "locos", **settings})


@pytest.fixture(scope="module")
def planned(
    finished: tuple[Project, Run], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Project, Run]:
    folder = tmp_path_factory.mktemp("planned") / "a copy"
    shutil.copytree(finished[0].folder, folder)
    project = Project(folder)
    project.edit_config(plan_for())
    return project, project.make(PLAN)


def table(planned: tuple[Project, Run], name: str) -> pl.DataFrame:
    return pl.read_parquet(planned[0].folder / f"results/tiny/{name}.parquet")


def test_one_word_chooses_groups_answers_each_task_once_and_captures_nothing(planned):
    assert planned[1].jobs == {"select_groups": 1, "generate_blinded": 2, "plan_cache": 1}
    assert planned[0].would_run(PLAN).jobs == {}


def test_the_group_of_the_planted_head_holds_the_retrieval_mass(planned):
    rows = table(planned, "kv_plan")
    # 4 layers of 4 groups: 4, 8 and 12 are kept.
    kept = {b: rows.filter(budget=b, action="keep").height for b in (25, 50, 75)}
    assert kept == {25: 4, 50: 8, 75: 12}
    best = rows.filter(rank=1)
    assert best.select("layer", "kv_group").unique().rows() == [(2, 0)]
    assert best["share"].min() > 0.95
    assert best["action"].unique().to_list() == ["keep"]
    # Keys and values of 32 numbers of 4 bytes over 32768 tokens, of which 512 are kept.
    saved = rows.filter(budget=25)["bytes_saved"].to_list()
    assert saved == [0] * 4 + [2 * 32 * 4 * (32768 - 512)] * 12


def test_compression_costs_no_answer_and_dropping_as_many_kept_groups_costs_all(planned):
    rows = table(planned, "kv_check").filter(task="nonliteral")
    assert rows["n_compared"].to_list() == [4, 8, 4]
    for row in rows.iter_rows(named=True):
        assert row["compressed"] == row["worst"] == row["baseline"] == 1.0
        assert row["best"] == 0.0
        assert row["difference_high"] < 0
        assert row["p_value"] < 0.05


def test_another_length_runs_nothing_but_the_plan(planned):
    project = planned[0]
    config = (project.folder / "config.yaml").read_text(encoding="utf-8")
    project.edit_config(plan_for(context_length=1000))
    assert project.would_run(PLAN).jobs == {"plan_cache": 1}
    (project.folder / "config.yaml").write_text(config, encoding="utf-8")


def test_a_config_without_a_plan_says_what_to_add(finished):
    run = finished[0].run("--dry-run", PLAN)
    assert run.code != 0
    assert "config: kv_plan is missing; add it" in run.text
