"""Stores verified, packs made and placed, shards published and downloaded: what is used, what is named."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from rocrate.rocrate import ROCrate

from workflow_scripts.ablation.selection import HeadSet, generations_key
from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.digests import file_sha256, key_of
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.shards import manifest_of, write_shard
from workflow_scripts.sharing import place as place_module
from workflow_scripts.sharing.archive import COLUMNS, format_archive, read_archive
from workflow_scripts.sharing.crate import METADATA
from workflow_scripts.sharing.download import download
from workflow_scripts.sharing.list_shards import archive_rows
from workflow_scripts.sharing.pack import input_members, shared_config, write_pack
from workflow_scripts.sharing.place import place
from workflow_scripts.sharing.verify import verify

SPEC = {"model": "m", "probes": "p"}
TASK = {"model": "m", "probes": "q"}
SHARD = f"m/activations/d/{key_of(SPEC)}/000-of-001.zarr.zip"
PROBES = f"m/probes/d/{key_of(SPEC)}.parquet"
HOW = {"mode": "mean_query", "site": "q_proj", "factor": None, "calibration": "c"}
HEADS = [["0-1"], ["1-0", "0-2"]]
GENERATIONS = (
    "m/generations/t/"
    + generations_key(
        TASK,
        HOW,
        [HeadSet("", None, 0, None, tuple(heads)) for heads in HEADS],
    )
    + ".parquet"
)


def fill(store: Path) -> Path:
    """Write a shard, its manifest, a probes table and a file of generations."""
    path = store / SHARD
    alpha = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    arrays = {"alpha": alpha, "row_offset": np.zeros(1, np.int64)}
    about = {"probes": [{"status": "passed"}], "n_layers": 2, "n_heads": 3, "n_kv_heads": 3}
    write_shard(path, manifest_of(path), arrays, about, SPEC)
    probes = pl.DataFrame({"probe_id": [f"probe-{i}" for i in range(200)]})
    write_table(probes, store / PROBES, kind="probes", spec=SPEC)
    answers = pl.DataFrame(
        {
            "heads": [sorted(heads) for heads in HEADS for _ in range(2)],
            **HOW,
            # Long and hardly compressible, so that most of the file is pages of data.
            "text": [np.random.default_rng(i).bytes(4000).hex() for i in range(4)],
        }
    )
    path = store / GENERATIONS
    write_table(answers, path, kind="generations", spec=TASK | {"key": path.stem})
    return store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return fill(tmp_path / "store")


def only_error(store: Path) -> str:
    count, errors = verify(store)
    assert count >= 3 and len(errors) == 1, errors
    assert "\n" not in errors[0]
    return errors[0]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def test_a_whole_store_has_no_errors_and_half_written_files_are_no_artifacts(store: Path) -> None:
    (store / SHARD).with_name(".tmp-000-of-001.zarr.zip-1").write_bytes(b"half")
    assert verify(store) == (4, [])


@pytest.mark.parametrize("name", [SHARD, PROBES, GENERATIONS])
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_a_flipped_bit_is_named(store: Path, name: str, share: float) -> None:
    path = store / name
    flip(path, int(path.stat().st_size * share))
    assert str(path) in only_error(store)


@pytest.mark.parametrize("name", [SHARD, PROBES, GENERATIONS])
def test_a_cut_off_file_is_named(store: Path, name: str) -> None:
    path = store / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert str(path) in only_error(store)


@pytest.mark.parametrize("name", [SHARD, PROBES, GENERATIONS])
def test_a_file_of_other_probes_is_named_wherever_it_lies(store: Path, name: str) -> None:
    other = "0123456789abcdef"
    moved = store / name.replace(key_of(SPEC), other)
    if name == GENERATIONS:
        moved = moved.with_name(f"{other}.parquet")
    moved.parent.mkdir(exist_ok=True)
    (store / name).rename(moved)
    if name == SHARD:
        manifest_of(store / name).rename(manifest_of(moved))
    assert "made for another model" in only_error(store)


def test_answers_of_other_heads_are_named(store: Path) -> None:
    path = store / GENERATIONS
    answers = pl.read_parquet(path).filter(pl.col("heads").list.len() == 1)
    write_table(answers, path, kind="generations", spec=TASK | {"key": path.stem})
    assert str(path) in only_error(store)


def test_a_manifest_without_its_shard_and_a_stray_file_are_named(store: Path) -> None:
    (store / SHARD).unlink()
    assert "the shard it describes is missing" in only_error(store)
    fill(store.parent / "other")
    (store.parent / "other/notes.txt").write_text("x")
    assert "not a file of a store" in only_error(store.parent / "other")


# Packs


@pytest.fixture
def pack(store: Path, tmp_path: Path) -> Path:
    data = tmp_path / "needles é.json"
    data.write_text("[]")
    members: dict[str, Any] = {
        f"store/{file.relative_to(store)}": file for file in store.rglob("*") if file.is_file()
    }
    members |= {"inputs/data/needles é.json": data, "config.yaml": "seed: 42\n"}
    path = tmp_path / "pack.zip"
    write_pack(path, members, name="LOCOS on m", date="2026-01-31")
    return path


def rewritten(pack: Path, change: Any) -> Path:
    """Return a pack whose members, by name, went through a function; its description fits them."""
    with zipfile.ZipFile(pack) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if name != METADATA}
    change(members)
    graph = [
        {
            "@id": name,
            "@type": "File",
            "contentSize": str(len(data)),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        for name, data in members.items()
    ]
    with zipfile.ZipFile(pack, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(METADATA, json.dumps({"@graph": graph}))
    return pack


def refused(pack: Path, folder: Path) -> str:
    """Return the line with which a pack is refused; nothing of it may be placed."""
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(UserError) as error:
        place(pack, folder / "store", folder)
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert sorted(p for p in folder.parent.rglob("*") if folder not in (p, *p.parents)) == [
        p for p in before if folder not in (p, *p.parents)
    ]
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_placed_pack_is_the_store_and_the_data_it_was_made_from(
    pack: Path, store: Path, tmp_path: Path
) -> None:
    project = tmp_path / "b"
    placed, config = place(pack, project / "store", project)
    assert placed == 5
    assert verify(project / "store") == (4, [])
    for name in (SHARD, PROBES, GENERATIONS):
        assert (project / "store" / name).read_bytes() == (store / name).read_bytes()
    assert (project / "data/needles é.json").read_text() == "[]"
    assert config.read_text() == "seed: 42\n"
    # Again: everything is there.
    assert place(pack, project / "store", project)[0] == 0
    assert [p for p in (project / "store").iterdir() if p.name.startswith(".")] == []


def test_the_description_is_an_ro_crate_with_every_file_and_its_checksum(
    pack: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(pack) as archive:
        archive.extractall(tmp_path / "crate")
    crate = ROCrate(tmp_path / "crate")
    assert crate.name == "LOCOS on m"
    assert crate.root_dataset["datePublished"] == "2026-01-31"
    files = {entity.id: entity for entity in crate.data_entities}
    assert len(files) == 6
    shard = files[f"store/{SHARD}"]
    assert shard["sha256"] == file_sha256(tmp_path / "crate/store" / SHARD)
    assert int(shard["contentSize"]) == (tmp_path / "crate/store" / SHARD).stat().st_size


def test_the_same_members_make_the_same_pack(pack: Path, store: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(pack) as archive:
        members: dict[str, Any] = {
            name: archive.read(name).decode("latin-1") for name in archive.namelist()
        }
    texts = {"config.yaml": members["config.yaml"], "inputs/a.txt": "a"}
    for name in ("1.zip", "2.zip"):
        write_pack(tmp_path / name, texts, name="n", date="2026-01-31")
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "../outside.txt",
        "inputs/../../outside.txt",
        "/tmp/outside.txt",
        "inputs//tmp/outside.txt",
        "store/../../outside.parquet",
        "inputs/C:\\outside.txt",
        "inputs/.snakemake/x.json",
        "inputs/workflow_scripts/evil.py",
        "inputs/Snakefile",
        "Snakefile",
    ],
)
def test_a_path_that_leaves_the_store_and_the_data_is_refused(
    pack: Path, tmp_path: Path, name: str
) -> None:
    evil = rewritten(pack, lambda members: members.update({name: b"x"}))
    assert name.replace("\\", "\\\\") in refused(evil, tmp_path / "b" / "c")


def test_links_and_compressed_members_are_refused(pack: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(pack, "a") as archive:
        link = zipfile.ZipInfo("inputs/link.txt")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    assert "inputs/link.txt is in the file or its description only" in refused(pack, tmp_path / "b")
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        data = b"0" * 10**6
        sha = hashlib.sha256(data).hexdigest()
        archive.writestr("config.yaml", data)
        entity = {"@id": "config.yaml", "@type": "File", "contentSize": "1000000", "sha256": sha}
        archive.writestr(METADATA, json.dumps({"@graph": [entity]}))
    assert "compressed or a link" in refused(bomb, tmp_path / "b")


def test_a_pack_larger_than_the_disk_is_refused(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(place_module.shutil, "disk_usage", lambda _: usage._replace(free=100))
    assert "100 free" in refused(pack, tmp_path / "b")


def test_a_flipped_bit_in_a_pack_is_named(pack: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(pack) as archive:
        entry = archive.getinfo(f"store/{PROBES}")
    flip(pack, entry.header_offset + 30 + len(entry.filename) + 60)
    assert f"store/{PROBES}" in refused(pack, tmp_path / "b")


def test_a_cut_off_pack_is_named(pack: Path, tmp_path: Path) -> None:
    pack.write_bytes(pack.read_bytes()[:-100])
    assert "cut off" in refused(pack, tmp_path / "b")


def test_a_shard_of_another_model_in_a_pack_is_refused_before_anything_is_placed(
    pack: Path, tmp_path: Path
) -> None:
    def move(members: dict[str, bytes]) -> None:
        for name in list(members):
            if "/activations/" in name:
                members[name.replace(key_of(SPEC), "0" * 16)] = members.pop(name)

    line = refused(rewritten(pack, move), tmp_path / "b")
    assert "made for another model" in line and f"store/m/activations/d/{'0' * 16}" in line


def test_data_that_differs_from_the_pack_s_is_kept(pack: Path, tmp_path: Path) -> None:
    mine = tmp_path / "b/data/needles é.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("[1]")
    with pytest.raises(UserError, match="needles é.json: differs"):
        place(pack, tmp_path / "b/store", tmp_path / "b")
    assert mine.read_text() == "[1]"
    assert not (tmp_path / "b/store" / SHARD).exists()


def test_data_outside_the_project_cannot_be_packed() -> None:
    for path in ("/home/me/needles.json", "../needles.json"):
        with pytest.raises(UserError, match="outside the project"):
            input_members([path])


def test_a_packed_config_names_none_of_its_owner_s_folders() -> None:
    config = {"store": "/home/me", "shared_stores": ["/team"], "activations": {}, "seed": 42}
    assert shared_config(config) == "store: results/store\nseed: 42\n"


# Archives


class Handler(SimpleHTTPRequestHandler):
    """Files of a folder; cut.bin stops in its middle the first time, and goes on by Range."""

    requests: list[str]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.requests.append(f"{self.path} {self.headers.get('Range')}")
        if "cut" not in self.path and "norange" not in self.path:
            super().do_GET()
            return
        data = Path(self.translate_path(self.path)).read_bytes()
        start = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-")
        start = 0 if "norange" in self.path else int(start)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        first = len(self.requests) == 1
        self.wfile.write(data[start : start + len(data) // 3] if first else data[start:])
        self.close_connection = True


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    folder = tmp_path / "served"
    folder.mkdir()
    handler = type("ThisHandler", (Handler,), {"requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder, handler.requests
    server.shutdown()
    server.server_close()
    thread.join()


DATA = np.random.default_rng(0).bytes(3 * 10**6)
EXPECTED: dict[str, Any] = {"size": len(DATA), "sha256": hashlib.sha256(DATA).hexdigest()}


@pytest.mark.parametrize(
    ("name", "second"), [("cut.bin", "/cut.bin bytes=1000000-"), ("norange.bin", None)]
)
def test_an_interrupted_download_goes_on_or_starts_again(
    served: tuple[str, Path, list[str]], tmp_path: Path, name: str, second: str | None
) -> None:
    url, folder, requests = served
    (folder / name).write_bytes(DATA)
    target = tmp_path / "store/x.bin"
    with pytest.raises(UserError, match=rf"{name}: stopped after 1000000 of 3000000 bytes"):
        download(f"{url}/{name}", target, **EXPECTED)
    assert not target.exists()
    download(f"{url}/{name}", target, **EXPECTED)
    assert target.read_bytes() == DATA
    assert [path.name for path in target.parent.iterdir()] == ["x.bin"]
    assert second is None or requests[1] == second


def test_what_has_another_checksum_or_is_too_long_is_never_placed(
    served: tuple[str, Path, list[str]], tmp_path: Path
) -> None:
    url, folder, _ = served
    (folder / "x.bin").write_bytes(DATA)
    target = tmp_path / "store/x.bin"
    with pytest.raises(UserError, match=r"its SHA-256 is .* the archive's table says 0000"):
        download(f"{url}/x.bin", target, size=len(DATA), sha256="0" * 64)
    assert list(target.parent.iterdir()) == []
    with pytest.raises(UserError, match="more than 1000 bytes came"):
        download(f"{url}/x.bin", target, size=1000, sha256="0" * 64)
    assert not target.exists()


def test_an_address_that_is_not_there_is_one_line(
    served: tuple[str, Path, list[str]], tmp_path: Path
) -> None:
    for url in (f"{served[0]}/none.bin", "http://127.0.0.1:9/none.bin"):
        with pytest.raises(UserError, match=rf"{url}: stopped after 0 of 5 bytes \(.+\)"):
            download(url, tmp_path / "x.bin", size=5, sha256="0" * 64)


def test_a_table_of_a_store_lists_every_shard_with_its_manifest(store: Path) -> None:
    rows = archive_rows(store, "https://example.org/a/{path}")
    assert [row["path"] for row in rows] == [str(manifest_of(SHARD)), SHARD]
    assert rows[1]["url"] == f"https://example.org/a/{SHARD}"
    assert rows[1]["sha256"] == file_sha256(store / SHARD)
    flat = archive_rows(store, "https://example.org/{name}?download=1")[1]["url"]
    assert flat == f"https://example.org/{SHARD.replace('/', '--')}?download=1"
    flip(store / SHARD, 100)
    with pytest.raises(UserError, match="SHA-256"):
        archive_rows(store, "https://example.org/{path}")


def test_a_table_comes_back_as_it_was_written(store: Path, tmp_path: Path) -> None:
    rows = archive_rows(store, "https://example.org/{path}")
    (tmp_path / "t.tsv").write_text(format_archive(rows))
    assert read_archive(tmp_path / "t.tsv") == {row["path"]: row for row in rows}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("p\t5\tabc\thttps://h/p", "line 2: sha256"),
        (f"p\tmany\t{'0' * 64}\thttps://h/p", "line 2: bytes"),
        (f"p\t5\t{'0' * 64}\tfile:///etc/passwd", "line 2: url"),
        ("p\t5", "line 2: not 4 fields"),
    ],
)
def test_a_bad_table_is_named_by_its_line(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "t.tsv").write_text("\t".join(COLUMNS) + f"\n{line}\n")
    with pytest.raises(UserError, match=words):
        read_archive(tmp_path / "t.tsv")


def test_a_table_with_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("url\tsha256\n")
    with pytest.raises(UserError, match="expected path, bytes, sha256, url"):
        read_archive(tmp_path / "t.tsv")
