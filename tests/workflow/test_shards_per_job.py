"""A capture of several shards loads the model once, and loses none of them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from snakemake_project import DEADLINE_S, Project
from test_faults import workers

HEADS = "results/tiny/heads.parquet"
BOTH = "capture_2_from_000_of_002"


def two_a_job(project: Project) -> None:
    project.edit_config(lambda config: config["models"]["tiny"].update(shards_per_job=2))


def captured(project: Project) -> list[str]:
    """Return the shards that were captured, by what the logs of the last jobs say."""
    logs = (project.folder / "results/tiny/logs/capture").rglob("*.log")
    said = [line for log in logs for line in log.read_text(encoding="utf-8").splitlines()]
    return [line.split("/")[-1].split(".")[0] for line in said if "probes on cpu" in line]


def test_shards_and_tables_are_those_of_a_job_for_each(finished, clone):
    two_a_job(clone)
    folder = next((clone.folder / "results/store/tiny/activations/nolima").iterdir())
    shutil.rmtree(folder)
    run = clone.make()
    assert run.jobs[BOTH] == 1 and "capture" not in run.jobs
    assert captured(clone) == ["000-of-002", "001-of-002"]
    assert clone.tables() == finished[0].tables()
    assert sorted(path.name for path in folder.iterdir()) == [
        f"00{index}-of-002.{suffix}" for index in (0, 1) for suffix in ("json", "zarr.zip")
    ]


def test_a_shard_that_is_there_is_not_made_again(finished, clone):
    two_a_job(clone)
    lost = clone.lose("activations/nolima/*/001-of-002.zarr.zip")
    kept = lost.with_name("000-of-002.zarr.zip")
    file = kept.stat().st_ino
    assert clone.make(HEADS).jobs[BOTH] == 1
    assert captured(clone) == ["001-of-002"]
    assert kept.stat().st_ino == file
    assert lost.read_bytes() == finished[0].tables()[tiny_file(lost)]


def tiny_file(path: Path) -> str:
    return "/".join(path.parts[path.parts.index("store") :])


def test_a_killed_job_goes_on_with_the_shard_that_it_was_at(finished, clone):
    two_a_job(clone)
    folder = next((clone.folder / "results/store/tiny/activations/nolima").iterdir())
    shutil.rmtree(folder)
    first = folder / ".tmp-waiting-000-of-002.zarr.zip"
    with clone.started(clone.command(HEADS)) as process:
        deadline = time.monotonic() + DEADLINE_S
        while not first.exists():
            assert process.poll() is None and time.monotonic() < deadline, clone.said()
            time.sleep(0.002)
        for _, pid in workers(process):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 1
    assert not (folder / "000-of-002.zarr.zip").exists()
    clone.make(HEADS)
    assert captured(clone) == ["001-of-002"]
    assert clone.tables().items() <= finished[0].tables().items()
    assert not first.exists()


def test_the_last_job_has_the_shards_that_are_left(clone):
    two_a_job(clone)
    clone.edit_config(lambda config: config["probes"]["nolima"].update(shards=3))
    outputs = [
        [Path(file).name.split(".")[0] for file in run_outputs.split(", ")]
        for rule in (f"capture_2_from_00{index}_of_003" for index in (0, 2))
        for run_outputs in clone.would_run(HEADS).lines_of(rule, "output")
    ]
    assert [sorted(set(names)) for names in outputs] == [
        ["000-of-003", "001-of-003"],
        ["002-of-003"],
    ]


def test_models_of_one_config_have_jobs_of_their_own_size(clone):
    two_a_job(clone)
    other = {"source": {"folder": "data/models/tiny"}, "dtype": "bfloat16"}
    clone.edit_config(lambda config: config["models"].update(other=other))
    run = clone.would_run("results/other/heads.parquet")
    assert run.jobs["capture"] == 2 and BOTH not in run.jobs
