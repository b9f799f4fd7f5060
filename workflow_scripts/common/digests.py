"""Canonical JSON and content digests: what store keys and rerun decisions are made of."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

KEY_LENGTH = 16
"""Hexadecimal digits kept of a SHA-256 in a store key (64 bits)."""


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, no NaN.

    Parameters
    ----------
    value
        Nested dicts, lists, strings, numbers, booleans and None.

    Raises
    ------
    ValueError
        If the value holds NaN or an infinity.
    TypeError
        If the value holds something JSON cannot express.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def key_of(spec: Any) -> str:
    """Return the store key of a spec: the first `KEY_LENGTH` digits of its canonical SHA-256."""
    return hashlib.sha256(canonical_json(spec).encode()).hexdigest()[:KEY_LENGTH]


def file_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
