"""Which heads are ablated: the conditions of every task, and the keys of their generations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from workflow_scripts.common.artifacts import read_table
from workflow_scripts.common.digests import key_of
from workflow_scripts.common.errors import UserError

SCHEMA: dict[str, Any] = {
    "task": pl.String,
    "selector": pl.String,
    "end": pl.String,
    "k": pl.Int32,
    "seed": pl.Int32,
    "mode": pl.String,
    "site": pl.String,
    "heads": pl.List(pl.String),
    "key": pl.String,
}


@dataclass(frozen=True)
class HeadSet:
    """The heads of one condition, as "layer-head" names, best first."""

    selector: str
    end: str | None
    k: int
    seed: int | None
    heads: tuple[str, ...]


def head_sets(spec: dict[str, Any], heads: pl.DataFrame) -> list[list[HeadSet]]:
    """Return the conditions of every selector and end; `none` comes first and alone.

    Parameters
    ----------
    spec
        `selectors` and `k` of the config.
    heads
        The heads table: every score's ranking.

    Returns
    -------
    list of lists of HeadSet
        One list for each file of generations: the k of a selector's end, or all seeds of random.

    Raises
    ------
    UserError
        If a k exceeds the number of heads.
    """
    names = _grid(heads)
    if max(spec["k"]) > len(names):
        raise UserError(
            f"ablation.k: {max(spec['k'])} is more than the {len(names)} heads of {spec['model']}"
        )
    groups = [[HeadSet("none", None, 0, None, ())]]
    for selector, row in spec["selectors"].items():
        if row.get("random"):
            draws = [(seed, random_order(names, seed)) for seed in row["seeds"]]
            groups.append(
                [
                    HeadSet(selector, None, k, seed, tuple(order[:k]))
                    for seed, order in draws
                    for k in spec["k"]
                ]
            )
            continue
        ranked = _ranked(heads, row["score"])
        for end in row["ends"]:
            order = ranked if end == "top" else ranked[::-1]
            groups.append([HeadSet(selector, end, k, None, tuple(order[:k])) for k in spec["k"]])
    return groups


def random_order(names: Sequence[str], seed: int) -> list[str]:
    """Return the heads in a seeded order.

    Random k are its first k, so the sets of a seed are nested and hang on nothing but the seed and
    the grid of heads.
    """
    order = np.random.default_rng(seed).permutation(len(names))
    return [names[index] for index in order]


def _grid(heads: pl.DataFrame) -> list[str]:
    """Return all heads as "layer-head", by layer and head."""
    grid = heads.select("layer", "head").unique().sort("layer", "head")
    return [f"{layer}-{head}" for layer, head in grid.iter_rows()]


def _ranked(heads: pl.DataFrame, score: str) -> list[str]:
    """Return the heads of a score, best first."""
    rows = heads.filter(pl.col("score") == score).sort("rank").select("layer", "head")
    return [f"{layer}-{head}" for layer, head in rows.iter_rows()]


def selection_table(spec: dict[str, Any], heads: pl.DataFrame) -> pl.DataFrame:
    """Return the selection: a row a condition of a task, with the key of its generations."""
    rows: list[tuple[Any, ...]] = []
    for task, task_spec in sorted(spec["tasks"].items()):
        for group in head_sets(spec, heads):
            # The unablated run is the same under every mode.
            unablated = not any(s.heads for s in group)
            how = ("none", "none") if unablated else (spec["mode"], spec["site"])
            key = generations_key(task_spec, how, group)
            rows += [
                (task, s.selector, s.end, s.k, s.seed, *how, list(s.heads), key) for s in group
            ]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def generations_key(
    task_spec: dict[str, Any], how: tuple[str, str], group: Sequence[HeadSet]
) -> str:
    """Return the store key of a file of generations: what is run, not who chose it.

    Two selectors that choose the same heads share one file.

    Parameters
    ----------
    task_spec
        See `common.layout.generations_spec`.
    how
        Mode and site of the intervention.
    group
        The conditions of the file.
    """
    mode, site = how
    sets = distinct_sets(group)
    return key_of({"task": task_spec, "mode": mode, "site": site, "head_sets": sets})


def distinct_sets(group: Sequence[HeadSet]) -> list[list[str]]:
    """Return the different sets of heads of a group, each sorted, in a fixed order."""
    return [list(heads) for heads in sorted({tuple(sort_heads(s.heads)) for s in group})]


def sort_heads(heads: Sequence[str]) -> list[str]:
    """Return "layer-head" names by layer and head."""
    return sorted(heads, key=parse_head)


def parse_head(name: str) -> tuple[int, int]:
    """Return (layer, head) of a name such as "12-3"."""
    layer, head = name.split("-")
    return int(layer), int(head)


def read_selection(path: str | Path) -> pl.DataFrame:
    """Read a selection table."""
    return read_table(path, kind="selection")


def conditions_of(selection: pl.DataFrame, task: str, key: str) -> Iterator[list[str]]:
    """Yield the sets of heads that a file of generations holds, each sorted."""
    rows = selection.filter((pl.col("task") == task) & (pl.col("key") == key))
    if rows.is_empty():
        raise UserError(f"generations {task}/{key}: the present selection does not name this key")
    groups = [HeadSet("", None, 0, None, tuple(heads)) for heads in rows["heads"].to_list()]
    yield from distinct_sets(groups)
