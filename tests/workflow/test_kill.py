"""A run killed in the middle is completed by the next, and nothing half-written is read."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from snakemake_project import TARGET, Project, environment

DEADLINE_S = 90


def kill_when(project: Project, happens: Callable[[], bool]) -> None:
    """Start the main target and kill all its processes at once when something happens."""
    with (project.folder / "killed.txt").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            project.command(TARGET),
            cwd=project.folder,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + DEADLINE_S
        try:
            while not happens():
                assert process.poll() is None, output.read() or "ended before it could be killed"
                assert time.monotonic() < deadline, "never came to the point of the kill"
                time.sleep(0.002)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def lost(project: Project, pattern: str) -> Path:
    """Delete one artifact of the store and return where it was."""
    artifact = next((project.folder / "results/store/tiny").glob(pattern))
    artifact.unlink()
    return artifact


def log_says(project: Project, rule: str, words: str) -> bool:
    logs = (project.folder / "results/tiny/logs" / rule).rglob("*.log")
    return any(words in log.read_text(encoding="utf-8") for log in logs)


def complete(project: Project) -> None:
    """Run again as a user does: unlock the folder that the killed run left locked, then run."""
    assert project.run("--unlock").code == 0
    project.make()


@pytest.mark.parametrize("moment", ["running the model", "writing the shard"])
def test_a_killed_capture_leaves_no_shard_and_is_made_again(finished, clone, moment):
    shard = lost(clone, "activations/nolima/*/000-of-002.zarr.zip")

    def at_the_moment() -> bool:
        if moment == "running the model":
            return log_says(clone, "capture", "probes on cpu")
        return any(shard.parent.glob(".tmp-*"))

    kill_when(clone, at_the_moment)
    assert not shard.exists()
    complete(clone)
    assert clone.tables() == finished[0].tables()


def test_a_killed_generation_leaves_no_file_and_is_made_again(finished, clone):
    table = lost(clone, "generations/nonliteral/*.parquet")
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
