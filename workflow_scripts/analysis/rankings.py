"""How much two rankings of the same heads agree, and what chance alone would give.

Ranks are int, 1 for the best, a permutation of 1 to N in the last axis; leading axes broadcast.
"""

from __future__ import annotations

from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from workflow_scripts.scores.pooling import Floats

PERSISTENCE = 0.9
"""p of rank-biased overlap: its first 10 ranks carry 86 % of the weight."""

Array = NDArray[Any]


def jaccard(first: Array, second: Array, k: int) -> Floats:
    """Return the heads that both top k hold, over the heads that either holds."""
    shared = ((first <= k) & (second <= k)).sum(-1)
    overlap: Floats = shared / (2 * k - shared)
    return overlap


def expected_jaccard(n_heads: int, k: int) -> float:
    """Return the exact mean Jaccard index of two independent random k of the heads.

    The number of shared heads is hypergeometric: C(k, x) C(N - k, k - x) / C(N, k).
    """
    return sum(
        comb(k, x) * comb(n_heads - k, k - x) / comb(n_heads, k) * x / (2 * k - x)
        for x in range(k + 1)
    )


def rank_biased_overlap(first: Array, second: Array) -> Floats:
    """Return the extrapolated rank-biased overlap of two full rankings.

    Webber, Moffat, Zobel, "A similarity measure for indefinite rankings" (2010), equation 32, at the
    full depth N: (1 - p) sum_d p^(d-1) X_d / d + p^N X_N / N. There both hold all heads, X_N = N, so
    equal rankings give exactly 1.
    """
    n_heads = first.shape[-1]
    depth = np.arange(1, n_heads + 1)
    term = (1 - PERSISTENCE) * PERSISTENCE ** (depth - 1) / depth
    # A head counts in X_d from the larger of its two ranks on.
    from_rank_on = np.cumsum(term[::-1])[::-1]
    overlap: Floats = from_rank_on[np.maximum(first, second) - 1].sum(-1) + PERSISTENCE**n_heads
    return overlap


def expected_rank_biased_overlap(n_heads: int) -> float:
    """Return its exact mean over two independent random rankings, where X_d is d * d / N on average."""
    depth = np.arange(1, n_heads + 1)
    weights = (1 - PERSISTENCE) * PERSISTENCE ** (depth - 1)
    return float((weights * depth).sum() / n_heads + PERSISTENCE**n_heads)


def expected_groups(n_heads: int, group_size: int, k: int) -> float:
    """Return how many distinct groups k random heads fall into on average, exactly.

    A group is missed with probability C(N - size, k) / C(N, k).
    """
    missed = comb(n_heads - group_size, k) / comb(n_heads, k)
    return n_heads // group_size * (1 - missed)


def spearman(first: Floats, second: Floats) -> float:
    """Return Spearman's rho of two lists of values, equal ones at their mean rank; NaN if constant."""
    return float(stats.spearmanr(first, second).statistic) if _vary(first, second) else np.nan


def kendall(first: Floats, second: Floats) -> float:
    """Return Kendall's tau-b of two lists of values; NaN if one is constant."""
    return float(stats.kendalltau(first, second).statistic) if _vary(first, second) else np.nan


def _vary(*values: Floats) -> bool:
    return all(np.ptp(v) > 0 for v in values)
