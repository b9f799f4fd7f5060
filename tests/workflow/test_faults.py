"""After a fault the obvious next step, running again, gives what an undisturbed run gives."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from snakemake_project import DEADLINE_S, TARGET, Project, copied_project, with_fewer_answers
from test_reruns import NOTHING

HEADS = "results/tiny/heads.parquet"
SCRIPTS = (
    "tokenize_probes",
    "capture",
    "calibrate",
    "score",
    "collect_heads",
    "select_heads",
    "generate",
    "tabulate",
)


def workers(process: subprocess.Popen[bytes]) -> Iterator[tuple[str, int]]:
    """Return the scripts that a run is running, with their process ids."""
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            command = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        # python .snakemake/scripts/tmpXXXX.{name of the script}.py
        if len(command) == 2 and Path(command[1]).parent.name == "scripts":
            yield Path(command[1]).name.split(".")[-2], child.pid


def killed_workers(
    process: subprocess.Popen[bytes], left: set[tuple[str, signal.Signals]]
) -> set[tuple[str, signal.Signals]]:
    """Kill a worker of each script that is left, by each signal, until the run ends; return which."""
    killed: dict[int, tuple[str, signal.Signals]] = {}
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None:
        assert time.monotonic() < deadline
        for script, pid in workers(process):
            due = sorted(kill for kill in left - set(killed.values()) if kill[0] == script)
            if due and pid not in killed:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, due[0][1])
                    killed[pid] = due[0]
        time.sleep(0.005)
    return set(killed.values())


def store_times(project: Project) -> dict[str, int]:
    """Return when each artifact of the store was written."""
    store = project.folder / "results/store"
    return {str(path): path.stat().st_mtime_ns for path in store.rglob("[!.]*") if path.is_file()}


def test_workers_killed_at_every_stage_lose_only_their_own_work(fewer_answers, tmp_path):
    project = copied_project(tmp_path / "project")
    project.edit_config(with_fewer_answers)
    left = set(itertools.product(SCRIPTS, (signal.SIGTERM, signal.SIGKILL)))
    while left:
        before = store_times(project)
        with project.started(project.command(TARGET)) as process:
            killed = killed_workers(process, left)
        assert process.returncode == 1 and killed, project.said()
        left -= killed
        assert before.items() <= store_times(project).items()
    project.make()
    assert before.items() <= store_times(project).items()
    made = project.tables()
    assert "tiny/ablation.parquet" in made
    assert made.items() <= fewer_answers.tables().items()


def assert_heads_are_those_of(finished: Project, project: Project) -> None:
    """Compare all that was made up to the ranking, byte for byte."""
    made = project.tables()
    assert "tiny/heads.parquet" in made
    assert made.items() <= finished.tables().items()


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_completes(finished, clone):
    clone.lose("activations/*/*/*.zarr.zip")
    with clone.started(clone.command(HEADS)) as first:
        while not list(workers(first)):
            assert first.poll() is None
            time.sleep(0.01)
        second = clone.run(HEADS)
        assert second.code == 1
        assert "LockException" in second.text and "--unlock" in second.text
    assert first.returncode == 0, clone.said()
    assert_heads_are_those_of(finished[0], clone)


def test_artifacts_from_the_future_make_nothing_and_are_replaced_by_an_edit(finished, project):
    ahead = time.time() + 10 * 86400
    for path in (project.folder / "results").rglob("*"):
        os.utime(path, (ahead, ahead))
    assert NOTHING in project.would_run().text
    project.edit_config(lambda config: config["scores"]["locos"].update(formula="needle_phi"))
    assert project.make(HEADS).jobs == {"score": 1, "collect_heads": 1}
    assert project.tables()["tiny/heads.parquet"] != finished[0].tables()["tiny/heads.parquet"]
    shutil.copy(finished[0].folder / "config.yaml", project.folder)
    project.make()
    assert project.tables() == finished[0].tables()


def damaged(path: Path) -> None:
    """Flip a bit in every kilobyte of a file."""
    content = bytearray(path.read_bytes())
    for position in range(0, len(content), 1000):
        content[position] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_corrupt_file_is_named_and_once_deleted_made_again(finished, clone):
    store = clone.folder / "results/store/tiny"
    for pattern, harm, reader in (
        ("activations/nolima/*/000-of-002.zarr.zip", damaged, HEADS),
        ("generations/nonliteral/*.parquet", cut_off, TARGET),
    ):
        path = next(store.glob(pattern))
        harm(path)
        run = clone.run(reader)
        assert run.code == 1 and not (clone.folder / reader).exists()
        (line, *_) = [line for line in run.text.splitlines() if "error: " in line]
        assert path.name in line and "delete it and run again" in line
        path.unlink()
    clone.make()
    assert clone.tables() == finished[0].tables()


def test_a_capture_without_memory_says_so_and_with_enough_it_completes(finished, clone):
    clone.lose("activations/*/*/*.zarr.zip")
    code = "workflow_scripts/activations/capture_probes.py"
    prefill = "    cache, logits = prefill_batch(runner, prompts, batch)\n"
    # No machine has an exbibyte, so torch's allocator fails as it does on a small one.
    greedy = prefill + "    torch.empty(1 << 60, dtype=torch.uint8)\n"
    clone.replace(code, prefill, greedy)
    run = clone.run(HEADS)
    assert run.code == 1
    assert "6 of 6 probes could not be run (out_of_memory 6)" in run.text, run.text
    clone.replace(code, greedy, prefill)
    clone.make(HEADS)
    assert_heads_are_those_of(finished[0], clone)
