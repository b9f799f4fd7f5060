"""Which heads are ablated: the conditions of every task, and the keys of their generations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from workflow_scripts.common.artifacts import read_table
from workflow_scripts.common.digests import key_of
from workflow_scripts.common.errors import UserError
from workflow_scripts.scores.ranking import rank_heads

CONDITION: dict[str, Any] = {
    "selector": pl.String,
    "end": pl.String,
    "k": pl.Int32,
    "seed": pl.Int32,
    "mode": pl.String,
    "site": pl.String,
    "factor": pl.Float64,
}
"""Columns that tell a condition of a task from its others, in every table of ablations."""

SCHEMA: dict[str, Any] = {
    "task": pl.String,
    **CONDITION,
    "calibration": pl.String,
    "heads": pl.List(pl.String),
    "key": pl.String,
}


UNABLATED: dict[str, Any] = {
    "mode": "none",
    "site": "none",
    "factor": None,
    "calibration": None,
}
"""Intervention of a condition without heads: under every mode it is the same."""


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
        `selectors` and `k` of the config. A selector is one of

        - score, ends: the k best (top) or worst (bottom) heads of a score, or those with the
          smallest absolute value (smallest);
        - heads_file, ends: the same of a score read from a file, see `imported_score`;
        - score, above: all heads whose value exceeds a threshold, however many;
        - heads: a list of "layer-head" names, all at once;
        - union, difference: of the top k of two scores; their sets may be larger or smaller than k;
        - random, seeds: see `random_order`; with matched_to: see `matched_heads`.
    heads
        The heads table: every score's ranking.

    Returns
    -------
    list of lists of HeadSet
        One list for each file of generations: the k of a selector's end, or all seeds of random.

    Raises
    ------
    UserError
        If a k exceeds the number of heads, a head is not in the model, or no head is above a
        threshold.
    """
    grid = _grid(heads)
    if max(spec["k"]) > len(grid):
        raise UserError(
            f"ablation.k: {max(spec['k'])} is more than the {len(grid)} heads of {spec['model']}"
        )
    groups = [[HeadSet("none", None, 0, None, ())]]
    for selector, row in spec["selectors"].items():
        groups += _sets_of_selector(selector, row, spec, heads, grid)
    return groups


def _sets_of_selector(
    selector: str,
    row: dict[str, Any],
    spec: dict[str, Any],
    heads: pl.DataFrame,
    grid: Sequence[str],
) -> list[list[HeadSet]]:
    """Return the conditions of one selector, a list an end."""
    if "random" in row:
        return [_random_sets(selector, row, spec["k"], heads, grid)]
    if "heads" in row:
        _check_heads(row["heads"], grid, f"config: selectors.{selector}.heads")
        return [[HeadSet(selector, None, len(row["heads"]), None, tuple(row["heads"]))]]
    if "above" in row:
        chosen = _names(_rows(heads, row["score"]).filter(pl.col("value") > row["above"]))
        if not chosen:
            best = _rows(heads, row["score"])["value"][0]
            raise UserError(
                f"config: selectors.{selector}.above: no head of {row['score']} exceeds "
                f"{row['above']}; the best has {best:.4g}"
            )
        return [[HeadSet(selector, None, len(chosen), None, tuple(chosen))]]
    for operation in ("union", "difference"):
        if operation in row:
            first, second = (_names(_rows(heads, score)) for score in row[operation])
            combined = [(k, _combine(operation, first[:k], second[:k])) for k in spec["k"]]
            return [[HeadSet(selector, None, k, None, tuple(names)) for k, names in combined]]
    if "heads_file" in row:
        ranked = imported_score(row["heads_file"], grid, spec["seed"])
        if max(spec["k"]) > ranked.height:
            raise UserError(
                f"{row['heads_file']}: scores {ranked.height} heads, fewer than k = "
                f"{max(spec['k'])}; lower ablation.k or score more heads"
            )
    else:
        ranked = _rows(heads, row["score"])
    orders = {end: _order(ranked, end) for end in row["ends"]}
    return [
        [HeadSet(selector, end, k, None, tuple(order[:k])) for k in spec["k"]]
        for end, order in orders.items()
    ]


def _random_sets(
    selector: str,
    row: dict[str, Any],
    ks: Sequence[int],
    heads: pl.DataFrame,
    grid: Sequence[str],
) -> list[HeadSet]:
    """Return the conditions of random heads, of all seeds."""
    sets = []
    for seed in row["seeds"]:
        order = random_order(grid, seed)
        for k in ks:
            chosen = order[:k]
            if "matched_to" in row:
                chosen = matched_heads(_names(_rows(heads, row["matched_to"]))[:k], order)
            sets.append(HeadSet(selector, None, k, seed, tuple(chosen)))
    return sets


def random_order(names: Sequence[str], seed: int) -> list[str]:
    """Return the heads in a seeded order.

    Random k are its first k, so the sets of a seed are nested and hang on nothing but the seed and
    the grid of heads.
    """
    order = np.random.default_rng(seed).permutation(len(names))
    return [names[index] for index in order]


def matched_heads(chosen: Sequence[str], order: Sequence[str]) -> list[str]:
    """Return as many heads from the same layers: is it the heads that matter, or their layers?

    Parameters
    ----------
    chosen
        The heads to match.
    order
        All heads, in the seeded order in which they are drawn.

    Returns
    -------
    list of str
        For each layer the first heads of `order` that were not chosen; where too few are left
        (more than half of a layer was chosen), its first chosen ones fill up.
    """
    counts = Counter(parse_head(name)[0] for name in chosen)
    # A stable sort: within a layer the others keep their order and come before the chosen.
    drawn = sorted(order, key=lambda name: name in chosen)
    matched = []
    for name in drawn:
        layer = parse_head(name)[0]
        if counts[layer] > 0:
            counts[layer] -= 1
            matched.append(name)
    return matched


def imported_score(path: str | Path, grid: Sequence[str], seed: int) -> pl.DataFrame:
    """Read a score of heads from a JSON file: {"scores": {"layer-head": [values]}}.

    Parameters
    ----------
    path
        The file. Its list holds a value a probe, whose mean is the head's score; keys beside
        "scores", such as "meta", are ignored, and heads it leaves out are never chosen.
    grid
        All heads of the model.
    seed
        Orders equal scores.

    Returns
    -------
    DataFrame
        Columns layer, head, value, by rank.

    Raises
    ------
    UserError
        If the file cannot be read, or a head in it is not in the model or has no finite values.
    """
    try:
        scores = json.loads(Path(path).read_text(encoding="utf-8"))["scores"]
        values = {str(name): np.atleast_1d(np.asarray(v, np.float64)) for name, v in scores.items()}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; correct heads_file in the config") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise UserError(
            f'{path}: not a JSON file of the form {{"scores": {{"layer-head": [numbers]}}}}'
        ) from None
    _check_heads(list(values), grid, str(path))
    for name, numbers in values.items():
        if numbers.ndim != 1 or not numbers.size or not np.isfinite(numbers).all():
            raise UserError(f"{path}: head {name} needs a list of one or more finite numbers")
    # By layer and head first, so that the order of the file does not matter to ties.
    names = sort_heads(list(values))
    means = np.array([values[name].mean() for name in names])
    columns = {
        "layer": [parse_head(name)[0] for name in names],
        "head": [parse_head(name)[1] for name in names],
        "value": means,
        "rank": rank_heads(means, seed),
    }
    return pl.DataFrame(columns).sort("rank")


def _check_heads(names: Sequence[str], grid: Sequence[str], where: str) -> None:
    """Raise UserError unless the names are one or more different heads of the model."""
    if not names:
        raise UserError(f"{where}: names no head")
    known = set(grid)
    for name in names:
        if name not in known:
            raise UserError(
                f"{where}: the model has no head '{name}'; heads are named layer-head, from "
                f"{grid[0]} to {grid[-1]}"
            )
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UserError(f"{where}: head {repeated[0]} is named twice")


def _combine(operation: str, first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Return the union or difference of two lists of heads, in the order of the first."""
    if operation == "union":
        return list(dict.fromkeys((*first, *second)))
    return [name for name in first if name not in second]


def _order(ranked: pl.DataFrame, end: str) -> list[str]:
    """Return the heads in the order in which an end takes them; ties by rank."""
    if end == "smallest":
        return _names(ranked.sort(pl.col("value").abs(), maintain_order=True))
    names = _names(ranked)
    return names if end == "top" else names[::-1]


def _grid(heads: pl.DataFrame) -> list[str]:
    """Return all heads as "layer-head", by layer and head."""
    return _names(heads.select("layer", "head").unique().sort("layer", "head"))


def _rows(heads: pl.DataFrame, score: str) -> pl.DataFrame:
    """Return the rows of a score, best first."""
    return heads.filter(pl.col("score") == score).sort("rank")


def _names(rows: pl.DataFrame) -> list[str]:
    """Return heads as "layer-head", in the order of the rows."""
    return [f"{layer}-{head}" for layer, head in rows.select("layer", "head").iter_rows()]


def selection_table(spec: dict[str, Any], heads: pl.DataFrame) -> pl.DataFrame:
    """Return the selection of the config's selectors, see `head_sets` and `conditions_table`."""
    return conditions_table(head_sets(spec, heads), spec["tasks"], spec["interventions"])


def conditions_table(
    groups: Sequence[Sequence[HeadSet]],
    tasks: dict[str, Any],
    interventions: dict[str, dict[str, Any]],
) -> pl.DataFrame:
    """Return a selection: a row a condition of a task, with the key of its generations.

    Parameters
    ----------
    groups
        The conditions, a list for each file of generations.
    tasks
        By task, see `common.layout.generations_spec`.
    interventions
        By selector, see `common.layout.intervention_of`.
    """
    rows: list[tuple[Any, ...]] = []
    for task, task_spec in sorted(tasks.items()):
        for group in groups:
            ablated = any(s.heads for s in group)
            how = interventions[group[0].selector] if ablated else UNABLATED
            key = generations_key(task_spec, how, group)
            rows += [
                (
                    task,
                    s.selector,
                    s.end,
                    s.k,
                    s.seed,
                    *(how[name] for name in UNABLATED),
                    list(s.heads),
                    key,
                )
                for s in group
            ]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def generations_key(
    task_spec: dict[str, Any], how: dict[str, Any], group: Sequence[HeadSet]
) -> str:
    """Return the store key of a file of generations: what is run, not who chose it.

    Two selectors that choose the same heads share one file.

    Parameters
    ----------
    task_spec
        See `common.layout.generations_spec`.
    how
        Mode, site and factor of the intervention, and the key of its calibration means; by the names
        of `UNABLATED`.
    group
        The conditions of the file.
    """
    return key_of({"task": task_spec, "head_sets": distinct_sets(group), **how})


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


def read_selection(path: str | Path, spec: Any = None) -> pl.DataFrame:
    """Read a selection table, made for a spec if one is given."""
    return read_table(path, kind="selection", spec=spec)


def conditions_of(selection: pl.DataFrame, task: str, key: str) -> Iterator[list[str]]:
    """Yield the sets of heads that a file of generations holds, each sorted."""
    rows = selection.filter((pl.col("task") == task) & (pl.col("key") == key))
    if rows.is_empty():
        raise UserError(f"generations {task}/{key}: the present selection does not name this key")
    groups = [HeadSet("", None, 0, None, tuple(heads)) for heads in rows["heads"].to_list()]
    yield from distinct_sets(groups)
