"""The rows of a shard as named columns: sums of alpha and phi over regions, in double precision.

A row is one step of one probe. Columns come from the shard's reductions, not from its dense planes.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workflow_scripts.common.errors import UserError
from workflow_scripts.common.shards import REGIONS, Shard

OFF = {
    "all": REGIONS[1:],
    "context": ("haystack",),
    "no_bos": ("haystack", "question", "template", "generated"),
}
"""`off:` -> the regions that off_* sums over (method, section 3)."""

GATES = {
    "passed": ("passed", "forced"),
    "rouge": ("passed", "forced", "no_answer_step"),
    "none": ("passed", "forced", "no_answer_step", "wrong", "truncated", "answered"),
}
"""`gate:` -> the statuses that are scored. A mismatch never is: its rows are not of its answer. A
forced answer always is: there is nothing to judge."""

STEPS = ("answer", "content", "prompt")
"""`steps:` answer steps, all generated steps, or the last 8 prompt tokens."""

DIRECTIONS = ("raw", "unit", "frozen_norm", "tuned_lens")

_QUANTITIES = ("phi", "alpha", "len")
_PER_ROW = {
    "length": "step_length",
    "logprob": "step_logprob",
    "u_norm": "step_u_norm",
    "step": "step_index",
}
_PER_HEAD = ("argmax", "top10_in_needle", "topn_needle_alpha")
COLUMNS = (
    *(f"{part}_{x}" for part in ("needle", "off") for x in _QUANTITIES),
    "total_phi",
    "total_alpha",
    *(f"{region}_{x}" for region in REGIONS[1:] for x in _QUANTITIES),
    *_PER_HEAD,
    "argmax_in_needle",
    *_PER_ROW,
)
"""What a formula may name."""

NEED_TOKEN = frozenset([c for c in COLUMNS if c.endswith("_phi")] + ["logprob", "u_norm"])
"""Columns that exist only where a token was generated."""

NEED_NEEDLE = frozenset(c for c in COLUMNS if "needle" in c)
"""Columns that mean nothing for a probe without a needle."""

Array = NDArray[Any]


class Rows:
    """Chosen rows of a shard.

    Parameters
    ----------
    shard
        The shard.
    steps
        One of `STEPS`.
    gate
        Key of `GATES`.
    needle
        Leave out probes without a needle.
    off
        Key of `OFF`.
    direction
        One of `DIRECTIONS`; "unit" is "raw" divided by ||raw u||.

    Attributes
    ----------
    index
        Index of each row into the shard's step arrays, shape (R,), in the shard's order.
    probe
        Index of each row's probe into `shard.probes`, shape (R,).
    """

    def __init__(
        self,
        shard: Shard,
        *,
        steps: str,
        gate: str,
        needle: bool = True,
        off: str = "all",
        direction: str = "raw",
    ) -> None:
        self.shard, self.off, self.direction = shard, off, direction
        probes = shard.probes
        kept = np.array(
            [
                p["status"] in GATES[gate] and not (needle and p["needle_start"] is None)
                for p in probes
            ],
            dtype=bool,
        )
        # A shard in which no probe could be run has no rows and no arrays.
        ran = "step_probe" in shard and kept.any()
        owner = shard.read("step_probe") if ran else np.zeros(0, np.int32)
        wanted = self._wanted(steps) if ran else np.zeros(0, bool)
        self.index = np.flatnonzero(wanted & kept[owner]) if ran else np.zeros(0, np.int64)
        self.probe = owner[self.index]

    def _wanted(self, steps: str) -> Array:
        if steps == "answer":
            return self.shard.read("step_is_answer")
        if steps == "content":
            return self.shard.read("step_token") >= 0
        return self.shard.read("step_index") <= 0

    def __len__(self) -> int:
        return len(self.index)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return self.shard.n_layers, self.shard.n_heads

    def read(self, name: str) -> Array:
        """Return an array of the shard at the chosen rows."""
        return self.shard.read(name)[self.index]

    def probe_values(self, key: str) -> Array:
        """Return, per row, an attribute of its probe."""
        return np.array([self.shard.probes[p][key] for p in self.probe])

    @cached_property
    def _alpha(self) -> Array:
        return self.read("alpha_by_region").astype(np.float64)

    @property
    def phi_plane(self) -> str:
        """Name of the dense plane that the direction is read from.

        Raises
        ------
        UserError
            If the direction was not captured.
        """
        captured = "raw" if self.direction == "unit" else self.direction
        if captured not in self.shard.directions():
            raise UserError(
                f"{self.shard.path}: direction '{captured}' was not captured, only "
                f"{', '.join(self.shard.directions())}; add it to `directions:` in the config"
            )
        return f"phi_{captured}"

    @cached_property
    def _phi(self) -> Array:
        phi = self.read(f"{self.phi_plane}_by_region").astype(np.float64)
        if self.direction == "unit":
            phi /= self.column("u_norm")[..., None]
        return phi

    @cached_property
    def _lengths(self) -> Array:
        return self.read("region_length").astype(np.float64)[:, None, None]

    def column(self, name: str) -> Array:
        """Return a column of `COLUMNS`, float64, shape (R, layer, head) or (R, 1, 1)."""
        if name in _PER_ROW:
            return self.read(_PER_ROW[name]).astype(np.float64)[:, None, None]
        if name in _PER_HEAD:
            return self.read(name).astype(np.float64)
        if name == "argmax_in_needle":
            start, stop = (
                self.probe_values(f"needle_{end}")[:, None, None] for end in ("start", "end")
            )
            argmax = self.read("argmax")
            # Where a head attends to nothing, the position of its largest weight means nothing.
            inside = (argmax >= start) & (argmax < stop) & (self.column("total_alpha") > 0)
            return inside.astype(np.float64)
        part, quantity = name.rsplit("_", 1)
        if quantity == "len":
            return self._sum(part, self._lengths)
        return self._sum(part, self._alpha if quantity == "alpha" else self._phi)

    def _sum(self, part: str, by_region: Array) -> Array:
        regions = {"off": OFF[self.off], "total": REGIONS}.get(part, (part,))
        total: Array = by_region[..., [REGIONS.index(region) for region in regions]].sum(-1)
        return total


def groups_of(probe: Array) -> list[slice]:
    """Return the slice of rows of each probe; a probe's rows stand together."""
    edges = np.flatnonzero(np.diff(probe, prepend=-1, append=-1))
    return [slice(int(a), int(b)) for a, b in pairwise(edges)]
