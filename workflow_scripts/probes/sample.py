"""Which probes are made: the grid, the disjoint splits, and a balanced sample.

Everything follows from the names in the needle file and of the haystacks, and from seeds: two
datasets over the same files agree on the split without knowing each other, and two question kinds
over the same grid get the same needles, depths and characters.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from workflow_scripts.common.digests import canonical_json
from workflow_scripts.common.errors import UserError
from workflow_scripts.probes.needles import Needle, Question

SPLITS = ("detect", "evaluate", "all")


@dataclass(frozen=True)
class Cell:
    """A cell of the grid. Without a needle's haystack, haystack, length and depth are None."""

    needle: Needle
    haystack_id: str | None
    question: Question
    context_length: int | None
    depth_percent: float | None


def split_characters(needles: Sequence[Needle], split: str) -> frozenset[str]:
    """Return the answers that a split may use: half of the file's characters, or all.

    Only characters are divided; a needle of another format goes to a split as a whole, with its
    answer (`split_pairs`).
    """
    names = sorted({name for needle in needles if needle.has_characters for name in needle.answers})
    others = frozenset(n for needle in needles if not needle.has_characters for n in needle.answers)
    if split == "all":
        return frozenset(names) | others
    _shuffle(names, "characters")
    half = (len(names) + 1) // 2
    return frozenset(names[:half] if split == "detect" else names[half:]) | others


def split_pairs(
    needles: Sequence[Needle], haystack_ids: Sequence[str], split: str, *, one_each: bool
) -> list[tuple[Needle, str | None]]:
    """Return the (needle, haystack) pairs of a split.

    Parameters
    ----------
    needles, haystack_ids
        All needles and haystacks; without haystacks a pair is the needle alone.
    split
        "detect" and "evaluate" share no pair; every needle and every haystack is divided evenly.
        A needle without characters is in one of them only, whatever its haystack. "all" has every
        pair.
    one_each
        Give each needle one haystack, in turn (NIAH), instead of every one.
    """
    haystacks: list[str | None] = [*sorted(haystack_ids)] or [None]
    ids = sorted(needle.needle_id for needle in needles)
    _shuffle(ids, "needles")
    rank = {needle_id: i for i, needle_id in enumerate(ids)}
    pairs: list[tuple[Needle, str | None]] = []
    for i, needle in enumerate(needles):
        chosen = [haystacks[i % len(haystacks)]] if one_each else haystacks
        for j, haystack in enumerate(chosen):
            alternating = j if needle.has_characters else 0
            owner = SPLITS[(rank[needle.needle_id] + alternating) % 2]
            if split in ("all", owner):
                pairs.append((needle, haystack))
    return pairs


def sample_cells(
    pairs: Sequence[tuple[Needle, str | None]],
    context_lengths: Sequence[int],
    depths: Sequence[float],
    size: int | None,
    seed: int,
) -> list[Cell]:
    """Sample cells of the grid, balanced over needles, haystacks, context lengths and depths.

    Parameters
    ----------
    pairs
        (needle, haystack) pairs; each is crossed with lengths, depths and the needle's questions.
    context_lengths, depths
        Tokens of the prompt; percent of the haystack.
    size
        Probes; None means each cell once. More than there are cells repeats the whole grid first.
    seed
        Of the sample.

    Returns
    -------
    list of Cell
        In no order that means anything. The counts of any two levels of a factor differ by one at
        most where the grid has a cell for each choice.
    """
    rng = random.Random(f"sample {seed}")
    grid = [
        Cell(needle, haystack, question, length, depth)
        for (needle, haystack), length, depth in product(
            pairs,
            context_lengths if pairs and pairs[0][1] is not None else [None],
            depths if pairs and pairs[0][1] is not None else [None],
        )
        for question in needle.questions
    ]
    rng.shuffle(grid)
    if size is None:
        return grid
    repeats, rest = divmod(size, len(grid))
    if rest > len(grid) // 2:
        # The cells left out are fewer, and leaving out a balanced set leaves a balanced one.
        left_out = set(_balanced(grid, len(grid) - rest))
        chosen = [cell for i, cell in enumerate(grid) if i not in left_out]
    else:
        chosen = [grid[i] for i in _balanced(grid, rest)]
    return grid * repeats + chosen


def assign_answers(
    cells: Sequence[Cell], characters: frozenset[str], seed: int, where: str
) -> list[str]:
    """Give each cell an answer of its needle, all used evenly, a repeated cell never one twice.

    Raises
    ------
    UserError
        If a needle has no character in the split, or a cell is repeated more often than it has.
    """
    rng = random.Random(f"answers {seed}")
    used: Counter[str] = Counter()
    taken: set[tuple[str, str | None, int | None, float | None, str, str]] = set()
    answers = []
    for cell in cells:
        needle = cell.needle
        allowed = [name for name in needle.answers if name in characters]
        if not allowed:
            raise UserError(
                f"{where}: needle {needle.needle_id} has no character left for this split; give "
                "its character_set more names, or set split: all"
            )
        place = (needle.needle_id, cell.haystack_id, cell.context_length, cell.depth_percent)
        free = [n for n in allowed if (*place, cell.question.kind, n) not in taken]
        if not free:
            raise UserError(
                f"{where}: size asks for more probes than the grid has; lower size, or add depths, "
                "context_lengths, haystacks or needles"
            )
        answer = min(free, key=lambda name: (used[name], rng.random()))
        used[answer] += 1
        taken.add((*place, cell.question.kind, answer))
        answers.append(answer)
    return answers


def _balanced(grid: Sequence[Cell], size: int) -> list[int]:
    """Pick cells one by one, each time one whose levels were picked least; ties in given order.

    A pick costs, summed over the factors, how often its level was picked times the factor's number
    of levels (which makes factors comparable); pairs of levels count only among equals.
    """
    factors = [
        _numbered([cell.needle.needle_id for cell in grid]),
        _numbered([cell.haystack_id for cell in grid]),
        _numbered([cell.context_length for cell in grid]),
        _numbered([cell.depth_percent for cell in grid]),
        _numbered([cell.question.kind for cell in grid]),
    ]
    pairs = [_numbered(list(zip(a, b, strict=True))) for a, b in combinations(factors, 2)]
    cost = np.zeros(len(grid))
    picked = []
    for _ in range(size):
        pick = int(cost.argmin())
        picked.append(pick)
        cost[pick] = np.inf
        for levels in factors:
            cost[levels == levels[pick]] += levels.max() + 1
        for levels in pairs:
            cost[levels == levels[pick]] += 1e-6
    return picked


def _numbered(labels: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return the number of each label, numbered as they first come."""
    numbers: dict[Hashable, int] = {}
    return np.asarray([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)


def _shuffle(names: list[str], what: str) -> None:
    """Shuffle sorted names in an order that hangs on nothing but the names."""
    random.Random(f"{what} {canonical_json(names)}").shuffle(names)
