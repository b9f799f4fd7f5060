"""After a fault the obvious next step, running again, gives what an undisturbed run gives."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from snakemake_project import TARGET, Project, copied_project, environment

DEADLINE_S = 120
NOTHING = "Nothing to be done"
STAGES = (
    "tokenize_probes capture calibrate score collect_heads select_heads generate ablation".split()
)


def start(project: Project) -> subprocess.Popen[bytes]:
    """Start the main target; what it says goes to said.txt."""
    with (project.folder / "said.txt").open("w", encoding="utf-8") as output:
        return subprocess.Popen(
            project.command(TARGET),
            cwd=project.folder,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def worker_of(process: subprocess.Popen[bytes], stages: list[str]) -> tuple[str, int] | None:
    """Return a running script of one of some stages, by its rule and process id."""
    try:
        for child in psutil.Process(process.pid).children(recursive=True):
            words = child.cmdline()
            # Snakemake runs scripts/tmpXXXX.{name of the script}.
            if len(words) == 2 and ".snakemake/scripts/" in words[1]:
                script = Path(words[1]).name.split(".")[-2]
                rule = {"tabulate": "ablation"}.get(script, script)
                if rule in stages:
                    return rule, child.pid
    except psutil.NoSuchProcess:
        pass
    return None


def times(project: Project) -> dict[Path, int]:
    store = project.folder / "results/store"
    return {path: path.stat().st_mtime_ns for path in store.rglob("[!.]*") if path.is_file()}


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_killed_at_every_stage(finished, tmp_path, signal_number):
    project = copied_project(tmp_path / "project")
    # Half the stages by each signal, the others undisturbed.
    left = STAGES[signal_number == signal.SIGTERM :: 2]
    while True:
        before = times(project)
        process = start(project)
        deadline = time.monotonic() + DEADLINE_S
        killed = None
        while process.poll() is None:
            assert time.monotonic() < deadline
            if killed is None and (killed := worker_of(process, left)):
                os.kill(killed[1], signal_number)
            time.sleep(0.005)
        after = times(project)
        assert {path: after.get(path) for path in before} == before, "something was made twice"
        if killed is None:
            break
        assert process.returncode == 1, killed
        left.remove(killed[0])
    assert process.returncode == 0, (project.folder / "said.txt").read_text()
    assert left == []
    assert project.tables() == finished[0].tables()


def test_a_full_disk_is_named_and_with_room_the_run_completes(finished, clone):
    store = clone.folder / "results/store"
    kept = clone.folder / "kept"
    shutil.move(store, kept)
    for shard in (kept / "tiny/activations").rglob("000-of-002.*"):
        shard.unlink()
    store.mkdir()
    run = " ".join(f"'{word}'" for word in clone.command(TARGET))
    # In a mount namespace of its own: the file system is gone when the script ends.
    script = f"""
        set -eu
        mount -t tmpfs -o size=64m tmpfs results/store
        cp -r kept/. results/store
        used=$(df --output=used results/store | tail -1)
        mount -o remount,size=$((used + 16))k results/store
        if {run} > full.txt 2>&1; then exit 3; fi
        find results/store -name '*.tmp-*' > left.txt
        mount -o remount,size=64m results/store
        {run} > again.txt 2>&1
        rm -r kept && cp -r results/store kept
    """
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    done = subprocess.run(
        [*unshare, "sh", "-c", script],
        cwd=clone.folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    full = clone.folder / "full.txt"
    said = full.read_text() if full.exists() else ""
    assert done.returncode == 0, f"{done.stderr}{said}\n(needs the right to mount a tmpfs)"
    assert "No space left on device" in said
    assert (clone.folder / "left.txt").read_text() == ""
    store.rmdir()
    shutil.move(kept, store)
    assert clone.tables() == finished[0].tables()


def damaged(path: Path) -> None:
    """Overwrite the middle of a file."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("harm", [damaged, cut_off])
@pytest.mark.parametrize(
    ("pattern", "reader"),
    [
        ("activations/nolima/*/000-of-002.zarr.zip", "results/tiny/scores/locos.parquet"),
        ("generations/nonliteral/*.parquet", TARGET),
    ],
)
def test_a_corrupt_file_is_named_and_once_deleted_made_again(
    finished, clone, pattern, reader, harm
):
    path = next((clone.folder / "results/store/tiny").glob(pattern))
    harm(path)
    run = clone.run(reader)
    assert run.code == 1
    assert any(
        path.name in line and "delete it and run again" in line for line in run.text.splitlines()
    ), run.text
    assert not (clone.folder / reader).exists()
    path.unlink()
    clone.make()
    assert clone.tables() == finished[0].tables()


def test_a_second_run_in_the_same_folder_is_refused(finished, clone):
    shutil.rmtree(clone.folder / "results/store/tiny/activations")
    first = start(clone)
    deadline = time.monotonic() + DEADLINE_S
    while worker_of(first, STAGES) is None:
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.01)
    second = clone.run(TARGET)
    assert second.code == 1
    assert "LockException" in second.text and "--unlock" in second.text
    assert first.wait() == 0
    assert clone.tables() == finished[0].tables()


def test_artifacts_from_the_future_make_nothing(finished, project):
    ahead = time.time() + 10 * 86400
    for path in (project.folder / "results/store").rglob("*"):
        os.utime(path, (ahead, ahead))
    assert NOTHING in project.would_run().text
    # And an edit is still seen, although the files that it must replace are newer.
    project.edit_config(lambda config: config["scores"]["locos"].update(formula="needle_phi"))
    assert project.would_run().jobs["score"] == 1


def test_a_capture_without_memory_says_so_and_with_enough_it_completes(finished, clone):
    shutil.rmtree(clone.folder / "results/store/tiny/activations")
    code = "workflow_scripts/activations/capture_probes.py"
    prefill = "    cache, logits = prefill_batch(runner, prompts, batch)\n    budget"
    # No machine has an exbibyte, so torch's allocator fails as it does on a small one.
    greedy = prefill.replace(
        "    budget", "    torch.empty(1 << 60, dtype=torch.uint8)\n    budget"
    )
    clone.replace(code, prefill, greedy)
    run = clone.run(TARGET)
    assert run.code == 1
    assert "6 of 6 probes could not be run (out_of_memory 6)" in run.text, run.text
    assert not list((clone.folder / "results/store").rglob("*.zarr.zip"))
    clone.replace(code, greedy, prefill)
    clone.make()
    assert clone.tables() == finished[0].tables()


def test_another_number_of_cores_in_another_folder_gives_the_same_bytes(finished, tmp_path):
    project = copied_project(tmp_path / "elsewhere" / "another project")
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "1", TARGET],
        cwd=project.folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert project.tables() == finished[0].tables()
