"""Tables over heads.parquet: where the best heads lie, how their values spread, who agrees.

Each function takes the heads table of one model (and the sizes of the top k) and returns a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from workflow_scripts.analysis.rankings import expected_groups

_OF_SCORE = ("model", "score")


def layers(heads: pl.DataFrame, ks: Sequence[int]) -> pl.DataFrame:
    """Count the top k by layer.

    Returns
    -------
    DataFrame
        model, score, k, layer (all, empty ones too), n_top (uint32), share (of the k); and, the same
        for all layers of a score and k, layer_q25, layer_median, layer_q75: quartiles of the top k's
        layers, interpolated linearly.
    """
    chosen = pl.col("rank") <= pl.col("k")
    top_layers = pl.col("layer").filter(chosen)
    within = ("model", "score", "k")
    counts = _with_k(heads, ks).group_by(*within, "layer").agg(chosen.sum().alias("n_top"))
    quartiles = (
        _with_k(heads, ks)
        .group_by(within)
        .agg(
            top_layers.quantile(q, "linear").alias(f"layer_{name}")
            for q, name in ((0.25, "q25"), (0.5, "median"), (0.75, "q75"))
        )
    )
    share = (pl.col("n_top") / pl.col("k")).alias("share")
    return counts.with_columns(share).join(quartiles, on=within).sort(*within, "layer")


def kv_groups(heads: pl.DataFrame, ks: Sequence[int]) -> pl.DataFrame:
    """Look at KV groups, which a cache keeps or drops as a whole.

    Returns
    -------
    DataFrame
        model, score, k, layer, kv_group, mean_value (over the group's query heads), n_top (uint32,
        its heads in the top k); and, the same for all groups of a score and k, groups_covered
        (uint32, groups with a head in the top k) and groups_expected (its exact mean over random k).
    """
    chosen = pl.col("rank") <= pl.col("k")
    within, group = ("model", "score", "k"), ("layer", "kv_group")
    table = (
        _with_k(heads, ks)
        .group_by(*within, *group)
        .agg(pl.col("value").mean().alias("mean_value"), chosen.sum().alias("n_top"))
    )
    covered = (pl.col("n_top") > 0).sum().over(within).alias("groups_covered")
    n_heads = heads.select("layer", "head").n_unique()
    size = n_heads // heads.select(group).n_unique()
    expected = pl.DataFrame(
        {"k": list(ks), "groups_expected": [expected_groups(n_heads, size, k) for k in ks]},
        schema={"k": pl.Int32, "groups_expected": pl.Float64},
    )
    return table.with_columns(covered).join(expected, on="k").sort(*within, *group)


def distribution(heads: pl.DataFrame) -> pl.DataFrame:
    """Summarise the values of each score.

    Returns
    -------
    DataFrame
        model, score, n_heads (uint32), n_probes, mean, std (sample), min, q05, q25, median, q75,
        q95, max (linear), share_above and share_below: heads whose 95 % interval lies above or below
        zero.
    """
    value = pl.col("value")
    quantiles = (("q05", 0.05), ("q25", 0.25), ("median", 0.5), ("q75", 0.75), ("q95", 0.95))
    return (
        heads.group_by(_OF_SCORE)
        .agg(
            pl.len().alias("n_heads"),
            pl.col("n_probes").first(),
            value.mean().alias("mean"),
            value.std().alias("std"),
            value.min().alias("min"),
            *(value.quantile(q, "linear").alias(name) for name, q in quantiles),
            value.max().alias("max"),
            (pl.col("ci_low") > 0).mean().alias("share_above"),
            (pl.col("ci_high") < 0).mean().alias("share_below"),
        )
        .sort(_OF_SCORE)
    )


def specificity(heads: pl.DataFrame, literal: str, nonliteral: str) -> pl.DataFrame:
    """Compare each head's rank under a literal and under a non-literal score.

    Returns
    -------
    DataFrame
        model, layer, head, kv_group, literal, nonliteral (names of the scores), value_literal,
        value_nonliteral, rank_literal, rank_nonliteral (int32), rank_gain (int32): ranks that the
        head gains from literal to non-literal; by rank_nonliteral.
    """
    keys = ("model", "layer", "head", "kv_group")
    one, other = (
        heads.filter(pl.col("score") == score).select(
            *keys, pl.col("value").alias(f"value_{kind}"), pl.col("rank").alias(f"rank_{kind}")
        )
        for score, kind in ((literal, "literal"), (nonliteral, "nonliteral"))
    )
    return (
        one.join(other, on=keys)
        .select(
            *keys,
            pl.lit(literal).alias("literal"),
            pl.lit(nonliteral).alias("nonliteral"),
            "value_literal",
            "value_nonliteral",
            "rank_literal",
            "rank_nonliteral",
            (pl.col("rank_literal") - pl.col("rank_nonliteral")).alias("rank_gain"),
        )
        .sort("rank_nonliteral")
    )


def consensus(heads: pl.DataFrame, ks: Sequence[int]) -> pl.DataFrame:
    """Count under how many scores each head is among the top k.

    Returns
    -------
    DataFrame
        model, k, layer, head, kv_group, n_top (uint32, scores whose top k holds the head), n_scores
        (uint32), mean_rank (over all scores); by k, most scores first, then mean_rank.
    """
    keys = ("model", "k", "layer", "head", "kv_group")
    return (
        _with_k(heads, ks)
        .group_by(keys)
        .agg(
            (pl.col("rank") <= pl.col("k")).sum().alias("n_top"),
            pl.len().alias("n_scores"),
            pl.col("rank").mean().alias("mean_rank"),
        )
        .sort("k", "n_top", "mean_rank", "layer", "head", descending=[False, True, *[False] * 3])
    )


def _with_k(heads: pl.DataFrame, ks: Sequence[int]) -> pl.DataFrame:
    """Repeat the table for every k."""
    return heads.join(pl.DataFrame({"k": list(ks)}, schema={"k": pl.Int32}), how="cross")
