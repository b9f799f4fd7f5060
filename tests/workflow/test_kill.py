"""A run killed in the middle is completed by the next, and nothing half-written is read."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from snakemake_project import TARGET, Project

DEADLINE_S = 90


def kill_when(project: Project, happens: Callable[[], bool]) -> None:
    """Start the main target and kill all its processes at once when something happens."""
    with project.started(project.command(TARGET)) as process:
        deadline = time.monotonic() + DEADLINE_S
        while not happens():
            assert process.poll() is None, project.said() or "ended before it could be killed"
            assert time.monotonic() < deadline, "never came to the point of the kill"
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def log_says(project: Project, rule: str, words: str) -> bool:
    logs = (project.folder / "results/tiny/logs" / rule).rglob("*.log")
    return any(words in log.read_text(encoding="utf-8") for log in logs)


def complete(project: Project) -> None:
    """Run again as a user does: unlock the folder that the killed run left locked, then run."""
    assert project.run("--unlock").code == 0
    project.make()


@pytest.mark.parametrize("moment", ["running the model", "writing the shard"])
def test_a_killed_capture_leaves_no_shard_and_is_made_again(finished, clone, moment):
    shard = clone.lose("activations/nolima/*/000-of-002.zarr.zip")

    def at_the_moment() -> bool:
        if moment == "running the model":
            return log_says(clone, "capture", "probes on cpu")
        return any(shard.parent.glob(".tmp-*"))

    kill_when(clone, at_the_moment)
    assert not shard.exists()
    complete(clone)
    assert clone.tables() == finished[0].tables()


def test_a_killed_generation_leaves_no_file_and_is_made_again(finished, clone):
    table = clone.lose("generations/nonliteral/*.parquet")
    kill_when(clone, lambda: log_says(clone, "generate", "conditions x"))
    assert not table.exists()
    complete(clone)
    assert clone.tables() == finished[0].tables()


def test_half_written_files_of_killed_jobs_are_never_read(finished, clone):
    store = clone.folder / "results/store/tiny"
    folders = {path.parent for path in store.rglob("*") if path.is_file()}
    assert len(folders) >= 7
    for folder in folders:
        for name in sorted(path.name for path in folder.iterdir()):
            (folder / f".tmp-{name}-1234").write_bytes(b"half")
    clone.make()
    assert clone.tables() == finished[0].tables()
