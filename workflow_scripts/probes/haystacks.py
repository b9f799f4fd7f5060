"""Haystacks: long texts, one a file, and where their sentences end."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow_scripts.common.errors import UserError

log = logging.getLogger("locos")


CLOSED_ENDERS = "。！？．｡؟۔।॥။។።፧"
"""Enders that end a sentence wherever they stand: their scripts write on without a space."""

_CLOSERS = "\"'”’»)\\]」』）】》〉"
_SENTENCE_END = re.compile(
    rf"(?:[{CLOSED_ENDERS}]+|[.!?…]+(?=[{_CLOSERS}]*(?:\s|\Z)))[{_CLOSERS}]*"
    r"|(?<=\S)(?=\s*\n\s*\n)"
)
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Haystack:
    """A text to hide needles in.

    Attributes
    ----------
    haystack_id
        Its file's name without the ending; with the folder's name before it where names repeat.
    path
        Its file.
    text
        The text, without white space at either end.
    """

    haystack_id: str
    path: Path
    text: str


@dataclass(frozen=True)
class SentenceEnd:
    """Where a sentence ends.

    Attributes
    ----------
    start
        Character after the ender and its closing quotes.
    stop
        Character after the white space that follows; equal to `start` where there is none.
    """

    start: int
    stop: int


def read_haystacks(paths: Sequence[str | Path]) -> list[Haystack]:
    """Read haystacks, sorted by their id.

    A file is plain text, or the JSON {"rows": [{"row": {"text": ...}}]} under any name. Such a file
    may be cut off: rows that are whole are read, and a warning says how much was dropped.

    Raises
    ------
    UserError
        If a file is missing, empty, not UTF-8, or a JSON file without a text.
    """
    files = [Path(path) for path in paths]
    stems = Counter(path.stem for path in files)
    haystacks = []
    for path in files:
        name = path.stem if stems[path.stem] == 1 else f"{path.parent.name}-{path.stem}"
        text = _read_text(path)
        if text.lstrip().startswith("{") and '"rows"' in text:
            text = _text_of_rows(path, text)
        if not text.strip():
            raise UserError(f"{path}: holds no text; fill it, or take it out of the folder")
        haystacks.append(Haystack(name, path, text.strip()))
    repeated = [
        name for name, count in Counter(h.haystack_id for h in haystacks).items() if count > 1
    ]
    if repeated:
        raise UserError(
            f"{files[0].parent}: two haystacks are named '{repeated[0]}'; rename one of the files"
        )
    return sorted(haystacks, key=lambda haystack: haystack.haystack_id)


def sentence_ends(text: str) -> list[SentenceEnd]:
    """Return where the sentences of a text end, in order.

    An ender of a script with spaces (`. ! ? …`) counts only before white space, so that 3.14 is one
    word; enders of other scripts always count. A blank line ends a sentence too (headings).
    """
    ends = {}
    for match in _SENTENCE_END.finditer(text):
        space = _SPACE.match(text, match.end())
        ends[match.end()] = space.end() if space else match.end()
    return [SentenceEnd(start, stop) for start, stop in ends.items()]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; correct haystacks in the config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error}); save it so") from None


def _text_of_rows(path: Path, source: str) -> str:
    """Return the texts of a rows file, joined by a blank line; what is cut off is left out."""
    rows, end, whole = _whole_rows(source)
    texts = [_row_text(path, number, row) for number, row in enumerate(rows, 1)]
    if whole:
        return "\n\n".join(texts)
    if texts:
        log.warning(
            "%s: cut off in row %d; read %d whole rows, dropped the last %d of %d characters",
            *(path, len(rows) + 1, len(rows), len(source) - end, len(source)),
        )
        return "\n\n".join(texts)
    kept, dropped = _whole_sentences(source[end:])
    if not kept:
        raise UserError(f"{path}: cut off before its first sentence ends; fetch the file again")
    log.warning(
        "%s: cut off in its only text; read %d whole characters, dropped the last %d",
        *(path, len(kept), dropped),
    )
    return kept


def _whole_rows(source: str) -> tuple[list[Any], int, bool]:
    """Return the rows that can be parsed, the character where they end, and whether that is all."""
    try:
        rows = json.loads(source)["rows"]
    except json.JSONDecodeError:
        pass
    except KeyError:
        return [], len(source), False
    else:
        return (rows, len(source), True) if isinstance(rows, list) else ([], len(source), False)
    opening = re.search(r'"rows"\s*:\s*\[\s*', source)
    start = end = opening.end() if opening else len(source)
    rows = []
    while True:
        try:
            row, end = json.JSONDecoder().raw_decode(source, start)
        except json.JSONDecodeError:
            return rows, end, False
        rows.append(row)
        comma = re.compile(r"\s*,\s*").match(source, end)
        if comma is None:
            return rows, end, False
        start = comma.end()


def _row_text(path: Path, number: int, row: Any) -> str:
    try:
        text = row["row"]["text"]
    except (KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise UserError(f"{path}: row {number} has no text; expected {{'row': {{'text': ...}}}}")
    return text


def _whole_sentences(rest: str) -> tuple[str, int]:
    """Return the whole sentences of a row cut off in its text, and how many characters follow."""
    opening = re.search(r'"text"\s*:\s*"', rest)
    body = rest[opening.end() :] if opening else ""
    # The cut may fall inside an escape such as \u00e9: step back until the string can be closed.
    for cut in range(len(body), max(len(body) - 6, 0), -1):
        try:
            text = str(json.loads(f'"{body[:cut]}"', strict=False))
        except json.JSONDecodeError:
            continue
        last = max((end.start for end in sentence_ends(text) if end.start < len(text)), default=0)
        return text[:last], len(text) - last
    return "", len(body)
