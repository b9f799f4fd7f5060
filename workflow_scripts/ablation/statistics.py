"""What an ablation's effect can be told from: paired bootstraps over probes, Holm, dissociation.

Two conditions are compared over the same probes, so a resample draws probes and keeps each probe's
pair together: what makes a probe hard is in both and cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from workflow_scripts.scores.intervals import RESAMPLES, percentile_interval

Floats = NDArray[np.float64]

TEST_RESAMPLES = 10_000
"""Resamples of a p value. The least it can be is 2 / 10001: with 1000, no p value could stay below
.05 after Holm's correction over 25 conditions."""


@dataclass(frozen=True)
class Difference:
    """The mean difference of two conditions over the same probes.

    Attributes
    ----------
    value
        Mean of condition minus reference.
    ci_low, ci_high
        Percentile interval of it.
    p_value
        Two-sided, by inverting the percentile interval; 1 where no probe differs.
    """

    value: float
    ci_low: float
    ci_high: float
    p_value: float


@dataclass(frozen=True)
class Dissociation:
    """How much more an ablation costs on the target task than on the control task.

    Attributes
    ----------
    value, ci_low, ci_high
        DS(k) and its percentile interval; None where it is undefined.
    reason
        Why it is undefined; None where it is not.
    """

    value: float | None
    ci_low: float | None = None
    ci_high: float | None = None
    reason: str | None = None


@lru_cache(maxsize=8)
def _draws(count: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """Return indices of probes, shape (resamples, count).

    They hang on the arguments alone, so conditions over the same probes share their resamples.
    """
    return np.random.default_rng(seed).integers(count, size=(resamples, count))


def resampled_means(values: Floats, resamples: int, seed: int) -> Floats:
    """Return the mean of each bootstrap resample of a condition's probes, shape (resamples,)."""
    means: Floats = values[_draws(len(values), resamples, seed)].mean(1)
    return means


def _interval_of(resampled: Floats) -> tuple[float, float]:
    low, high = percentile_interval(resampled)
    return float(low), float(high)


def bootstrap_interval(values: Floats, seed: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of a mean over probes."""
    return _interval_of(resampled_means(values, RESAMPLES, seed))


def relative_to(
    baseline: Floats, values: Floats, seed: int
) -> tuple[float | None, float | None, float | None]:
    """Return a condition's mean over that of the unablated run, and its 95 % interval.

    Probes are resampled with both values together. Resamples whose baseline is 0 define no ratio and
    are left out; where the baseline itself is 0, all three are None.
    """
    if baseline.mean() == 0:
        return None, None, None
    below, above = (resampled_means(v, RESAMPLES, seed) for v in (baseline, values))
    low, high = _interval_of(above[below != 0] / below[below != 0])
    return float(values.mean() / baseline.mean()), low, high


def paired_difference(condition: Floats, reference: Floats, seed: int) -> Difference:
    """Compare a condition with a reference over the same probes.

    Parameters
    ----------
    condition, reference
        A value a probe, in the same order of probes. For random heads, the reference is each probe's
        mean over the seeds.
    seed
        Of the bootstrap.

    Raises
    ------
    ValueError
        If they differ in length or are empty.
    """
    if condition.shape != reference.shape or not condition.size:
        raise ValueError(f"not paired: {condition.shape} and {reference.shape} probes")
    differences = condition - reference
    resampled = resampled_means(differences, TEST_RESAMPLES, seed)
    # Means of the same numbers in another order differ in the last bit; such a zero is a tie.
    resampled[np.abs(resampled) < 1e-12] = 0.0
    # The smaller tail, counted with one more resample that is as extreme as the data, so that p is
    # never 0 (Davison and Hinkley 1997, chapter 4).
    tail = min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))
    p_value = min(1.0, 2 * (tail + 1) / (TEST_RESAMPLES + 1))
    return Difference(float(differences.mean()), *_interval_of(resampled), p_value)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p values corrected for their number by Holm's step-down procedure.

    An undefined p value (None) stays so and does not count as a test.
    """
    tests = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for done, (p, place) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - done) * p))
        corrected[place] = largest
    return corrected


def dissociation(
    target_baseline: Floats,
    target: Floats,
    control_baseline: Floats,
    control: Floats,
    seed: int,
) -> Dissociation:
    """Return DS(k) = (R0 - R(k)) / R0 - (P0 - P(k)) / P0 (method, section 4).

    R is the mean over the target task's probes, P over the control task's; 0 means unablated.

    Parameters
    ----------
    target_baseline, target
        A value a probe of the target task, unablated and ablated, in the same order.
    control_baseline, control
        The same of the control task, whose probes are others.
    seed
        Of the bootstrap. Each task's probes are resampled by themselves, unablated and ablated
        together. Resamples in which a baseline is 0 define no score and are left out.

    Returns
    -------
    Dissociation
        Positive where the target task suffers more. Undefined, with the reason, where a baseline
        is 0: nothing can be lost there.
    """
    for name, baseline in (("target", target_baseline), ("control", control_baseline)):
        if baseline.mean() == 0:
            return Dissociation(None, reason=f"the baseline of the {name} task is 0")
    # The control's draws have a seed of their own: two tasks of equal size are not paired.
    parts = [
        (target_baseline, target, seed),
        (control_baseline, control, seed + 1),
    ]
    lost, resampled_lost = [], []
    for baseline, ablated, part_seed in parts:
        lost.append(1 - ablated.mean() / baseline.mean())
        base, after = (resampled_means(v, RESAMPLES, part_seed) for v in (baseline, ablated))
        defined = base != 0
        resampled_lost.append(
            1 - np.divide(after, base, out=np.full(RESAMPLES, np.nan), where=defined)
        )
    scores = resampled_lost[0] - resampled_lost[1]
    low, high = _interval_of(scores[~np.isnan(scores)])
    return Dissociation(float(lost[0] - lost[1]), low, high)


def best_k(scores: Mapping[int, Dissociation]) -> int | None:
    """Return k*, the k with the largest DS(k), the smallest of equals; None if none is defined."""
    defined = [(-score.value, k) for k, score in scores.items() if score.value is not None]
    return min(defined)[1] if defined else None
