"""Parquet artifacts: written whole or not at all, with their provenance inside.

The provenance holds no time and no path, so the same input gives the same bytes; wall times stand in
the shard manifests and in the rules' benchmark files.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import polars as pl
import pyarrow.parquet as pq

from workflow_scripts.common.digests import canonical_json, key_of
from workflow_scripts.common.errors import UserError

METADATA_KEY = b"locos"
_LIBRARIES = ("torch", "transformers", "zarr", "numcodecs", "pyarrow", "polars")


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that can change a number."""
    return {"python": platform.python_version()} | {name: version(name) for name in _LIBRARIES}


@contextmanager
def atomic_path(path: str | Path, *, exclusive: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path` that is renamed to it if the block succeeds.

    A reader never sees a half-written file: a killed writer leaves only a `.tmp-` file behind.

    Raises
    ------
    FileExistsError
        If `exclusive` and the path is there by then.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".tmp-{target.name}-")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files private; collaborators read artifacts under the usual umask.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        if exclusive:
            rename_if_free(temporary, target)
        else:
            os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def rename_if_free(temporary: Path, target: Path) -> None:
    """Give a file a second name, its only one where the file system knows no links.

    Raises
    ------
    FileExistsError
        If the name is taken.
    """
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except (
        OSError
    ):  # a file system without links: two writers at the very same moment can both pass
        if target.exists():
            raise FileExistsError(target) from None
        os.replace(temporary, target)


def write_table(
    table: pl.DataFrame, path: str | Path, *, kind: str, spec: Any, **extra: Any
) -> None:
    """Write a table as Parquet with its provenance in the file's key-value metadata.

    Parameters
    ----------
    table
        The rows, in the order in which they shall stand in the file.
    path
        The artifact; replaced atomically.
    kind
        What the table is, such as "probes" or "scores".
    spec
        The canonical description of what determined it; checked again by `read_table`.
    extra
        Further JSON values worth recording, such as the device or counts by status.
    """
    provenance = {"kind": kind, "spec": spec, "versions": library_versions(), **extra}
    arrow = table.to_arrow(compat_level=pl.CompatLevel.oldest())
    arrow = arrow.replace_schema_metadata({METADATA_KEY: canonical_json(provenance).encode()})
    with atomic_path(path) as temporary:
        pq.write_table(arrow, temporary, compression="zstd", write_page_checksum=True)


def read_provenance(path: str | Path) -> dict[str, Any]:
    """Return the provenance that `write_table` put into a Parquet file.

    Raises
    ------
    UserError
        If the file is missing, is not Parquet, or carries no provenance.
    """
    try:
        metadata = pq.read_schema(path).metadata or {}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if METADATA_KEY not in metadata:
        raise UserError(f"{path}: carries no provenance; it was not written by this workflow")
    provenance: dict[str, Any] = json.loads(metadata[METADATA_KEY])
    return provenance


def _unreadable(path: str | Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(f"{path}: not a readable Parquet file ({reason}); delete it and run again")


def is_made_for(path: str | Path, spec: Any) -> bool:
    """Return whether a file is a table that was made for a spec; False if it is unreadable."""
    try:
        return key_of(read_provenance(path)["spec"]) == key_of(spec)
    except UserError:
        return False


def read_table(
    path: str | Path, *, kind: str, spec: Any = None, key: str | None = None
) -> pl.DataFrame:
    """Read a Parquet artifact after checking that it is the one expected.

    Parameters
    ----------
    path
        The artifact.
    kind
        The kind it must have.
    spec
        The spec it must have been made for; None accepts any.
    key
        The same, where only the key of the spec is known.

    Raises
    ------
    UserError
        If the file cannot be read, its bytes differ from their checksums, or it was made for
        something else; both specs are named.
    """
    provenance = read_provenance(path)
    if provenance["kind"] != kind:
        raise UserError(f"{path}: holds {provenance['kind']}, expected {kind}")
    if spec is not None and canonical_json(provenance["spec"]) != canonical_json(spec):
        raise UserError(
            f"{path}: made for {canonical_json(provenance['spec'])}, expected "
            f"{canonical_json(spec)}; delete it and run again"
        )
    if key is not None and key_of(provenance["spec"]) != key:
        raise UserError(f"{path}: made for another config; delete it and run again")
    try:
        # Polars' own reader does not look at the checksums.
        return cast(
            pl.DataFrame, pl.from_arrow(pq.read_table(path, page_checksum_verification=True))
        )
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
