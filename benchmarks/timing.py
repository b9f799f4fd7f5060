"""Two ways of doing the same thing, timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """Wall times of two ways in seconds, and the ratio of each turn."""

    name: str
    ours: list[float]
    theirs: list[float]
    target: str

    def ratios(self) -> list[float]:
        """Return ours / theirs of each turn."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    def row(self) -> str:
        """Return a line of a Markdown table: min / median / max of the ratio, and the target."""
        found = self.ratios()
        spread = f"{min(found):.3f} / {statistics.median(found):.3f} / {max(found):.3f}"
        times = f"{statistics.median(self.ours):.2f} s / {statistics.median(self.theirs):.2f} s"
        return f"| {self.name} | {spread} | {times} | {self.target} |"


def seconds_of(function: Callable[[], object]) -> float:
    """Return the wall time of a call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def in_turns(
    name: str, ours: Callable[[], object], theirs: Callable[[], object], *, turns: int, target: str
) -> Ratio:
    """Time two functions in turns, so that what else the machine does falls on both alike.

    Both should have run before.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for kept, function in zip(times, (ours, theirs), strict=True):
            kept.append(seconds_of(function))
    return Ratio(name, *times, target)
