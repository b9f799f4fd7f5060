"""Activation shards: one Zarr v3 group in one ZIP file, with a JSON manifest beside it.

A shard holds some probes of a dataset. With L layers and H heads, its arrays are

===================  ========  ====================  =========================================
name                 dtype     shape                 what
===================  ========  ====================  =========================================
alpha, phi_{dir}     float32   (L, H, cell)          dense rows end to end, no padding
row_probe            int32     (row,)                dense row -> index into `probes`
row_step             int32     (row,)                generated step t
row_token            int32     (row,)                y_t
row_logprob          float32   (row,)                log probability of y_t
row_offset           int64     (row,)                first cell; cell i of a row is position i
row_length           int32     (row,)                N_t, key positions up to the query
row_u_norm           float32   (row,)                ||raw u||
step_*               as row_*  (step,)               each generated step, last prompt tokens
step_index           int32     (step,)               t, or -7..0 for the prompt rows
step_is_answer       bool      (step,)               whether it is one of the dense rows
region_length        int32     (step, region)        positions of each region within N_t
alpha_by_region      float32   (step, L, H, region)  sums of alpha, ordered as `REGIONS`
phi_{dir}_by_region  float32   (step, L, H, region)  of phi; NaN where no token follows
argmax               int32     (step, L, H)          position of the largest alpha
top10_in_needle      int32     (step, L, H)          of the ten largest, those in the needle
topn_needle_alpha    float32   (step, L, H)          alpha of the top n in the needle
peak_phi_{dir}       float32   (step, L, H)          phi at the needle's largest alpha; NaN as above
===================  ========  ====================  =========================================

The attributes hold no time and no path, so the same input gives the same bytes; what may vary (wall
time, device, library versions) stands in the manifest.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import numpy as np
import zarr
from numcodecs import BitRound
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, BytesCodec
from zarr.errors import GroupNotFoundError
from zarr.storage import LocalStore, ZipStore

from workflow_scripts.common.artifacts import atomic_path, library_versions, rename_if_free
from workflow_scripts.common.digests import canonical_json, file_sha256
from workflow_scripts.common.errors import UserError

KIND = "activations"
REGIONS = ("needle", "haystack", "question", "bos", "template", "generated")
"""What a key position belongs to; "haystack" leaves the needle out. Together they are all keys."""

ROW_BITS = 13
"""Precision of a dense cell: no cell is off by more than 2**-14 of the largest of its row and head."""

KEEP_BITS = 2
"""Mantissa bits that every dense cell keeps, however small: none loses its sign or its magnitude."""

CHUNK_CELLS = 1 << 19
"""Cells of the largest chunk: 2 MiB, beside which the overhead of a chunk is small."""

LEVEL = 7
"""Of Blosc: from here on it finds what the rows of one probe share (docs/speed.md)."""

_SUFFIX = ".zarr.zip"
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
_STEP_DIMENSIONS = ("step", "layer", "head", "region")
_UNREADABLE = (
    zipfile.BadZipFile,
    OSError,
    EOFError,
    KeyError,
    ValueError,
    RuntimeError,
)

Array = NDArray[Any]


@dataclass
class Shard:
    """An open shard; close it, or use it in a `with` statement.

    Attributes
    ----------
    path
        The file.
    attributes
        The group's attributes.
    probes
        One dict a probe; `row_probe` and `step_probe` index this list.
    n_layers, n_heads, n_kv_heads
        Shape of the model. Query head h reads KV head h // (n_heads / n_kv_heads).
    """

    path: Path
    attributes: dict[str, Any]
    _group: zarr.Group
    _store: ZipStore

    def __post_init__(self) -> None:
        self.probes: list[dict[str, Any]] = self.attributes["probes"]
        self.n_layers: int = self.attributes["n_layers"]
        self.n_heads: int = self.attributes["n_heads"]
        self.n_kv_heads: int = self.attributes["n_kv_heads"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    def __contains__(self, name: str) -> bool:
        return name in self._group

    def names(self) -> list[str]:
        """Return the names of the arrays, sorted."""
        return sorted(self._group.array_keys())

    def directions(self) -> list[str]:
        """Return the directions that were captured, sorted."""
        return [
            n.removeprefix("phi_") for n in self.names() if is_dense(n) and n.startswith("phi_")
        ]

    def read(self, name: str, layer: int | None = None) -> Array:
        """Read an array, or one layer of a dense plane; chunks are fetched and decoded in parallel.

        Parameters
        ----------
        name
            An array of the module's table.
        layer
            Read this layer only, shape (head, cell).

        Raises
        ------
        UserError
            If the shard has no such array, or if the file's bytes are damaged.
        """
        if name not in self:
            raise UserError(
                f"{self.path}: holds no array '{name}'; it has {', '.join(self.names())}"
            )
        try:
            array: Any = self._group[name]
            return np.asarray(array[...] if layer is None else array[layer])
        except _UNREADABLE as error:
            raise _unreadable(self.path, error) from None


def is_dense(name: str) -> bool:
    """Return whether an array of this name is a dense plane, (layer, head, cell)."""
    return name == "alpha" or (name.startswith("phi_") and not name.endswith("_by_region"))


def manifest_of(path: str | Path) -> Path:
    """Return where the manifest of a shard stands: `3.json` beside `3.zarr.zip`."""
    return Path(path).with_name(shard_name(path) + ".json")


def shard_name(path: str | Path) -> str:
    """Return the name of a shard, such as "000-of-002"."""
    return Path(path).name.removesuffix(_SUFFIX)


def waiting_path(path: str | Path) -> Path:
    """Return where a finished shard of an unfinished job waits for its place, its manifest beside it."""
    path = Path(path)
    return path.with_name(f".tmp-waiting-{path.name}")


def is_waiting(path: str | Path, spec: Any) -> bool:
    """Return whether a sound shard of this spec waits for its place; another one is removed."""
    waiting = waiting_path(path)
    try:
        open_shard(waiting, spec=spec, verify=True).close()
    except UserError:
        _remove(waiting)
        return False
    return True


def place_shard(path: str | Path) -> None:
    """Move a shard that waits and its manifest to their place, unless another run was first."""
    path, waiting = Path(path), waiting_path(path)
    # Another run may be placing the same one at this very moment.
    with suppress(FileExistsError, FileNotFoundError):
        rename_if_free(manifest_of(waiting), manifest_of(path))
        waiting.replace(path)
    if path.exists():
        _remove(waiting)


def _remove(path: Path) -> None:
    """Remove a shard and its manifest, as far as they are there."""
    path.unlink(missing_ok=True)
    manifest_of(path).unlink(missing_ok=True)


def write_shard(
    path: str | Path,
    manifest_path: str | Path,
    arrays: Mapping[str, Array],
    attributes: Mapping[str, Any],
    spec: Any,
    *,
    device: str = "cpu",
    wall_seconds: float = 0.0,
    keep_bits: int = KEEP_BITS,
) -> None:
    """Write a shard with its manifest, each whole or not at all, unless another run was first.

    Parameters
    ----------
    path
        The shard, `{number}.zarr.zip`.
    manifest_path
        Its manifest. Of several runs that fill one store, the first to put its manifest there puts its
        shard there too; the others leave both as they are. So a manifest never describes another
        run's shard, whose bytes can differ by the device.
    arrays
        Arrays of the module's table. The dense planes are rounded (`round_rows`); all others are exact.
    attributes
        JSON values: `probes` (each with its `status`), `n_layers`, `n_heads`, `n_kv_heads`.
    spec
        What determined the shard; checked again by `open_shard`.
    device, wall_seconds
        Recorded in the manifest only.
    keep_bits
        Least mantissa bits of a dense cell, 1 to 23; 23 writes the planes exactly.
    """
    target, manifest = Path(path), Path(manifest_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Through JSON and back: zarr writes keys in the order in which they come.
    stamped = json.loads(canonical_json({**attributes, "kind": KIND, "spec": spec}))
    with TemporaryDirectory(dir=target.parent, prefix=f".tmp-{target.name}-") as folder:
        group = zarr.create_group(LocalStore(folder), attributes=stamped, zarr_format=3)
        for name, values in arrays.items():
            array = _create_array(group, name, np.asarray(values))
            if is_dense(name):
                # A chunk's layers at a time, so that rounding needs little memory.
                step = array.chunks[0]
                for start in range(0, len(values), step):
                    planes = np.asarray(values[start : start + step], np.float32)
                    array[start : start + step] = round_rows(
                        planes, arrays["row_offset"], keep_bits
                    )
            else:
                array[...] = values
        with suppress(FileExistsError), atomic_path(target) as packed:
            _pack(Path(folder), packed)
            record = {
                "spec": spec,
                "sha256": file_sha256(packed),
                "bytes": packed.stat().st_size,
                "versions": library_versions(),
                "device": device,
                "wall_seconds": round(wall_seconds, 3),
                "counts": dict(Counter(probe["status"] for probe in attributes["probes"])),
                "n_probes": len(attributes["probes"]),
            }
            with atomic_path(manifest, exclusive=True) as temporary:
                temporary.write_text(canonical_json(record) + "\n", encoding="utf-8")


def open_shard(path: str | Path, *, spec: Any = None, verify: bool = False) -> Shard:
    """Open a shard for reading after checking that it is the one expected.

    Parameters
    ----------
    path
        The shard.
    spec
        The spec it must have been made for; None accepts any.
    verify
        Also compare the file's SHA-256 with the manifest's (reads the whole file once more).

    Raises
    ------
    UserError
        If the file is missing, cut off, no shard, made for something else, or not the one that its
        manifest describes.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if verify:
        _verify_digest(path)
    store = ZipStore(path, mode="r")
    try:
        group = zarr.open_group(store, mode="r", zarr_format=3)
        attributes = dict(group.attrs)
    except (*_UNREADABLE, GroupNotFoundError) as error:
        _close_quietly(store)
        raise _unreadable(path, error) from None
    try:
        _check_attributes(path, attributes, spec)
    except UserError:
        store.close()
        raise
    return Shard(path, attributes, group, store)


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read the manifest of a shard; `path` is the manifest.

    Raises
    ------
    UserError
        If it is missing or not a manifest.
    """
    try:
        manifest = json.loads(Path(path).read_text(encoding="utf-8"))
        manifest["sha256"], manifest["counts"]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the shard beside it was not finished") from None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path}: not a shard's manifest ({error}); delete it and run again"
        ) from None
    return manifest  # type: ignore[no-any-return]


def _verify_digest(path: Path) -> None:
    manifest = manifest_of(path)
    expected, found = read_manifest(manifest)["sha256"], file_sha256(path)
    if found != expected:
        raise UserError(
            f"{path}: its SHA-256 is {found}, {manifest.name} says {expected}; the file is damaged "
            "or was replaced: copy it again, or delete both and run again"
        )


def _check_attributes(path: Path, attributes: dict[str, Any], spec: Any) -> None:
    if attributes.get("kind") != KIND:
        raise UserError(f"{path}: holds {attributes.get('kind')}, expected {KIND}")
    found = canonical_json(attributes.get("spec"))
    if spec is not None and found != canonical_json(spec):
        raise UserError(
            f"{path}: made for {found}, expected {canonical_json(spec)}; delete it and run again"
        )


def round_rows(planes: Array, offsets: Array, keep_bits: int = KEEP_BITS) -> Array:
    """Round cells to what matters beside the largest of their row and head.

    A sum over positions is then as good as with `ROW_BITS` mantissa bits in every cell, but the many
    small cells, which weigh nothing in it, take fewer.

    Parameters
    ----------
    planes
        float32, shape (layer, head, cell).
    offsets
        First cell of each row, ascending from 0.
    keep_bits
        Least mantissa bits of a cell.
    """
    if planes.shape[-1] == 0:
        return planes
    _, exponent = np.frexp(np.maximum.reduceat(np.abs(planes), offsets, axis=-1))
    # Powers of two: dividing by them and multiplying again is exact.
    unit = np.ldexp(np.float32(1), np.maximum(exponent - 1 - ROW_BITS, -100))
    unit = np.repeat(unit, np.diff(np.append(offsets, planes.shape[-1])), axis=-1)
    small = BitRound(keepbits=keep_bits).encode(np.ascontiguousarray(planes)).view(np.float32)
    rounded: Array = np.where(
        np.abs(planes) >= unit * np.float32(1 << keep_bits), np.rint(planes / unit) * unit, small
    )
    return rounded


def _create_array(group: zarr.Group, name: str, values: Array) -> Any:
    if is_dense(name):
        layers, heads, cells = (max(1, n) for n in values.shape)
        chunks: tuple[int, ...] = (
            min(layers, max(1, CHUNK_CELLS // (heads * cells))),
            min(heads, max(1, CHUNK_CELLS // cells)),
            min(cells, CHUNK_CELLS),
        )
        names: tuple[str, ...] = ("layer", "head", "cell")
    else:
        row = max(1, int(np.prod(values.shape[1:])))
        chunks = (
            max(1, min(len(values), CHUNK_CELLS // row)),
            *(max(1, n) for n in values.shape[1:]),
        )
        names = _dimension_names(name, values.ndim)
    return group.create_array(
        name,
        shape=values.shape,
        dtype=np.float32 if is_dense(name) else values.dtype,
        chunks=chunks,
        serializer=BytesCodec(),
        compressors=[BloscCodec(cname="zstd", clevel=LEVEL, shuffle="shuffle")],
        dimension_names=names,
    )


def _dimension_names(name: str, n_dimensions: int) -> tuple[str, ...]:
    if name.startswith("row_"):
        return ("row",)
    return ("step", "region") if name == "region_length" else _STEP_DIMENSIONS[:n_dimensions]


def _pack(folder: Path, target: Path) -> None:
    """Pack a folder's files: sorted, not deflated (the chunks are compressed), without dates."""
    files = {f.relative_to(folder).as_posix(): f for f in folder.rglob("*") if f.is_file()}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
            entry.create_system = 3  # Unix, whatever system packs it
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, files[name].read_bytes())


def _unreadable(path: Path, error: BaseException) -> UserError:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return UserError(
        f"{path}: not a readable shard ({reason}); it is cut off, damaged or something else: "
        "delete it and run again"
    )


def _close_quietly(store: ZipStore) -> None:
    """Close a store whose file may never have been opened."""
    if store._is_open and hasattr(store, "_zf"):
        store.close()
