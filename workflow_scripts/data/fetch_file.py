"""Fetch one file that the config names by its repository, commit and path."""

import json
import shutil
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from workflow_scripts.common.artifacts import atomic_path
from workflow_scripts.common.digests import canonical_json, file_sha256
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.hub import PATIENCE_S, hub_file
from workflow_scripts.common.script import log, run_script

INSTEAD = "fetch the file elsewhere and name its path in the config"


def fetch(source: dict[str, str], path: Path) -> str:
    """Write a remote file to a path and return its SHA-256.

    Parameters
    ----------
    source
        {hub or url, revision, file} and, if it is known, sha256.

    Raises
    ------
    UserError
        If it cannot be had, or is not the one the config means.
    """
    if "hub" in source:
        cached = hub_file(
            source["hub"], source["file"], source["revision"], kind="dataset", instead=INSTEAD
        )
        shutil.copyfile(cached, path)
        name = f"{source['hub']}/{source['file']}"
    else:
        name = "/".join(source[part] for part in ("url", "revision", "file"))
        try:
            with (
                urllib.request.urlopen(name, timeout=PATIENCE_S) as answer,
                path.open("wb") as file,
            ):
                shutil.copyfileobj(answer, file)
                if answer.length:  # reading in pieces does not notice
                    raise EOFError(f"it broke off {answer.length} bytes before its end")
        except (OSError, EOFError, HTTPException) as error:
            raise UserError(
                f"{name}: cannot be fetched ({error}); check the address and the network, or {INSTEAD}"
            ) from None
    found = file_sha256(path)
    if found != source.get("sha256", found):
        raise UserError(
            f"{name}: sha256 is {found}, the config says {source['sha256']}; correct one of them"
        )
    return found


def main(snakemake: Any) -> None:
    """Write the file, and beside it where it came from and what it is."""
    source = json.loads(snakemake.params.spec)
    with atomic_path(snakemake.output.file) as path:
        sha256 = fetch(source, path)
        size = path.stat().st_size
    with atomic_path(snakemake.output.origin) as path:
        origin = {**source, "sha256": sha256, "bytes": size}
        path.write_text(canonical_json(origin) + "\n", encoding="utf-8")
    if "sha256" not in source:
        log.warning(
            "%s: the config pins no checksum; to be sure of it next time, add sha256: %s",
            source["file"],
            sha256,
        )


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
