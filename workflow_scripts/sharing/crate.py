"""The description inside a pack: an RO-Crate 1.1 (https://w3id.org/ro/crate/1.1), as JSON-LD.

Any RO-Crate tool reads it; the checksums that `place` goes by are the `sha256` of its files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from workflow_scripts.common.errors import UserError

METADATA = "ro-crate-metadata.json"
SPECIFICATION = "https://w3id.org/ro/crate/1.1"
_CONTEXT = [
    f"{SPECIFICATION}/context",
    # schema.org's property, which the context of 1.1 does not name yet.
    {"sha256": "https://schema.org/sha256"},
]
_MEDIA_TYPES = {
    ".zip": "application/zip",
    ".json": "application/json",
    ".parquet": "application/vnd.apache.parquet",
    ".yaml": "application/yaml",
}


@dataclass(frozen=True)
class PackedFile:
    """A file of a pack: its path in it, size in bytes and SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


def write_crate(files: Sequence[PackedFile], *, name: str, date: str) -> str:
    """Return the text of `METADATA`.

    Parameters
    ----------
    name
        What the pack is of.
    date
        The day it was packed, as 2026-01-31; the standard asks for one.
    """
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": name,
        "description": "Artifacts of the LOCOS workflow with the config and data they were made from. "
        "`python -m workflow_scripts.sharing.place` puts them into a store, where they are used.",
        "datePublished": date,
        "hasPart": [{"@id": quote(file.name)} for file in files],
    }
    descriptor = {
        "@id": METADATA,
        "@type": "CreativeWork",
        "conformsTo": {"@id": SPECIFICATION},
        "about": {"@id": "./"},
    }
    graph = [descriptor, root, *map(_entity, files)]
    return json.dumps({"@context": _CONTEXT, "@graph": graph}, indent=1, ensure_ascii=False) + "\n"


def _entity(file: PackedFile) -> dict[str, Any]:
    suffix = PurePosixPath(file.name).suffix
    return {
        "@id": quote(file.name),
        "@type": "File",
        "name": PurePosixPath(file.name).name,
        "contentSize": str(file.size),
        "encodingFormat": _MEDIA_TYPES.get(suffix, "text/plain"),
        "sha256": file.sha256,
    }


def read_crate(text: str | bytes) -> dict[str, PackedFile]:
    """Return the files that a crate describes, by name.

    Raises
    ------
    UserError
        If the text is no crate of this kind.
    """
    try:
        entities = [item for item in json.loads(text)["@graph"] if item.get("@type") == "File"]
        files = [
            PackedFile(unquote(item["@id"]), int(item["contentSize"]), str(item["sha256"]))
            for item in entities
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{METADATA}: not the description of a pack ({error!r})") from None
    return {file.name: file for file in files}
