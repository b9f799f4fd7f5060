"""Pack a model's artifacts, with the config and the data files they were made from, into one file."""

import hashlib
import json
import zipfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from workflow_scripts.common.artifacts import atomic_path
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.script import log, run_script
from workflow_scripts.sharing.crate import METADATA, PackedFile, write_crate

CONFIG = "config.yaml"
INPUTS = "inputs"
STORE = "store"
"""Names inside a pack: the config, and the folders of the data files and of the artifacts."""

CHUNK = 1 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)
_NOT_SHARED = ("store", "shared_stores", "activations")


def shared_config(config: Mapping[str, Any]) -> str:
    """Return a config as YAML, with the default store instead of its owner's folders."""
    kept = {key: value for key, value in config.items() if key not in _NOT_SHARED}
    return yaml.safe_dump({"store": "results/store", **kept}, sort_keys=False, allow_unicode=True)


def input_members(paths: list[str]) -> dict[str, Path]:
    """Return the files of the user's data by their names in a pack.

    Raises
    ------
    UserError
        If one lies outside the project, where a collaborator has no place for it.
    """
    for path in paths:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise UserError(
                f"{path}: lies outside the project; move it into the project's folder and name it by "
                "a relative path in the config, so that it can be packed"
            )
    return {f"{INPUTS}/{PurePosixPath(path)}": Path(path) for path in paths}


def write_pack(target: Path, members: Mapping[str, Path | str], *, name: str, date: str) -> None:
    """Write a pack, whole or not at all.

    Parameters
    ----------
    target
        The ZIP file. Its members are not compressed: shards are, and so `place` knows their sizes.
    members
        By name in the pack, a file, or the text of one.
    name, date
        See `write_crate`.
    """
    with atomic_path(target) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        files = [_add(archive, member, members[member]) for member in sorted(members)]
        archive.writestr(_entry(METADATA), write_crate(files, name=name, date=date))


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.create_system = 3  # Unix, whatever system packs it
    entry.external_attr = 0o100644 << 16
    return entry


def _add(archive: zipfile.ZipFile, name: str, content: Path | str) -> PackedFile:
    """Add a member, read once, and return what the crate says of it."""
    if isinstance(content, str):
        data = content.encode()
        archive.writestr(_entry(name), data)
        return PackedFile(name, len(data), hashlib.sha256(data).hexdigest())
    digest, size = hashlib.sha256(), 0
    with content.open("rb") as source, archive.open(_entry(name), "w", force_zip64=True) as member:
        while chunk := source.read(CHUNK):
            member.write(chunk)
            digest.update(chunk)
            size += len(chunk)
    return PackedFile(name, size, digest.hexdigest())


def main(snakemake: Any) -> None:
    """Write the pack of a model."""
    spec = json.loads(snakemake.params.spec)
    artifacts = zip(spec["artifacts"], map(Path, snakemake.input.artifacts), strict=True)
    members: dict[str, Path | str] = {f"{STORE}/{name}": path for name, path in artifacts}
    members |= input_members(list(snakemake.input.data))
    members[CONFIG] = shared_config(snakemake.config)
    target = Path(snakemake.output[0])
    name = f"LOCOS on {snakemake.wildcards.model}"
    write_pack(target, members, name=name, date=datetime.now(UTC).date().isoformat())
    log.info("%s: %d files, %.1f MB", target, len(members), target.stat().st_size / 1e6)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
