"""What collaborators share: a store, copied shards, a pack or an archive; and nothing is made twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from snakemake_project import TARGET, Project, Run, copied_project, environment
from test_reruns import expensive

from tests.unit.test_sharing import Handler
from workflow_scripts.common.artifacts import read_provenance, write_table
from workflow_scripts.sharing.archive import format_archive
from workflow_scripts.sharing.list_shards import archive_rows
from workflow_scripts.sharing.place import place
from workflow_scripts.sharing.verify import verify

HEADS = "results/tiny/heads.parquet"
LOCOS = "results/tiny/scores/locos.parquet"
OTHER_BOTTOM = "needle_phi + 0 * off_phi"
"""Keeps the planted head first and puts another last."""


@pytest.fixture
def colleague(tmp_path: Path) -> Project:
    """Another clone of the project, with nothing made in it."""
    return copied_project(tmp_path / "a colleague's clone")


def set_store(project: Project, store: Path | str, **more: Any) -> None:
    project.edit_config(lambda config: config.update(store=str(store), **more))


def make_as_colleague(project: Project, target: str = TARGET) -> Run:
    """Make a target under an umask that hides files from others."""
    done = subprocess.run(
        project.command(target),
        cwd=project.folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        umask=0o077,
    )
    assert done.returncode == 0, done.stderr
    return Run(done.returncode, done.stdout + done.stderr)


def keys_of_shards(store: Path) -> set[str]:
    return {path.name for path in (store / "tiny/activations/nolima").iterdir()}


def test_a_team_s_store_is_used_added_to_and_gone_back_to(finished, project, colleague):
    store = project.folder / "results/store"
    for path in store.rglob("*"):
        os.utime(path, (0, 0))
    set_store(colleague, store)
    first = keys_of_shards(store)

    # The same config: nothing is captured and nothing generated.
    assert expensive(make_as_colleague(colleague)) == {}
    tables = colleague.tables()
    assert tables == {k: v for k, v in finished[0].tables().items() if not k.startswith("store/")}

    # Another formula: only the head sets that are new.
    colleague.edit_config(lambda config: config["scores"]["locos"].update(formula=OTHER_BOTTOM))
    assert set(expensive(make_as_colleague(colleague))) == {"generate"}

    # Another dtype: a key of its own, beside the first.
    colleague.edit_config(lambda config: config["models"]["tiny"].update(dtype="bfloat16"))
    assert expensive(make_as_colleague(colleague, LOCOS)) == {"capture": 2}
    assert len(keys_of_shards(store)) == 2 and first < keys_of_shards(store)

    # Back: what was there is found again.
    colleague.edit_config(lambda config: config["models"]["tiny"].update(dtype="float32"))
    assert expensive(make_as_colleague(colleague)) == {}
    assert verify(store)[1] == []


def test_copied_shards_are_scored_without_probes_model_or_answers(finished, colleague):
    source = finished[0].folder / "results/store/tiny/activations"
    shutil.copytree(source, colleague.folder / "results/store/tiny/activations")
    assert colleague.make(HEADS).jobs == {"score": 2, "collect_heads": 1}
    assert colleague.tables()["tiny/heads.parquet"] == finished[0].tables()["tiny/heads.parquet"]


def test_shards_of_a_converted_model_are_scored_where_it_was_not_converted(colleague):
    wheel = {"wheel": "no-such-wheel==1.0", "file": "model.gguf", "sha256": "0" * 64}
    colleague.edit_config(lambda config: config["models"]["tiny"].update(source=wheel))
    listed = colleague.would_run(HEADS)
    assert listed.jobs["convert_gguf"] == 1 and listed.jobs["capture"] == 2
    for outputs in listed.lines_of("capture", "output"):
        for name in outputs.replace(" (update)", "").split(", "):
            path = colleague.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
    assert colleague.would_run(HEADS).jobs == {"score": 2, "collect_heads": 1}


def test_two_runs_that_fill_one_store_at_once_both_succeed(finished, colleague, tmp_path):
    other = copied_project(tmp_path / "another clone")
    store = tmp_path / "team"
    processes = []
    for project in (colleague, other):
        set_store(project, store)
        processes.append(
            subprocess.Popen(
                project.command(HEADS),
                cwd=project.folder,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for process in processes:
        output, _ = process.communicate()
        assert process.returncode == 0, output
    # Two shards with their manifests, and the probes.
    assert verify(store) == (5, [])
    expected = finished[0].tables()["tiny/heads.parquet"]
    assert [p.tables()["tiny/heads.parquet"] for p in (colleague, other)] == [expected] * 2


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a small file system and returns its folder."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"run the tests as root, who may mount: {done.stderr}"
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], check=False, capture_output=True)


def error_lines(run: Run) -> list[str]:
    return [line for line in run.text.splitlines() if "error: " in line]


def test_a_full_store_is_one_clear_line_and_with_room_only_the_rest_is_made(
    finished, colleague, mounted
):
    whole = finished[0].folder / "results/store"
    store = mounted("size=64m")
    shutil.copytree(whole, store, dirs_exist_ok=True)
    shard = next((store / "tiny/activations").rglob("000-of-002.zarr.zip"))
    half = shard.stat().st_size // 2
    for file in shard.parent.glob("000-of-002.*"):
        file.unlink()
    before = verify(store)
    size = shutil.disk_usage(store).used + half
    subprocess.run(["mount", "-o", f"remount,size={size}", str(store)], check=True)
    set_store(colleague, store)
    run = colleague.run(LOCOS)
    assert run.code == 1 and "Traceback" not in run.text
    lines = error_lines(run)
    assert lines and all("No space left on device" in line for line in lines), run.text
    assert "free some space" in lines[0]
    assert verify(store) == before
    assert not list(store.rglob(".tmp-*"))

    subprocess.run(["mount", "-o", "remount,size=64m", str(store)], check=True)
    assert colleague.make(LOCOS).jobs == {"capture": 1, "score": 1}
    assert verify(store) == verify(whole)
    assert shard.read_bytes() == (whole / shard.relative_to(store)).read_bytes()
    expected = finished[0].tables()["tiny/scores/locos.parquet"]
    assert colleague.tables()["tiny/scores/locos.parquet"] == expected


def test_an_own_store_lies_over_a_read_only_one(finished, colleague, mounted):
    folder = mounted("size=64m")
    shutil.copytree(finished[0].folder / "results/store", folder, dirs_exist_ok=True)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    team = verify(folder)
    assert team[1] == []
    set_store(colleague, folder)
    # All is there: nothing has to be written.
    assert expensive(colleague.make()) == {}

    colleague.edit_config(lambda config: config["scores"]["locos"].update(formula=OTHER_BOTTOM))
    run = colleague.run(TARGET)
    assert run.code == 1 and "Traceback" not in run.text
    lines = [line for line in run.text.splitlines() if "Read-only file system" in line]
    assert lines and "shared_stores:" in lines[0], run.text

    set_store(colleague, "results/store", shared_stores=[str(folder)])
    assert set(expensive(colleague.make())) == {"generate"}
    own = colleague.folder / "results/store"
    assert {path.parent.parent.name for path in own.rglob("*.parquet")} == {"generations"}
    assert verify(folder) == team


def test_a_shared_store_that_is_not_mounted_makes_nothing_again(colleague):
    set_store(colleague, "results/store", shared_stores=["/no/such/mount"])
    run = colleague.run(TARGET)
    assert run.code == 1
    assert error_lines(run) == [
        "error: config: shared_stores: /no/such/mount is no folder; mount it, or take it out of the list"
    ]


def test_results_of_another_config_are_made_again_without_any_record(finished, colleague):
    shutil.copytree(finished[0].folder / "results", colleague.folder / "results")
    shutil.rmtree(colleague.folder / "results/store/tiny/generations")
    colleague.edit_config(lambda config: config["scores"]["locos"].update(formula=OTHER_BOTTOM))
    assert not (colleague.folder / ".snakemake").exists()
    jobs = colleague.would_run().jobs
    assert {"score", "collect_heads", "select_heads", "ablation"} <= set(jobs)


def test_a_table_of_another_config_copied_over_one_s_own_is_made_again(finished, project):
    rules = {
        "scores/locos": "score",
        "heads": "collect_heads",
        "selection": "select_heads",
        "ablation": "ablation",
    }
    for name, rule in reversed(rules.items()):
        path = project.folder / f"results/tiny/{name}.parquet"
        provenance, table = read_provenance(path), pl.read_parquet(path)
        extra = {"counts": provenance["counts"]} if "counts" in provenance else {}
        other = {**provenance["spec"], "seed": 7}
        write_table(table, path, kind=provenance["kind"], spec=other, **extra)
        # Just as old as the one that it replaces.
        before = finished[0].folder / f"results/tiny/{name}.parquet"
        os.utime(path, ns=(before.stat().st_mtime_ns,) * 2)
        assert project.would_run().jobs[rule] == 1
    assert expensive(project.make()) == {}
    assert project.tables() == finished[0].tables()


def test_a_pack_is_placed_and_nothing_is_made_again(finished, project, colleague):
    project.make("results/tiny/pack.zip")
    pack = shutil.copy(
        project.folder / "results/tiny/pack.zip", colleague.folder.parent / "pack.zip"
    )
    shutil.rmtree(colleague.folder / "data/models/tiny/haystacks")
    (colleague.folder / "data/models/tiny/needles.json").unlink()
    _, config = place(Path(pack), colleague.folder / "results/store", colleague.folder)
    shutil.copy(config, colleague.folder / "config.yaml")
    assert expensive(colleague.make()) == {}
    assert colleague.tables() == finished[0].tables()


@contextmanager
def published(
    store: Path, handler: type[SimpleHTTPRequestHandler], query: str = ""
) -> Iterator[str]:
    """Serve the shards of a store, and yield their table."""
    in_store = partial(handler, directory=str(store))
    with ThreadingHTTPServer(("127.0.0.1", 0), in_store) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{{path}}{query}"
        yield format_archive(archive_rows(store, url))
        server.shutdown()


@pytest.fixture
def archive(finished: tuple[Project, Run]) -> Iterator[str]:
    """The table of the finished run's shards on a web server."""
    with published(finished[0].folder / "results/store", SimpleHTTPRequestHandler) as table:
        yield table


def use_archive(project: Project, table: str) -> None:
    (project.folder / "shards.tsv").write_text(table, encoding="utf-8")
    source = {"source": "archive", "table": "shards.tsv"}
    project.edit_config(lambda config: config.update(activations=source))


def test_published_shards_are_scored_without_a_model(finished, colleague, archive):
    use_archive(colleague, archive)
    assert colleague.make(HEADS).jobs == {"download": 2, "score": 2, "collect_heads": 1}
    store = {k: v for k, v in finished[0].tables().items() if "activations" in k}
    assert store.items() <= colleague.tables().items()
    assert colleague.tables()["tiny/heads.parquet"] == finished[0].tables()["tiny/heads.parquet"]


def test_a_download_that_breaks_off_goes_on(finished, colleague):
    handler = type("Cutting", (Handler,), {"requests": []})
    with published(finished[0].folder / "results/store", handler, "?cut") as table:
        use_archive(colleague, table)
        run = colleague.run("--cores", "1", HEADS)  # only the very first request is cut
    assert run.code == 0 and "; check the address and the network, and run again" in run.text
    assert len([request for request in handler.requests if "bytes=" in request]) == 1
    assert colleague.tables()["tiny/heads.parquet"] == finished[0].tables()["tiny/heads.parquet"]


def test_a_published_shard_that_was_changed_or_is_not_listed_is_one_line(colleague, archive):
    header, *rows = archive.splitlines(keepends=True)
    path, size, sha256, url = rows[1].split("\t")
    use_archive(colleague, header + rows[0] + "\t".join((path, size, "0" * 64, url)))
    run = colleague.run("--retries", "0", "--keep-going", HEADS)
    assert run.code == 1 and "Traceback" not in run.text
    lines = error_lines(run)
    assert any(url.strip() in line and f"its SHA-256 is {sha256}" in line for line in lines)
    assert any("shards.tsv: has no row for tiny/activations" in line for line in lines)
    assert not list((colleague.folder / "results/store").rglob("[!.]*.zarr.zip"))
