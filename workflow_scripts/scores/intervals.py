"""Percentile bootstrap over probes."""

from __future__ import annotations

import numpy as np

from workflow_scripts.scores.pooling import Floats, PerProbe, weighted_terms

RESAMPLES = 1000
LEVEL = 0.95


def bootstrap_interval(probes: PerProbe, pool: str, seed: int) -> tuple[Floats, Floats]:
    """Return the ends of a percentile interval per head.

    A resample draws as many probes as there are, with replacement; how often each probe is drawn
    is a row of a weight matrix, so that all resamples of all heads are one matrix product.

    Parameters
    ----------
    probes
        At least one.
    pool
        "steps" or "probes", as for the value itself.
    seed
        Of the draws; all scores of a run draw the same probes.

    Returns
    -------
    low, high
        float64, shape (layer, head).
    """
    numerator, denominator = weighted_terms(probes, pool)
    count = len(denominator)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    weights = draws.astype(np.float64)
    resampled = (weights @ numerator) / (weights @ denominator)[:, None]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail), axis=0)
    shape = probes.sums.shape[1:]
    return low.reshape(shape), high.reshape(shape)
