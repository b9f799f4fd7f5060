"""Rank heads by value."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from workflow_scripts.scores.pooling import Floats


def rank_heads(values: Floats, seed: int) -> NDArray[np.int32]:
    """Return the rank of each head, 1 for the largest value.

    Parameters
    ----------
    values
        Finite, shape (layer, head).
    seed
        Equal values are ordered at random by it, never by layer: a score such as wu is 0 for most
        heads, and layer order would pass for a finding.

    Returns
    -------
    ndarray
        int32, the shape of `values`; a permutation of 1 to their number.
    """
    flat = values.ravel()
    shuffled = np.random.default_rng(seed).permutation(flat.size)
    order = np.lexsort((shuffled, -flat))
    ranks = np.empty(flat.size, np.int32)
    ranks[order] = np.arange(1, flat.size + 1)
    return ranks.reshape(values.shape)


def top_heads(ranking: pl.DataFrame, k: int) -> list[tuple[int, int]]:
    """Return the k best heads of a score table as (layer, head), best first."""
    return list(ranking.sort("rank").head(k).select("layer", "head").iter_rows())
