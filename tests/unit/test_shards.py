"""The shard container: what comes back, the same bytes, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import ZipStore

from workflow_scripts.common import artifacts, shards
from workflow_scripts.common.digests import file_sha256
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.shards import manifest_of, open_shard, read_manifest, write_shard

pytestmark = pytest.mark.filterwarnings("error")

SPEC = {"model": "tiny", "version": 1}
ATTRIBUTES = {
    "probes": [{"status": "passed"}, {"status": "wrong"}, {"status": "passed"}],
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
}


def arrays(cells: int = 50) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "alpha": random.random((2, 4, cells), dtype=np.float32) ** 8,
        "phi_raw": random.standard_normal((2, 4, cells)).astype(np.float32),
        "alpha_by_region": random.random((5, 2, 4, 6), dtype=np.float32),
        "argmax": random.integers(0, 9, (5, 2, 4), dtype=np.int32),
        "region_length": random.integers(0, 9, (5, 6), dtype=np.int32),
        "row_offset": np.arange(3, dtype=np.int64),
        "step_is_answer": np.array([True, False, True, True, False]),
    }


def write(path: Path, values: dict[str, Any] | None = None, **options: Any) -> Path:
    write_shard(path, manifest_of(path), values or arrays(), ATTRIBUTES, SPEC, **options)
    return path


@pytest.fixture
def shard_path(tmp_path: Path) -> Path:
    return write(tmp_path / "store" / "0.zarr.zip")


def test_arrays_that_are_no_planes_come_back_exactly(shard_path: Path) -> None:
    written = arrays()
    with open_shard(shard_path, spec=SPEC, verify=True) as shard:
        assert shard.names() == sorted(written)
        assert shard.directions() == ["raw"]
        assert (shard.n_layers, shard.n_heads, shard.n_kv_heads) == (2, 4, 2)
        assert shard.probes == ATTRIBUTES["probes"]
        for name in set(written) - {"alpha", "phi_raw"}:
            read = shard.read(name)
            assert read.dtype == written[name].dtype
            np.testing.assert_array_equal(read, written[name])


def test_a_cell_is_rounded_by_the_largest_of_its_row_and_head(tmp_path: Path) -> None:
    rows = [slice(0, 1), slice(1, 2), slice(2, 50)]  # as `row_offset` says
    for name in ("alpha", "phi_raw"):
        exact = arrays()[name].astype(np.float64)
        exact[..., 40:] *= 1e-6  # cells that weigh nothing
        path = tmp_path / name / "0.zarr.zip"
        with open_shard(write(path, arrays() | {name: exact})) as shard:
            read = shard.read(name).astype(np.float64)
        exact = exact.astype(np.float32).astype(np.float64)
        for row in rows:
            largest = np.abs(exact[..., row]).max(-1, keepdims=True)
            error = np.abs(read - exact)[..., row]
            assert (error <= 2.0**-14 * largest).all()
            assert (error <= 2.0**-3 * np.abs(exact[..., row])).all()
        assert (np.sign(read) == np.sign(exact)).all()
        kept = read[..., 40:].astype(np.float32).view(np.uint32) & np.uint32((1 << 21) - 1)
        assert not kept.any()


def test_a_row_of_zeros_comes_back(tmp_path: Path) -> None:
    zeros = np.zeros((2, 4, 50), np.float32)
    with open_shard(write(tmp_path / "0.zarr.zip", arrays() | {"alpha": zeros})) as shard:
        np.testing.assert_array_equal(shard.read("alpha"), zeros)


def test_one_layer_equals_that_layer_of_the_plane(shard_path: Path) -> None:
    with open_shard(shard_path) as shard:
        np.testing.assert_array_equal(shard.read("alpha", 1), shard.read("alpha")[1])


def test_a_plane_longer_than_a_chunk_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHUNK_CELLS", 16)
    path = write(tmp_path / "0.zarr.zip", keep_bits=23)
    with zipfile.ZipFile(path) as archive:
        assert "alpha/c/1/3/3" in archive.namelist()
    with open_shard(path) as shard:
        np.testing.assert_array_equal(shard.read("alpha"), arrays()["alpha"])
        np.testing.assert_array_equal(shard.read("argmax"), arrays()["argmax"])


def test_a_shard_without_dense_rows_comes_back_empty(tmp_path: Path) -> None:
    with open_shard(write(tmp_path / "0.zarr.zip", arrays(cells=0))) as shard:
        assert shard.read("alpha").shape == (2, 4, 0)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "0.zarr.zip", wall_seconds=1)
    second = write(tmp_path / "b" / "1.zarr.zip", dict(reversed(arrays().items())), wall_seconds=2)
    os.utime(first, (0, 0))
    assert first.read_bytes() == second.read_bytes()


def test_the_zip_is_plain_zarr_v3_with_sorted_undated_stored_entries(shard_path: Path) -> None:
    with zipfile.ZipFile(shard_path) as archive:
        entries = archive.infolist()
    names = [entry.filename for entry in entries]
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}
    assert {entry.compress_type for entry in entries} == {zipfile.ZIP_STORED}
    store = ZipStore(shard_path, mode="r")
    group: Any = zarr.open_group(store, mode="r")
    assert group.metadata.zarr_format == 3
    assert [codec["name"] for codec in group["alpha"].metadata.to_dict()["codecs"]] == [
        "bytes",
        "blosc",
    ]
    assert group["alpha"].chunks == (2, 4, 50)
    store.close()


def test_the_manifest_describes_the_file(shard_path: Path) -> None:
    manifest = read_manifest(manifest_of(shard_path))
    assert manifest["sha256"] == file_sha256(shard_path)
    assert manifest["bytes"] == shard_path.stat().st_size
    assert manifest["spec"] == SPEC
    assert manifest["counts"] == {"passed": 2, "wrong": 1}
    assert manifest["n_probes"] == 3
    assert set(manifest) >= {"versions", "device", "wall_seconds"}


def test_nothing_else_is_left_beside_the_shard(shard_path: Path) -> None:
    assert sorted(p.name for p in shard_path.parent.iterdir()) == ["0.json", "0.zarr.zip"]


def test_a_failed_write_leaves_neither_shard_nor_manifest(tmp_path: Path) -> None:
    path = tmp_path / "0.zarr.zip"
    with pytest.raises(ValueError):
        write(path, arrays() | {"alpha": np.zeros((2, 4, 5), "U3")})
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_runs_keeps_its_shard_and_its_manifest(shard_path: Path) -> None:
    first = shard_path.read_bytes(), manifest_of(shard_path).read_bytes()
    write(shard_path, arrays(cells=20), wall_seconds=7)
    assert (shard_path.read_bytes(), manifest_of(shard_path).read_bytes()) == first
    assert sorted(p.name for p in shard_path.parent.iterdir()) == ["0.json", "0.zarr.zip"]


def test_a_run_killed_before_it_names_its_shard_leaves_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "0.zarr.zip"
    rename = os.replace

    def killed(temporary: Path, target: Path) -> None:
        if target == path:  # zarr renames the files of its group too, in a thread of its own
            raise KeyboardInterrupt
        rename(temporary, target)

    monkeypatch.setattr(artifacts.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write(path)
    assert not path.exists()


def test_where_files_cannot_be_linked_the_manifest_still_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "0.zarr.zip"
    link = os.link

    def no_links(temporary: Path, target: Path) -> None:
        if Path(target).parent == tmp_path:  # zarr links the files of its group too
            raise PermissionError(errno.EPERM, "Operation not permitted")
        link(temporary, target)

    monkeypatch.setattr(artifacts.os, "link", no_links)
    write(path)
    first = path.read_bytes()
    write(path, arrays(cells=20))
    assert path.read_bytes() == first
    open_shard(path, verify=True).close()


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as error, open_shard(path, **options) as shard:
        for name in shard.names():
            shard.read(name)
    message = str(error.value)
    assert "\n" not in message
    assert str(path) in message or str(manifest_of(path)) in message
    return message


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_cut_off_file_is_refused(shard_path: Path, share: float) -> None:
    whole = shard_path.read_bytes()
    shard_path.write_bytes(whole[: int(share * len(whole))])
    assert "not a readable shard" in refused(shard_path)


def test_a_flipped_bit_in_a_chunk_is_refused(shard_path: Path) -> None:
    with zipfile.ZipFile(shard_path) as archive:
        entry = archive.getinfo("phi_raw/c/0/0/0")
    damaged = bytearray(shard_path.read_bytes())
    damaged[entry.header_offset + 30 + len(entry.filename) + 40] ^= 1
    shard_path.write_bytes(damaged)
    assert "not a readable shard" in refused(shard_path)
    assert "SHA-256" in refused(shard_path, verify=True)


def test_another_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "0.zarr.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "not a readable shard" in refused(path)


def test_a_zarr_group_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "0.zarr.zip"
    store = ZipStore(path, mode="w")
    zarr.create_group(store, attributes={"kind": "other"})
    store.close()
    assert "holds other, expected activations" in refused(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "0.zarr.zip")


def test_another_spec_is_refused_and_both_are_named(shard_path: Path) -> None:
    message = refused(shard_path, spec={"model": "other"})
    assert '{"model":"tiny","version":1}' in message
    assert '{"model":"other"}' in message


def test_an_array_that_was_not_captured_is_named(shard_path: Path) -> None:
    with open_shard(shard_path) as shard, pytest.raises(UserError, match="phi_tuned_lens"):
        shard.read("phi_tuned_lens")


def test_a_manifest_that_is_missing_or_foreign_is_refused(shard_path: Path) -> None:
    manifest = manifest_of(shard_path)
    manifest.write_text(json.dumps([1]))
    assert "not a shard's manifest" in refused(shard_path, verify=True)
    manifest.unlink()
    assert "not finished" in refused(shard_path, verify=True)


def test_writing_and_reading_warn_of_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with open_shard(write(tmp_path / "0.zarr.zip")) as shard:
            for name in shard.names():
                shard.read(name)
    assert [str(w.message) for w in caught] == []
