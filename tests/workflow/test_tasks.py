"""Control tasks on the planted model: what an ablation must spare, and what adding or editing one makes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from typing import Any

import polars as pl
import pytest
import torch
from snakemake_project import TARGET, Project, Run
from transformers import AutoModelForCausalLM

TABLES = ("ablation", "dissociation", "significance")
DATA = "data/models/tiny"
PROMPT = "prompts/parametric.json"
KNOWLEDGE = ("parametric", "arithmetic")


def add_controls(config: dict[str, Any]) -> None:
    asked = {"format": "qa", "size": 8, "max_new_tokens": 4}
    config["probes"] |= {name: asked | {"needles": f"{DATA}/{name}.jsonl"} for name in KNOWLEDGE}
    config["probes"]["parametric"]["prompt"] = PROMPT
    config["probes"]["prose"] = {
        "format": "text",
        "needles": f"{DATA}/haystacks/filler_0.txt",
        "context_lengths": [40],
        "size": 6,
    }
    del config["tasks"]["literal"]
    config["tasks"] |= {name: {"dataset": name} for name in (*KNOWLEDGE, "prose")}
    config["selectors"]["alpha_spatial"] = {"score": "alpha_spatial", "ends": ["top"]}


@pytest.fixture(scope="module")
def tested(
    finished: tuple[Project, Run], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Project, Run]:
    """The finished run with three tasks and a selector more; never changed by a test."""
    folder = tmp_path_factory.mktemp("tested") / "a copy"
    shutil.copytree(finished[0].folder, folder)
    project = Project(folder)
    (folder / PROMPT).parent.mkdir()
    (folder / PROMPT).write_text(json.dumps({"user": "{question}"}), encoding="utf-8")
    project.edit_config(add_controls)
    made = [*(f"{table}.parquet" for table in TABLES), "summary.md", "report.html"]
    run = project.run(*(f"results/tiny/{name}" for name in made))
    assert run.code == 0, run.text
    return project, run


def table(tested: tuple[Project, Run], name: str) -> pl.DataFrame:
    return pl.read_parquet(tested[0].folder / f"results/tiny/{name}.parquet")


def values(tested: tuple[Project, Run], task: str, selector: str, end: str | None) -> list[float]:
    """Return what a task is judged by, for every k and seed of a selector."""
    metric = "accuracy" if task == "nonliteral" else "exact_match"
    rows = table(tested, "ablation").filter(task=task, selector=selector, metric=metric)
    found: list[float] = rows.filter(pl.col("end").eq_missing(end))["value"].to_list()
    return found


def tasks_of(run: Run) -> Counter[str]:
    """Return how many files of generations were made, or would be, by task."""
    wildcards = run.lines_of("generate", "wildcards")
    return Counter(line.split("task=")[1].split(",")[0] for line in wildcards)


def test_a_task_and_a_selector_more_make_their_own_generations_and_no_others(tested):
    # None, locos top and bottom, random and the new selector on the new tasks; that alone on the old.
    _, run = tested
    assert tasks_of(run) == {"parametric": 5, "arithmetic": 5, "prose": 5, "nonliteral": 1}
    assert (run.jobs["tokenize_probes"], run.jobs["capture"], run.jobs["calibrate"]) == (3, 0, 0)


def test_the_planted_heads_ablation_destroys_the_nonliteral_answers_and_no_knowledge(tested):
    assert values(tested, "nonliteral", "none", None) == [1.0]
    assert values(tested, "nonliteral", "locos", "top") == [0.0, 0.0]
    for task in KNOWLEDGE:
        assert values(tested, task, "none", None) == [1.0]
        assert values(tested, task, "locos", "top") == [1.0, 1.0]


@pytest.mark.parametrize(
    ("selector", "end", "conditions"),
    [("random", None, 4), ("locos", "bottom", 2), ("alpha_spatial", "top", 2)],
)
def test_other_heads_leave_the_answers_and_the_knowledge(tested, selector, end, conditions):
    for task in ("nonliteral", *KNOWLEDGE):
        assert values(tested, task, selector, end) == [1.0] * conditions


@pytest.mark.parametrize("control", KNOWLEDGE)
def test_the_dissociation_of_locos_is_the_largest_of_all_selectors(tested, control):
    rows = table(tested, "dissociation").filter(control=control)
    best = rows.group_by("selector", "end").agg(pl.col("ds").max())
    found = {(selector, end): score for selector, end, score in best.iter_rows()}
    # All of the answers and none of the knowledge is lost: 1 - 0.
    assert found.pop(("locos", "top")) == 1.0
    assert set(found) == {("locos", "bottom"), ("random", None), ("alpha_spatial", "top")}
    assert max(found.values()) == 0.0
    assert set(rows.filter(selector="locos", end="top")["k_star"]) == {1}


def test_the_planted_heads_effect_is_told_from_none_and_from_random_heads(tested):
    rows = table(tested, "significance").filter(
        task="nonliteral", selector="locos", end="top", metric="accuracy"
    )
    assert rows["difference"].to_list() == [-1.0] * 4
    assert (rows["p_holm"] < 0.05).all()


def test_the_loss_of_a_text_is_that_of_transformers_and_has_no_dissociation(tested):
    folder = tested[0].folder
    rows = table(tested, "ablation").filter(task="prose")
    assert set(rows["metric"]) == {"loss"}
    (path,) = folder.glob("results/store/tiny/probes/prose/*.parquet")
    model = AutoModelForCausalLM.from_pretrained(folder / DATA)
    pieces = [torch.tensor([ids]) for ids in pl.read_parquet(path)["input_ids"].to_list()]
    with torch.no_grad():
        own = [float(model(ids, labels=ids).loss) for ids in pieces]
    assert rows.filter(selector="none")["value"][0] == pytest.approx(sum(own) / 6, rel=1e-5)
    assert (rows["relative"] - rows["value"] / rows["baseline"]).abs().max() < 1e-12
    scores = table(tested, "dissociation").filter(control="prose")
    assert scores.height == 10 and scores["ds"].null_count() == scores["k_star"].null_count() == 10
    assert scores["reason"].str.starts_with("a loss is no share").all()
    summary = (folder / "results/tiny/summary.md").read_text(encoding="utf-8")
    assert "## prose: loss (lower is better) over 6 probes" in summary


def test_the_report_shows_each_task_by_its_own_metric(tested):
    page = (tested[0].folder / "results/tiny/report.html").read_text(encoding="utf-8")
    for task, metric in (
        *(("nonliteral", "accuracy"), ("parametric", "exact match")),
        *(("arithmetic", "exact match"), ("prose", "loss")),
    ):
        assert f'aria-label="Table: {metric} on {task}"' in page
    # A text has no answers to show, and none that pass.
    assert 'aria-label="Table: answers to parametric"' in page
    assert 'aria-label="Table: answers to prose"' not in page
    sets = set(table(tested, "pass_rates").filter(role="task")["set"])
    assert sets == {"nonliteral", *KNOWLEDGE}


def test_an_edited_prompt_makes_the_probes_and_generations_of_its_dataset_and_nothing_else(
    tested, tmp_path
):
    folder = tmp_path / "edited"
    shutil.copytree(tested[0].folder, folder)
    project = Project(folder)
    project.replace(PROMPT, "{question}", "the {question}")
    project.make("results/tiny/selection.parquet")
    run = project.would_run(TARGET)
    assert run.jobs == {"tokenize_probes": 1, "generate": 5, "ablation": 1}
    assert tasks_of(run) == {"parametric": 5}
    assert "dataset=parametric" in run.lines_of("tokenize_probes", "wildcards")[0]
