"""Download a published shard and its manifest into the store, in the place of a capture."""

import hashlib
import http.client
import json
import urllib.request
from pathlib import Path
from typing import Any

from workflow_scripts.common.artifacts import atomic_path
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.script import NO_ROOM, log, run_script
from workflow_scripts.common.shards import open_shard
from workflow_scripts.sharing.archive import read_archive

CHUNK = 1 << 20
TIMEOUT_S = 60


def download(url: str, target: Path, *, size: int, sha256: str) -> None:
    """Download a file, going on where an interrupted download stopped.

    Parameters
    ----------
    url
        Its http(s) address.
    target
        Where it is put, once its bytes are those expected. What has come stands beside it until then.
    size, sha256
        Its bytes, and their digest in hexadecimal.

    Raises
    ------
    UserError
        If the address cannot be reached, or stops before the end, or what comes is something else.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".tmp-{target.name}-{sha256[:16]}.part")
    try:
        _fetch(url, part, size)
    except (OSError, http.client.HTTPException) as error:
        if getattr(error, "errno", None) in NO_ROOM:
            raise  # the disk, not the server
        there = part.stat().st_size if part.exists() else 0
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{url}: stopped after {there} of {size} bytes ({reason}); check the address and the "
            "network, and run again: it goes on from there"
        ) from None
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        part.unlink()
        raise UserError(
            f"{url}: its SHA-256 is {found}, the archive's table says {sha256}; the file was changed or "
            "the table is of another: ask its publisher"
        )
    with atomic_path(target) as temporary:
        part.replace(temporary)


def _fetch(url: str, part: Path, size: int) -> None:
    """Append to a part until it has its size; a server that cannot go on starts again."""
    there = part.stat().st_size if part.exists() else 0
    if there == size:
        return
    headers = {"Range": f"bytes={there}-"} if 0 < there < size else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        resumed = answer.status == http.client.PARTIAL_CONTENT
        there = there if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            while chunk := answer.read(CHUNK):
                there += len(chunk)
                if there > size:
                    raise http.client.HTTPException(f"more than {size} bytes came")
                file.write(chunk)
    if there < size:
        raise http.client.HTTPException("the connection was closed")


def main(snakemake: Any) -> None:
    """Download a shard after its manifest, and check that the shard is the one asked for."""
    spec = json.loads(snakemake.params.spec)
    shard, manifest = Path(snakemake.output.shard), Path(snakemake.output.manifest)
    table = snakemake.config["activations"]["table"]
    rows = read_archive(table)
    for target in (manifest, shard):
        # Both end in {model}/activations/{dataset}/{key}/{file}.
        name = "/".join(target.parts[-5:])
        if name not in rows:
            raise UserError(
                f"{table}: has no row for {name}: its shards were made with another config; take the "
                "one they were published with, or set activations.source: capture"
            )
        row = rows[name]
        log.info("%s: %s bytes", row["url"], row["bytes"])
        download(row["url"], target, size=int(row["bytes"]), sha256=row["sha256"])
    try:
        open_shard(shard, spec=spec, verify=True).close()
    except UserError:
        shard.unlink()
        raise


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
