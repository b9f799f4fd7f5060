"""What a file of a store must be, told by its path alone, and whether it is."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from workflow_scripts.ablation.selection import UNABLATED, HeadSet, generations_key
from workflow_scripts.common.artifacts import read_provenance, read_table
from workflow_scripts.common.digests import key_of
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.shards import manifest_of, open_shard, read_manifest

_SLUG = "[a-z0-9][a-z0-9._-]*"
_KEY = "[0-9a-f]{16}"
_SHARD = rf"(?P<key>{_KEY})/[0-9]{{3}}-of-[0-9]{{3}}"
_TABLE = rf"(?P<key>{_KEY})\.parquet"
_FORMS = {
    "shard": rf"{_SLUG}/activations/{_SLUG}/{_SHARD}\.zarr\.zip",
    "manifest": rf"{_SLUG}/activations/{_SLUG}/{_SHARD}\.json",
    "probes": rf"{_SLUG}/probes/{_SLUG}/{_TABLE}",
    "calibration": rf"{_SLUG}/calibration/{_TABLE}",
    "patching": rf"{_SLUG}/patching/{_SLUG}/{_TABLE}",
    "generations": rf"{_SLUG}/(kv_)?generations/{_SLUG}/{_TABLE}",
}
_SOURCES = rf"(files|{_SLUG}/(model|hub|lenses))/.+"


def store_files(store: Path) -> list[str]:
    """Return the artifacts of a store by their paths within it, sorted.

    Left out are files that jobs are writing, or left behind when they were killed; and fetched or
    converted models, lenses and data, which are made again from their source.

    Raises
    ------
    UserError
        If there is no such folder.
    """
    if not store.is_dir():
        raise UserError(f"{store}: no such folder; name the store")
    names = [file.relative_to(store).as_posix() for file in store.rglob("*") if file.is_file()]
    return sorted(
        name
        for name in names
        if not re.fullmatch(_SOURCES, name)
        and not any(part.startswith(".") for part in PurePosixPath(name).parts)
    )


def check_artifact(store: Path, name: str) -> None:
    """Read all of an artifact and compare it with its checksums and with the key in its path.

    A shard is hashed and compared with its manifest; the pages of a table have checksums. The key is
    computed anew from what the file says it was made for, so that a file of another model, dtype or
    other probes is found out wherever it lies.

    Parameters
    ----------
    name
        The artifact's path within the store.

    Raises
    ------
    UserError
        If it is damaged, or not what its path says.
    """
    path = store / name
    form, key = _parse(name, path)
    if form == "shard":
        with open_shard(path, verify=True) as shard:
            spec = shard.attributes["spec"]
        _expect_key(path, key_of(spec), key)
        _expect_key(manifest_of(path), key_of(read_manifest(manifest_of(path))["spec"]), key)
    elif form == "manifest":
        shard_path = path.with_name(path.name.removesuffix(".json") + ".zarr.zip")
        if not shard_path.is_file():
            raise UserError(f"{path}: the shard it describes is missing; copy both, or delete it")
    elif form == "generations":
        _expect_key(path, _key_of_generations(path), key)
    else:
        read_table(path, kind=form)
        _expect_key(path, key_of(read_provenance(path)["spec"]), key)


def _parse(name: str, path: Path) -> tuple[str, str]:
    """Return what an artifact is and its key."""
    for form, pattern in _FORMS.items():
        if match := re.fullmatch(pattern, name):
            return form, match["key"]
    raise UserError(f"{path}: not a file of a store; move it elsewhere")


def _key_of_generations(path: Path) -> str:
    """Return the key of the answers that a file holds: their task, intervention and heads."""
    table = read_table(path, kind="generations")
    if table.is_empty():
        raise UserError(f"{path}: holds no answers; delete it and run again")
    task = {k: v for k, v in read_provenance(path)["spec"].items() if k != "key"}
    how = table.select(*UNABLATED).row(0, named=True)
    sets = table["heads"].unique(maintain_order=True).to_list()
    group = [HeadSet("", None, 0, None, tuple(heads)) for heads in sets]
    return generations_key(task, how, group)


def _expect_key(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise UserError(
            f"{path}: made for another model, dtype, probes or version: its key is {found}, its path "
            f"says {expected}; delete it, or move it to where it belongs"
        )
