"""Detectors that need more than a formula: functions from the rows of a shard to head values.

Adding one: write the function, register it under its name with the steps it reads; the common suite
of tests runs over every registered detector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workflow_scripts.common.errors import UserError
from workflow_scripts.scores.pooling import Floats, Values, per_step
from workflow_scripts.scores.reductions import Rows, groups_of

TOP = 10
"""Positions of the top-10 overlap."""

Array = NDArray[Any]
Compute = Callable[[Rows], Values]


@dataclass(frozen=True)
class Detector:
    """A registered detector.

    Attributes
    ----------
    compute
        From at least one row, all of probes with a needle, to values.
    steps
        The steps it can read, keys of `STEPS`; the first is the default.
    gate
        Default gate.
    options
        Optional keys of the config that it uses.
    share
        For a contrastive detector the quantity A of each row, which the permutation filter needs.
    """

    compute: Compute
    steps: tuple[str, ...]
    gate: str = "passed"
    options: tuple[str, ...] = ()
    share: Callable[[Rows], Floats] | None = None


DETECTORS: dict[str, Detector] = {}
"""Name in the config -> detector."""


def _register(name: str, **about: Any) -> Callable[[Compute], Compute]:
    """Return a decorator that registers a function; `about` are the fields of `Detector`."""

    def add(compute: Compute) -> Compute:
        DETECTORS[name] = Detector(compute, **about)
        return compute

    return add


def _reduce_probes(
    probe: Array, reduce: Callable[[slice], Floats], shape: tuple[int, int]
) -> Values:
    """Make one row of each probe's rows; `reduce` maps a probe's slice of them to (layer, head)."""
    groups = groups_of(probe)
    values = [reduce(group) for group in groups]
    return Values(
        probe[[group.start for group in groups]],
        np.array(values, np.float64).reshape(-1, *shape),
        np.array([group.stop - group.start for group in groups], np.int64),
    )


def _copies(rows: Rows, same: Callable[[list[int], int], Array]) -> Values:
    """Return per probe how many steps have their largest weight on a copy of y_t, over n.

    The span is the real_needle part, n its length; `same(ids, token)` says which of the
    span's tokens count as a copy, bool, (n,).
    """
    tokens, argmax = rows.read("step_token"), rows.read("argmax")
    # Where a head attends to nothing, the position of its largest weight means nothing.
    attends = rows.column("total_alpha") > 0

    def count(group: slice) -> Floats:
        probe = rows.shard.probes[rows.probe[group.start]]
        start, stop = probe["real_needle_start"], probe["real_needle_end"]
        ids = probe["input_ids"][start:stop]
        copied = np.stack([same(ids, int(token)) for token in tokens[group]])
        at = argmax[group] - start
        inside = (at >= 0) & (at < len(ids)) & attends[group]
        step = np.arange(len(copied))[:, None, None]
        hits = inside & copied[step, np.clip(at, 0, len(ids) - 1)]
        share: Floats = hits.sum(0) / len(ids)
        return share

    return _reduce_probes(rows.probe, count, rows.shape)


@_register("wu", steps=("content",), gate="rouge")
def wu(rows: Rows) -> Values:
    """Literal copying: 1/n for each step whose largest weight lies on y_t itself in the needle."""
    return _copies(rows, lambda ids, token: np.array(ids) == token)


@_register("wu_text", steps=("content",), gate="rouge")
def wu_text(rows: Rows) -> Values:
    """`wu` by token text, stripped and case-folded: a leading space is not non-literality.

    Raises
    ------
    UserError
        If the shard does not tell its tokens' texts (attribute `token_text`: id to text).
    """
    texts = rows.shard.attributes.get("token_text")
    if texts is None:
        raise UserError(
            f"{rows.shard.path}: tells no token texts, which wu_text compares; capture it again"
        )
    folded = {int(token): text.strip().casefold() for token, text in texts.items()}

    def same(ids: list[int], token: int) -> Array:
        return np.array([bool(folded[token]) and folded[i] == folded[token] for i in ids])

    return _copies(rows, same)


def label_difference(shares: Floats, is_answer: Array) -> Floats:
    """Return the answer steps' mean minus the other steps'; without others, the answer mean.

    `shares` has shape (steps, layer, head), `is_answer` (steps,) at least one True.
    """
    mean: Floats = shares[is_answer].mean(0)
    return mean if is_answer.all() else mean - shares[~is_answer].mean(0)


def contrastive_rows(
    rows: Rows, share: Callable[[Rows], Floats]
) -> tuple[Array, Floats, NDArray[np.bool_]]:
    """Return probe, A and is-answer of the rows whose probe has an answer step."""
    is_answer = rows.read("step_is_answer")
    kept = np.isin(rows.probe, rows.probe[is_answer])
    return rows.probe[kept], share(rows)[kept], is_answer[kept]


def _register_contrastive(name: str, share: Callable[[Rows], Floats]) -> None:
    """Register max(mean over answer steps of A - mean over other steps, 0), A being `share`."""

    def compute(rows: Rows) -> Values:
        probe, shares, is_answer = contrastive_rows(rows, share)
        return _reduce_probes(
            probe,
            lambda group: np.maximum(label_difference(shares[group], is_answer[group]), 0),
            rows.shape,
        )

    DETECTORS[name] = Detector(compute, ("content",), options=("permutations",), share=share)


def _top10_share(rows: Rows) -> Floats:
    """Return the share of the ten positions with most attention that lie in the needle."""
    return rows.column("top10_in_needle") / np.minimum(TOP, rows.column("length"))


_register_contrastive("contrastive_top10", _top10_share)
_register_contrastive("contrastive_mass", lambda rows: rows.column("needle_alpha"))


@_register("snapkv_window", steps=("prompt",), gate="none")
def snapkv_window(rows: Rows) -> Values:
    """Largest attention to the needle of the last 8 prompt tokens; needs no generated token."""
    mass = rows.column("needle_alpha")
    return _reduce_probes(rows.probe, lambda group: mass[group].max(0), rows.shape)


@_register("headkv_r2", steps=("content", "answer"))
def headkv_r2(rows: Rows) -> Values:
    """Attention to those of the n keys with most attention that lie in the needle of n, over n."""
    return per_step(rows.probe, rows.column("topn_needle_alpha") / rows.column("needle_len"))


@_register("argmax_ov", steps=("answer",), options=("direction", "off"))
def argmax_ov(rows: Rows) -> Values:
    """Phi at the needle position with most attention, minus the mean phi off the needle."""
    peak = rows.read(f"peak_{rows.phi_plane}").astype(np.float64)
    if rows.direction == "unit":
        peak /= rows.column("u_norm")
    return per_step(rows.probe, peak - rows.column("off_phi") / rows.column("off_len"))
