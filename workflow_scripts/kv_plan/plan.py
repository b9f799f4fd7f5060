"""The KV plan: what each KV group is worth, what a budget keeps of it, and the bytes it saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from workflow_scripts.ablation.selection import HeadSet
from workflow_scripts.analysis import views
from workflow_scripts.kv_plan.cache import CacheShape
from workflow_scripts.scores.ranking import rank_heads

SELECTOR = "kv_plan"
"""Name of the conditions in which KV groups lose the needle."""


def rank_groups(scores: pl.DataFrame, seed: int) -> pl.DataFrame:
    """Rank the KV groups of a model.

    Parameters
    ----------
    scores
        The table of one score.
    seed
        Orders equal groups.

    Returns
    -------
    DataFrame
        model, score, layer, kv_group, value (mean of the score over the group's query heads), share
        (of the positive part of all groups' values: what it holds of the retrieval mass; null where
        no group is above zero) and rank (int32, 1 for the largest value), by rank.
    """
    groups = views.kv_groups(scores, [1])  # the mean is the same for every k
    value = groups["mean_value"].to_numpy()
    positive = value.clip(min=0)
    return groups.select(
        *("model", "score", "layer", "kv_group"),
        pl.Series("value", value),
        pl.Series("share", positive / (positive.sum() or np.nan), nan_to_null=True),
        pl.Series("rank", rank_heads(value, seed)),
    ).sort("rank")


def kept_groups(budget: int, n_groups: int) -> int:
    """Return how many KV groups a budget (in percent of them) keeps in full.

    Rounded, half to even; at least one is kept and one is compressed.
    """
    return min(max(round(budget / 100 * n_groups), 1), n_groups - 1)


def compared_groups(budget: int, n_groups: int) -> int:
    """Return how many of the best and of the worst groups are compared under a budget.

    As many on both sides: the fewer of the kept and of the compressed ones.
    """
    kept = kept_groups(budget, n_groups)
    return min(kept, n_groups - kept)


def heads_of(scores: pl.DataFrame, groups: pl.DataFrame) -> tuple[str, ...]:
    """Return the query heads of KV groups as "layer-head", by layer and head."""
    rows = scores.join(groups, on=["layer", "kv_group"], how="semi").sort("layer", "head")
    return tuple(f"{layer}-{head}" for layer, head in rows.select("layer", "head").iter_rows())


def blinded_by(
    scores: pl.DataFrame, ranked: pl.DataFrame, budget: int
) -> tuple[HeadSet, HeadSet, HeadSet]:
    """Return the conditions of a budget: which groups lose the needle.

    All that it compresses; of the groups that are compared, the worst; and as many of the best.
    """
    compressed = ranked.height - kept_groups(budget, ranked.height)
    compared = compared_groups(budget, ranked.height)
    return (
        _blinded(scores, ranked, "bottom", compressed),
        _blinded(scores, ranked, "bottom", compared),
        _blinded(scores, ranked, "top", compared),
    )


def _blinded(scores: pl.DataFrame, ranked: pl.DataFrame, end: str, count: int) -> HeadSet:
    """Return the condition in which the query heads of the best or worst groups lose the needle."""
    groups = ranked.head(count) if end == "top" else ranked.tail(count)
    heads = heads_of(scores, groups)
    return HeadSet(SELECTOR, end, len(heads), None, heads)


def conditions(scores: pl.DataFrame, seed: int, budgets: Sequence[int]) -> list[HeadSet]:
    """Return the conditions that the check of some budgets needs, each once."""
    ranked = rank_groups(scores, seed)
    needed = [
        condition for budget in sorted(budgets) for condition in blinded_by(scores, ranked, budget)
    ]
    return list(dict.fromkeys(needed))


def plan_table(
    ranked: pl.DataFrame,
    budgets: Sequence[int],
    cache: CacheShape,
    *,
    context_length: int,
    bytes_per_number: int,
    kept_tokens: int,
) -> pl.DataFrame:
    """Return the plan: a row a KV group and budget, by budget and rank.

    Parameters
    ----------
    ranked
        See `rank_groups`.
    budgets
        Shares of all KV groups that are kept in full, in percent.
    cache
        Of the model.
    context_length
        Tokens that the bytes are reckoned for.
    bytes_per_number
        Of the cache.
    kept_tokens
        Tokens that a compressed group keeps.

    Returns
    -------
    DataFrame
        The columns of `rank_groups`, then budget (int32), action ("keep" or "compress"), tokens
        (int64, cached in full: the context, or the layer's window if that is shorter), bytes_full
        (int64: 2 * head_dim * bytes_per_number * tokens, keys and values) and bytes_saved (int64: the
        same for the tokens beyond `kept_tokens` where the group is compressed, else 0).
    """
    per_token = 2 * cache.head_dim * bytes_per_number
    tokens = [cache.tokens(layer, context_length) for layer in ranked["layer"]]
    full = pl.col("tokens") * per_token
    saved = (pl.col("tokens") - kept_tokens).clip(0) * per_token
    parts = []
    for budget in sorted(budgets):
        keep = pl.col("rank") <= kept_groups(budget, ranked.height)
        parts.append(
            ranked.with_columns(
                pl.lit(budget, pl.Int32).alias("budget"),
                pl.when(keep).then(pl.lit("keep")).otherwise(pl.lit("compress")).alias("action"),
                pl.Series("tokens", tokens, pl.Int64),
            ).with_columns(
                full.alias("bytes_full"),
                pl.when(keep).then(0).otherwise(saved).alias("bytes_saved"),
            )
        )
    return pl.concat(parts)


def totals(plan: pl.DataFrame, budget: int) -> dict[str, Any]:
    """Return what a budget comes to: groups kept and compressed, retrieval mass kept, bytes."""
    rows = plan.filter(budget=budget)
    kept = rows.filter(action="keep")
    return {
        "n_kept": kept.height,
        "n_compressed": rows.height - kept.height,
        # The share is null for all groups where there is no retrieval mass.
        "share_kept": None if rows["share"].has_nulls() else kept["share"].sum(),
        "bytes_full": rows["bytes_full"].sum(),
        "bytes_saved": rows["bytes_saved"].sum(),
    }
