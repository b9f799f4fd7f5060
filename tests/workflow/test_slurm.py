"""The main job on a real Slurm cluster of one node, and what Slurm is asked for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from slurm_cluster import Cluster, running_cluster
from snakemake_project import (
    DEADLINE_S,
    TARGET,
    Project,
    copied_project,
    environment,
    with_fewer_answers,
)

# The test's cluster keeps no accounts. The plugin looks 5, 20 and 45 s after it sent a job; most end within 20.
QUICK = (
    "--slurm-status-command squeue --slurm-no-account --slurm-init-seconds-before-status-checks 5 "
    "--seconds-between-status-checks 1 --latency-wait 10"
).split()
ASKED = {"device": "balanced", "gpus": 2, "mem_mb": 1500, "runtime": 30}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@contextmanager
def started(
    cluster: Cluster, project: Project, *arguments: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run Snakemake with the profile for Slurm; when the block ends, wait until it has ended well."""
    command = [sys.executable, "-m", "snakemake", "--workflow-profile", "profiles/slurm"]
    environ = environment() | cluster.environment
    with project.started([*command, *QUICK, *arguments], env=environ) as process:
        yield process
    assert process.returncode == 0, project.said()


def captures(jobs: list[dict[str, str]]) -> list[dict[str, str]]:
    return [job for job in jobs if job["Comment"].startswith("rule_capture_")]


def cancel_a_running_capture(cluster: Cluster, process: subprocess.Popen[bytes]) -> str:
    """Wait until a capture runs, cancel it, and return its number."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        for job in captures(cluster.jobs()):
            if job["JobState"] == "RUNNING":
                cluster.command("scancel", job["JobId"])
                return job["JobId"]
        time.sleep(0.1)
    raise AssertionError("no capture ever ran")


@pytest.fixture(scope="module")
def on_slurm(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Project, list[dict[str, str]], str]:
    """The main target of a model with GPUs, the jobs it took, and the one cancelled as it ran."""
    project = copied_project(tmp_path_factory.mktemp("on-slurm") / "project")
    project.edit_config(with_fewer_answers)
    project.edit_config(lambda config: config["models"]["tiny"].update(ASKED))
    earlier = len(cluster.jobs())
    with started(cluster, project, TARGET) as process:
        cancelled = cancel_a_running_capture(cluster, process)
    return project, cluster.jobs()[earlier:], cancelled


def test_the_artifacts_are_those_of_a_local_run(fewer_answers, on_slurm):
    made = on_slurm[0].tables()
    assert "tiny/ablation.parquet" in made
    assert made.items() <= fewer_answers.tables().items()


def test_every_shard_and_table_is_a_job_and_a_cancelled_one_is_sent_again(on_slurm):
    _, jobs, cancelled = on_slurm
    ended = {job["JobId"]: job["JobState"] for job in jobs}
    assert ended.pop(cancelled) == "CANCELLED"
    assert set(ended.values()) == {"COMPLETED"}
    # Probes 2, captures 2, calibration 1, scores 2, heads 1, selection 1, answers 2, table 1.
    assert len(ended) == 12
    shards = [job["Comment"] for job in captures(jobs)]
    assert len(shards) == 3 and len(set(shards)) == 2


def test_shards_wait_for_none_of_each_other(on_slurm):
    first, second = captures(on_slurm[1])[:2]
    assert max(first["SubmitTime"], second["SubmitTime"]) <= min(
        first["EndTime"], second["EndTime"]
    )


def test_a_job_asks_for_its_model_s_gpus_memory_and_time_and_for_more_when_sent_again(on_slurm):
    _, jobs, cancelled = on_slurm
    asked = {
        job["JobId"]: (job["TresPerJob"], job["MinMemoryNode"], job["TimeLimit"])
        for job in captures(jobs)
    }
    first, again = ("gres:gpu:2", "1500M", "00:30:00"), ("gres:gpu:2", "3000M", "01:00:00")
    assert asked[cancelled] == first
    assert sorted(asked.values()) == [first, first, again]
    others = [job for job in jobs if job["Comment"].startswith("rule_score_")]
    assert len(others) == 2
    assert not [job for job in others if "TresPerJob" in job]


def test_several_shards_are_one_job_if_asked_for(cluster, finished, project):
    shards = sorted((project.folder / "results/store/tiny/activations").rglob("*.zarr.zip"))
    assert len(shards) == 2
    for shard in shards:
        shard.unlink()
    project.edit_config(lambda config: config["models"]["tiny"].update(shards_per_job=2))
    targets = [shard.relative_to(project.folder).as_posix() for shard in shards]
    earlier = len(cluster.jobs())
    with started(cluster, project, *targets):
        pass
    assert [job["JobState"] for job in cluster.jobs()[earlier:]] == ["COMPLETED"]
    assert project.tables() == finished[0].tables()
