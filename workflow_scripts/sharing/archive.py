"""Archives: published shards, listed in a table of their addresses and checksums."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path

from workflow_scripts.common.errors import UserError

COLUMNS = ("path", "bytes", "sha256", "url")
"""Path within a store, size, SHA-256 in hexadecimal, and http(s) address of each file."""

Row = dict[str, str]


def read_archive(path: str | Path) -> dict[str, Row]:
    """Read a table of published files, tab-separated with a header; return its rows by path.

    Raises
    ------
    UserError
        If it is no such table; the line is named.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t")
            rows = list(reader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable table ({error})") from None
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise UserError(
            f"{path}: its columns are {', '.join(reader.fieldnames or ()) or 'missing'}, expected "
            f"{', '.join(COLUMNS)}, separated by tabs"
        )
    for number, row in enumerate(rows, 2):
        _check_row(f"{path}: line {number}", row)
    return {row["path"]: row for row in rows}


def _check_row(where: str, row: Row) -> None:
    if set(row) != set(COLUMNS) or None in row.values():
        raise UserError(f"{where}: not {len(COLUMNS)} fields")
    if not re.fullmatch("[0-9a-f]{64}", row["sha256"]):
        raise UserError(f"{where}: sha256 is {row['sha256']!r}, expected 64 hexadecimal digits")
    if not row["bytes"].isdecimal():
        raise UserError(f"{where}: bytes is {row['bytes']!r}, expected a whole number")
    if not re.match("https?://", row["url"]):
        raise UserError(f"{where}: url is {row['url']!r}, expected http:// or https://")


def format_archive(rows: Iterable[Row]) -> str:
    """Return the text of a table of published files."""
    lines = [COLUMNS, *(tuple(row[column] for column in COLUMNS) for row in rows)]
    return "".join("\t".join(line) + "\n" for line in lines)
