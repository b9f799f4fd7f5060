"""Check a pack and put what is in it into a store and a project, so that nothing is computed again.

python -m workflow_scripts.sharing.place PACK STORE
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from workflow_scripts.common.artifacts import atomic_path
from workflow_scripts.common.digests import file_sha256
from workflow_scripts.common.errors import UserError
from workflow_scripts.sharing.artifacts import check_artifact
from workflow_scripts.sharing.crate import METADATA, PackedFile, read_crate
from workflow_scripts.sharing.pack import CHUNK, CONFIG, INPUTS, STORE

LARGEST_METADATA = 1 << 26
"""Bytes that are read before anything is known of a pack."""

_DATA = (".txt", ".json", ".jsonl", ".pt", ".safetensors")


def place(pack: Path, store: Path, project: Path) -> tuple[int, Path]:
    """Put the artifacts of a pack into a store, and its data files into a project.

    Everything is checked before the first file is placed. What is there already stays: an artifact as
    it is, a data file only if it is the same.

    Returns
    -------
    int
        How many files were placed.
    Path
        The pack's config, written beside the pack.

    Raises
    ------
    UserError
        If the pack is cut off or damaged, a file of it has another checksum or size, is not what its
        path says or would land elsewhere, or a data file would replace another.
    """
    store.mkdir(parents=True, exist_ok=True)
    with (
        _open(pack) as archive,
        tempfile.TemporaryDirectory(dir=store, prefix=".tmp-place-") as name,
    ):
        stage = Path(name)
        files = _described(pack, archive)
        needed = sum(file.size for file in files)
        if needed > (free := shutil.disk_usage(store).free):
            raise UserError(
                f"{pack}: needs {needed} bytes, {store} has {free} free; free some space"
            )
        for file in files:
            _extract(pack, archive, file, stage)
        artifacts = [n.removeprefix(f"{STORE}/") for n in _under(files, STORE)]
        data = [n.removeprefix(f"{INPUTS}/") for n in _under(files, INPUTS)]
        for artifact in artifacts:
            try:
                check_artifact(stage / STORE, artifact)
            except UserError as error:
                raise UserError(f"{pack}: {str(error).replace(f'{stage}/', '')}") from None
        for path in data:
            there = project / path
            if there.exists() and file_sha256(there) != file_sha256(stage / INPUTS / path):
                raise UserError(
                    f"{there}: differs from the one in {pack}; keep it under another name, or put the "
                    "pack into a fresh copy of the project"
                )
        pairs = [(stage / INPUTS / path, project / path) for path in data]
        pairs += [(stage / STORE / artifact, store / artifact) for artifact in artifacts]
        placed = sum(_put(source, target) for source, target in pairs)
        config = pack.with_name(f"{pack.name.removesuffix('.zip')}.config.yaml")
        with atomic_path(config) as temporary:
            shutil.copyfile(stage / CONFIG, temporary)
    return placed, config


def _open(pack: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(pack)
    except FileNotFoundError:
        raise UserError(f"{pack}: no such file") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{pack}: cut off or not a pack ({error}); copy it again") from None


def _described(pack: Path, archive: zipfile.ZipFile) -> list[PackedFile]:
    """Return the files of a pack after comparing the ZIP's list with the description's."""
    members = {entry.filename: entry for entry in archive.infolist()}
    if len(members) != len(archive.infolist()):
        raise UserError(f"{pack}: holds two files of one name; ask for another")
    if METADATA not in members or members[METADATA].file_size > LARGEST_METADATA:
        raise UserError(f"{pack}: cut off or not a pack: it has no {METADATA}")
    files = read_crate(_read(pack, archive, METADATA))
    different = files.keys() ^ (members.keys() - {METADATA})
    if different:
        raise UserError(f"{pack}: {min(different)} is in the file or its description only")
    if CONFIG not in files:
        raise UserError(f"{pack}: cut off or not a pack: it has no {CONFIG}")
    for name, file in files.items():
        _check_name(pack, name)
        entry = members[name]
        if entry.compress_type != zipfile.ZIP_STORED or stat.S_ISLNK(entry.external_attr >> 16):
            raise UserError(f"{pack}: {name} is compressed or a link; packs hold plain files only")
        if entry.file_size != file.size:
            raise UserError(f"{pack}: {name} has {entry.file_size} bytes, expected {file.size}")
    return list(files.values())


def _check_name(pack: Path, name: str) -> None:
    """Refuse a name that could land outside the store and the project, or be run as code."""
    parts = name.split("/")
    plain = all(re.fullmatch(r"[^.\\/:\0][^\\/:\0]*", part) for part in parts)
    known = parts[0] in (STORE, INPUTS) and len(parts) > 1
    if parts[0] == INPUTS and PurePosixPath(name).suffix not in _DATA:
        known = False
    if not plain or not (known or name == CONFIG):
        raise UserError(
            f"{pack}: {name!r} has no place in a store or among data; nothing was placed"
        )


def _read(pack: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{pack}: {name} is damaged ({error}); copy the pack again") from None


def _extract(pack: Path, archive: zipfile.ZipFile, file: PackedFile, stage: Path) -> None:
    """Write a file into the stage, and check its bytes."""
    target = stage / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    try:
        with archive.open(file.name) as source, target.open("wb") as copy:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                copy.write(chunk)
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{pack}: {file.name} is damaged ({error}); copy the pack again") from None
    if digest.hexdigest() != file.sha256:
        raise UserError(
            f"{pack}: {file.name}: its SHA-256 is {digest.hexdigest()}, expected {file.sha256}; copy "
            "the pack again"
        )


def _under(files: list[PackedFile], folder: str) -> list[str]:
    return [file.name for file in files if file.name.startswith(f"{folder}/")]


def _put(source: Path, target: Path) -> bool:
    """Give a staged file its place unless something is there; return whether it was placed.

    A manifest goes with its shard: it is placed if the shard, which comes after it, will be.
    """
    shard = target.with_name(target.name.removesuffix(".json") + ".zarr.zip")
    if (shard if source.with_name(shard.name).exists() else target).exists():
        return False
    with atomic_path(target) as temporary:
        try:
            os.replace(source, temporary)
        except OSError:  # the project lies on another disk than the store
            shutil.copyfile(source, temporary)
    return True


def main() -> None:
    """Place the pack that is named on the command line into the project in the present folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pack", type=Path)
    parser.add_argument("store", type=Path, help="such as results/store")
    arguments = parser.parse_args()
    placed, config = place(arguments.pack, arguments.store, Path())
    print(
        f"{placed} files placed. The config they were made with is {config}: put it in the place of"
    )
    print("config.yaml, or keep yours and add its rows.")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
