"""The main job on a real Slurm cluster of one node, and what Slurm is asked for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from slurm_cluster import Cluster, running_cluster
from snakemake_project import TARGET, Project, copied_project, environment

DEADLINE_S = 600
# The test's cluster keeps no accounts; and nobody waits for the pauses that spare a busy one.
QUICK = (
    "--slurm-status-command squeue --slurm-no-account --slurm-init-seconds-before-status-checks 1 "
    "--seconds-between-status-checks 1 --latency-wait 10"
).split()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@dataclass(frozen=True)
class ClusterRun:
    """What became of a run on the cluster."""

    code: int
    text: str
    jobs: list[dict[str, str]]

    def captures(self) -> list[dict[str, str]]:
        return [job for job in self.jobs if is_capture(job)]


def is_capture(job: dict[str, str]) -> bool:
    return "capture" in job.get("Comment", "")


def run_on(
    cluster: Cluster,
    project: Project,
    targets: list[str],
    *arguments: str,
    meanwhile: Callable[[subprocess.Popen[bytes]], object] = lambda process: None,
) -> ClusterRun:
    """Run Snakemake with the profile for Slurm to its end."""
    earlier = len(cluster.jobs())
    command = [sys.executable, "-m", "snakemake", "--workflow-profile", "profiles/slurm"]
    log = project.folder / "slurm.txt"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, *targets, *QUICK, *arguments],
            cwd=project.folder,
            env=environment() | cluster.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            meanwhile(process)
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait()
    return ClusterRun(process.returncode, log.read_text(), cluster.jobs()[earlier:])


def cancel_a_running_capture(cluster: Cluster, process: subprocess.Popen[bytes]) -> str:
    """Wait until a capture runs, cancel it, and return its number."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        for job in cluster.jobs():
            if is_capture(job) and job["JobState"] == "RUNNING":
                cluster.command("scancel", job["JobId"])
                return job["JobId"]
        time.sleep(0.1)
    raise AssertionError("no capture ever ran")


def in_shards(count: int) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["probes"]["nolima"].update(shards=count)


@pytest.fixture(scope="module")
def on_slurm(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Project, ClusterRun, str]:
    """The main target in four shards, one of whose jobs was cancelled while it ran."""
    project = copied_project(tmp_path_factory.mktemp("on-slurm") / "project")
    project.edit_config(in_shards(4))
    cancelled: list[str] = []
    run = run_on(
        cluster,
        project,
        [TARGET],
        meanwhile=lambda process: cancelled.append(cancel_a_running_capture(cluster, process)),
    )
    assert run.code == 0, run.text
    return project, run, cancelled[0]


def test_the_tables_are_those_of_a_local_run(finished, on_slurm):
    local, remote = finished[0].tables(), on_slurm[0].tables()
    shards = {name for name in local.keys() | remote.keys() if name.endswith(".zarr.zip")}
    assert {n: t for n, t in remote.items() if n not in shards} == {
        n: t for n, t in local.items() if n not in shards
    }


def test_every_job_is_a_job_of_slurm(finished, on_slurm):
    run = on_slurm[1]
    completed = [job for job in run.jobs if job["JobState"] == "COMPLETED"]
    more_shards = 2
    assert len(completed) == finished[1].jobs.total() + more_shards


def test_four_shards_are_four_jobs_that_wait_for_none_of_each_other(on_slurm):
    captures = on_slurm[1].captures()
    assert len({job["Comment"] for job in captures}) == 4
    first_four = captures[:4]
    assert max(job["SubmitTime"] for job in first_four) <= min(job["EndTime"] for job in first_four)


def test_a_cancelled_job_is_sent_again_and_completes(on_slurm):
    _, run, cancelled = on_slurm
    states = {job["JobId"]: job["JobState"] for job in run.jobs}
    assert states.pop(cancelled) in ("CANCELLED", "FAILED")
    assert set(states.values()) == {"COMPLETED"}
    assert len(run.captures()) == 5


def test_a_job_asks_for_its_model_s_memory_time_and_gpus_and_for_more_when_sent_again(
    cluster, tmp_path
):
    project = copied_project(tmp_path / "project")
    asked = {"device": "balanced", "gpus": 2, "mem_mb": 1500, "runtime": 30}
    project.edit_config(lambda config: config["models"]["tiny"].update(asked))
    project.edit_config(in_shards(1))
    run = run_on(
        cluster,
        project,
        ["results/tiny/scores/locos.parquet"],
        meanwhile=lambda process: cancel_a_running_capture(cluster, process),
    )
    assert run.code == 0, run.text
    found = [(job["TresPerJob"], job["MinMemoryNode"], job["TimeLimit"]) for job in run.captures()]
    assert found == [
        ("gres:gpu:2", "1500M", "00:30:00"),
        ("gres:gpu:2", "3000M", "01:00:00"),
    ]


def test_a_group_of_shards_is_one_job(cluster, finished, tmp_path):
    project = Project(tmp_path / "project")
    shutil.copytree(finished[0].folder, project.folder)
    shards = list((project.folder / "results/store/tiny/activations").rglob("*.zarr.zip"))
    assert len(shards) == 2
    for shard in shards:
        shard.unlink()
    targets = [shard.relative_to(project.folder).as_posix() for shard in shards]
    group = "--groups capture=shards --group-components shards=2".split()
    run = run_on(cluster, project, targets, *group)
    assert run.code == 0, run.text
    assert len(run.jobs) == 1
    assert project.tables() == finished[0].tables()


def test_a_device_that_the_cluster_would_have_to_guess_is_refused(cluster, tmp_path):
    project = copied_project(tmp_path / "project")
    project.edit_config(lambda config: config["models"]["tiny"].update(device="auto"))
    run = run_on(cluster, project, [TARGET])
    assert run.code == 1
    (line,) = [line for line in run.text.splitlines() if line.startswith("error: ")]
    assert "models.tiny.device" in line and "auto" in line
    assert run.jobs == []
