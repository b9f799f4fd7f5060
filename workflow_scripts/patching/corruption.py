"""Prompts whose needle no longer gives the answer, token for token as long as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

CORRUPTIONS = ("filler", "character")
"""Needle replaced by haystack text, or another character put into it."""


def corrupt(
    probe: dict[str, Any], corruption: str, encode: Callable[[str], Sequence[int]]
) -> list[int] | None:
    """Return the corrupt prompt of a probe; None where the corruption cannot be made.

    Parameters
    ----------
    probe
        A row of the probes table with a needle.
    corruption
        One of `CORRUPTIONS`.
    encode
        Token ids of a text, without special tokens.

    Returns
    -------
    list of int or None
        As long as the prompt, and equal to it outside the needle.
    """
    ids = list(probe["input_ids"])
    start, stop = probe["needle_start"], probe["needle_end"]
    if corruption == "filler":
        ids[start:stop] = _filler(ids, probe, stop - start)
        return ids
    needle = _other_character(ids[start:stop], probe["answer"], probe["other_answers"], encode)
    if needle is None:
        return None
    ids[start:stop] = needle
    return ids


def _filler(ids: list[int], probe: dict[str, Any], length: int) -> list[int]:
    """Return the first tokens of the probe's own haystack, repeated where it is too short."""
    before = ids[probe["haystack_start"] : probe["needle_start"]]
    after = ids[probe["needle_end"] : probe["haystack_end"]]
    text = before + after
    return (text * (length // max(1, len(text)) + 1))[:length]


def _other_character(
    needle: list[int],
    answer: str,
    others: Sequence[str],
    encode: Callable[[str], Sequence[int]],
) -> list[int] | None:
    """Return the needle with the first other character whose name has as many tokens."""
    for prefix in (" ", ""):
        name = encode(prefix + answer)
        at = find_run(needle, name)
        if at is None:
            continue
        for other in sorted(others):
            replacement = encode(prefix + other)
            if len(replacement) == len(name):
                return [*needle[:at], *replacement, *needle[at + len(name) :]]
    return None


def find_run(ids: Sequence[int], run: Sequence[int]) -> int | None:
    """Return where a run of tokens first stands in others; None if it does not."""
    if not run:
        return None
    starts = range(len(ids) - len(run) + 1)
    return next((i for i in starts if list(ids[i : i + len(run)]) == list(run)), None)
