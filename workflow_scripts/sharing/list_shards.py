"""Write the table with which a store's shards are published, after checking every shard.

python -m workflow_scripts.sharing.list_shards STORE URL > shards.tsv

URL is where the files will lie, with {path} for the path within the store; or with {name}, which has
"--" for "/", where a server knows no folders: 'https://zenodo.org/records/123/files/{name}'.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from urllib.parse import quote

from workflow_scripts.common.digests import file_sha256
from workflow_scripts.common.errors import UserError
from workflow_scripts.sharing.archive import Row, format_archive
from workflow_scripts.sharing.artifacts import check_artifact, store_files


def archive_rows(store: Path, url: str) -> list[Row]:
    """Return a row for every shard and manifest of a store.

    Raises
    ------
    UserError
        If a shard is damaged or misplaced, there is none, or the URL names no file.
    """
    if "{path}" not in url and "{name}" not in url:
        raise UserError(f"{url}: name the place of the files in it, such as {url}/{{path}}")
    names = [name for name in store_files(store) if "/activations/" in name]
    if not names:
        raise UserError(f"{store}: holds no shards; name the folder that `store:` names")
    for name in names:
        check_artifact(store, name)
    return [
        {
            "path": name,
            "bytes": str((store / name).stat().st_size),
            "sha256": file_sha256(store / name),
            "url": url.replace("{path}", quote(name)).replace("{name}", name.replace("/", "--")),
        }
        for name in names
    ]


def main() -> None:
    """Print the table of the store that is named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", type=Path)
    parser.add_argument("url")
    arguments = parser.parse_args()
    sys.stdout.write(format_archive(archive_rows(arguments.store, arguments.url)))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
