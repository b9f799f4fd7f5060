"""What an edit makes again, and what it leaves alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import polars as pl
import yaml
from snakemake_project import Project, Run

NOTHING = "Nothing to be done"
EXPENSIVE = ("tokenize_probes", "capture", "calibrate", "generate")
CHEAP_OF_ONE_SCORE = {"score": 1, "collect_heads": 1, "select_heads": 1, "ablation": 1}


def expensive(run: Run) -> dict[str, int]:
    return {rule: count for rule, count in run.jobs.items() if rule in EXPENSIVE}


def store_files(project: Project) -> dict[str, int]:
    """Return when each artifact of the store was written."""
    return {
        name: (project.folder / "results" / name).stat().st_mtime_ns
        for name in project.tables()
        if name.startswith("store/")
    }


def test_a_second_run_makes_nothing(project):
    assert NOTHING in project.would_run().text


def test_times_alone_make_nothing(project):
    # Each kind of file just newer than all that is made from it.
    stages = [
        *("results/tiny/ablation.parquet", "results/store/tiny/generations"),
        *("results/tiny/selection.parquet", "results/tiny/heads.parquet", "results/tiny/scores"),
        *("results/store/tiny/calibration", "results/store/tiny/activations"),
        *("results/store/tiny/probes", "data", "workflow_scripts", "rules", "profiles"),
        *("Snakefile", "config.yaml"),
    ]
    now = time.time_ns() - 10**9 * len(stages)
    for stage in stages:
        now += 10**9
        path = project.folder / stage
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        assert files, stage
        for file in files:
            os.utime(file, ns=(now, now))
    assert NOTHING in project.would_run().text


def test_comments_docstrings_and_blank_lines_make_nothing(project):
    scripts = [
        path
        for path in (project.folder / "workflow_scripts").rglob("*.py")
        if path.read_text(encoding="utf-8").startswith('"""')
    ]
    assert len(scripts) > 20
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        edited = text.replace('"""', '"""Edited. ', 1) + "\n\n# A comment at the end.\n"
        script.write_text(edited, encoding="utf-8")
    assert NOTHING in project.would_run().text


def test_the_order_of_keys_in_the_config_makes_nothing(project):
    def reverse(value):
        if isinstance(value, dict):
            return {key: reverse(item) for key, item in reversed(value.items())}
        return value

    path = project.folder / "config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert next(iter(config)) == "store"
    path.write_text(yaml.safe_dump(reverse(config), sort_keys=False), encoding="utf-8")
    assert NOTHING in project.would_run().text


def test_a_formula_makes_its_score_and_what_hangs_on_it(project):
    project.edit_config(lambda config: config["scores"]["locos"].update(formula="needle_phi"))
    run = project.would_run()
    assert run.jobs == CHEAP_OF_ONE_SCORE
    assert run.lines_of("score", "wildcards") == ["model=tiny, score=locos"]


def test_a_formula_that_means_the_same_makes_no_generation(project):
    before = project.tables()
    same = "needle_phi - off_phi / off_len * needle_len"
    project.edit_config(lambda config: config["scores"]["locos"].update(formula=same))
    # The heads come out as they were; the table says what it was made from, so it is written again.
    made = {"score": 1, "collect_heads": 1, "select_heads": 1, "ablation": 1}
    assert project.make().jobs == made
    generations = {name for name in before if "/generations/" in name}
    assert generations
    assert {name for name in project.tables() if "/generations/" in name} == generations
    assert NOTHING in project.would_run().text


def test_a_formula_that_picks_other_heads_generates_those_heads_only(project):
    before = store_files(project)
    # The retrieval head stays first, but the bottom is another.
    other = "needle_phi + 0 * off_phi"
    project.edit_config(lambda config: config["scores"]["locos"].update(formula=other))
    project.make("results/tiny/selection.parquet")
    run = project.would_run()
    assert set(run.jobs) == {"generate", "ablation"}
    assert 0 < run.jobs["generate"] <= 4
    outputs = {name.removeprefix("results/") for name in run.lines_of("generate", "output")}
    assert not outputs & set(before)


def test_code_of_a_score_makes_the_scores_and_what_hangs_on_them(project):
    with (project.folder / "workflow_scripts/scores/score.py").open("a", encoding="utf-8") as file:
        file.write("\nEDITED = True\n")
    assert project.would_run().jobs == CHEAP_OF_ONE_SCORE | {"score": 2}


def test_code_that_a_score_imports_makes_the_scores(project):
    with (project.folder / "workflow_scripts/common/digests.py").open(
        "a", encoding="utf-8"
    ) as file:
        file.write("\nEDITED = True\n")
    run = project.would_run()
    assert run.jobs == CHEAP_OF_ONE_SCORE | {"score": 2}


def test_a_raised_capture_version_makes_captures_and_what_hangs_on_them(project):
    project.replace(
        "workflow_scripts/common/versions.py", "CAPTURE_VERSION = ", "CAPTURE_VERSION = 1"
    )
    run = project.would_run()
    assert run.jobs == CHEAP_OF_ONE_SCORE | {"score": 2, "capture": 2}


def test_a_new_k_makes_generations_of_the_selectors_and_keeps_those_of_none(project):
    before = store_files(project)
    project.edit_config(lambda config: config["ablation"].update(k=[1, 2, 3]))
    project.make("results/tiny/selection.parquet")
    run = project.would_run()
    # locos top, locos bottom, random; on two tasks.
    assert run.jobs == {"generate": 6, "ablation": 1}
    inputs = run.lines_of("ablation", "input")[0].split(", ")
    kept = {name.removeprefix("results/") for name in inputs} & set(before)
    assert sorted(Path(name).parent.name for name in kept) == ["literal", "nonliteral"]


def test_a_new_seed_makes_the_generations_of_random_only(project):
    project.edit_config(lambda config: config["selectors"]["random"].update(seeds=[42, 43, 44]))
    project.make("results/tiny/selection.parquet")
    assert project.would_run().jobs == {"generate": 2, "ablation": 1}


def test_a_new_model_row_makes_nothing_for_the_others(project):
    project.edit_config(
        lambda config: config["models"].update(other={"source": {"folder": "data/models/tiny"}})
    )
    assert NOTHING in project.would_run().text


def test_a_task_s_probes_make_the_generations_of_that_task(project):
    project.edit_config(lambda config: config["probes"]["literal"].update(size=6))
    project.make("results/tiny/selection.parquet")
    run = project.would_run()
    assert run.jobs == {"tokenize_probes": 1, "generate": 4, "ablation": 1}
    assert all("task=literal" in line for line in run.lines_of("generate", "wildcards"))


def test_another_dtype_lies_beside_the_first_and_going_back_makes_no_model_run(project):
    before = store_files(project)
    project.edit_config(lambda config: config["models"]["tiny"].update(dtype="bfloat16"))
    assert project.make("results/tiny/scores/locos.parquet").jobs == {"capture": 2, "score": 1}
    both = store_files(project)
    assert both.items() > before.items()
    assert len([name for name in both.keys() - before.keys() if "/activations/" in name]) == 2
    project.edit_config(lambda config: config["models"]["tiny"].update(dtype="float32"))
    run = project.would_run()
    assert run.jobs["score"] == 1
    assert expensive(run) == {}


def test_how_many_shards_there_are_changes_scores_by_rounding_only(finished, clone):
    clone.edit_config(lambda config: config["probes"]["nolima"].update(shards=3))
    assert clone.make("results/tiny/heads.parquet").jobs["capture"] == 3
    key = ["score", "layer", "head"]
    two, three = (
        pl.read_parquet(project.folder / "results/tiny/heads.parquet").sort(key)
        for project in (finished[0], clone)
    )
    assert two.height == 64 and two.select(key).equals(three.select(key))
    # Which probes share a batch decides the order of float32 sums.
    assert (two["value"] - three["value"]).abs().max() < 1e-6
    assert two["n_probes"].equals(three["n_probes"])


def test_a_fresh_copy_with_the_store_runs_no_model_and_makes_the_same_tables(finished, clone):
    assert not (clone.folder / ".snakemake").exists()
    run = clone.make()
    assert expensive(run) == {}
    assert run.jobs["ablation"] == 1
    assert clone.tables() == finished[0].tables()
    assert NOTHING in clone.would_run().text
