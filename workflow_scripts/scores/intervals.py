"""Percentile bootstrap over probes."""

from __future__ import annotations

import numpy as np

from workflow_scripts.scores.pooling import Floats, PerProbe, weighted_terms

RESAMPLES = 1000
LEVEL = 0.95


def resampled_heads(probes: PerProbe, pool: str, seed: int) -> Floats:
    """Return the value of each head in bootstrap resamples, shape (resample, layer, head).

    A resample draws as many probes as there are, with replacement; how often each probe is drawn
    is a row of a weight matrix, so that all resamples of all heads are one matrix product.

    Parameters
    ----------
    probes
        At least one.
    pool
        "steps" or "probes", as for the value itself.
    seed
        Of the draws; all scores of a run draw the same probes, so that what is taken from two of
        them over the same probes is paired.
    """
    count = len(probes.counts)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    return resampled_values(probes, pool, draws.astype(np.float64))


def resampled_values(probes: PerProbe, pool: str, weights: Floats) -> Floats:
    """Return the value of each head in given resamples, shape (resample, layer, head).

    `weights` says how often a resample draws each probe, (resample, probe).
    """
    numerator, denominator = weighted_terms(probes, pool)
    resampled: Floats = (weights @ numerator) / (weights @ denominator)[:, None]
    return resampled.reshape(-1, *probes.sums.shape[1:])


def percentile_interval(resampled: Floats) -> tuple[Floats, Floats]:
    """Return the ends of the percentile interval of values resampled along the first axis."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail), axis=0)
    return low, high
