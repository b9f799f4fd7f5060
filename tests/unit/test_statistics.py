"""Bootstraps, Holm and dissociation against scipy, enumeration and hand-worked tables."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import stats

from workflow_scripts.ablation.statistics import (
    TEST_RESAMPLES,
    Dissociation,
    best_k,
    bootstrap_interval,
    dissociation,
    holm,
    paired_difference,
)


def sample(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).gamma(2.0, size=count)


def test_the_interval_of_a_mean_is_that_of_scipy() -> None:
    values = sample(60, 0)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=50_000, method="percentile", random_state=1
    ).confidence_interval
    # An end from 1000 resamples scatters by .085 standard errors; 100 seeds average that out.
    ours = np.mean([bootstrap_interval(values, seed) for seed in range(100)], axis=0)
    error = values.std() / np.sqrt(len(values))
    np.testing.assert_allclose(ours, theirs, atol=0.06 * error)


def test_the_interval_of_few_probes_is_that_of_all_their_resamples() -> None:
    values = np.array([0.0, 1.0, 3.0, 7.0])
    means = [np.mean(draw) for draw in product(values, repeat=4)]
    low, high = bootstrap_interval(values, 7)
    # All 256 resamples weigh the same; each end lies between neighbouring quantiles of them.
    assert np.quantile(means, 0.01) <= low <= np.quantile(means, 0.04)
    assert np.quantile(means, 0.96) <= high <= np.quantile(means, 0.99)


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert bootstrap_interval(np.full(9, 0.25), 1) == (0.25, 0.25)


def test_the_same_seed_gives_the_same_interval_and_another_one_another() -> None:
    values = sample(30, 3)
    assert bootstrap_interval(values, 5) == bootstrap_interval(values, 5)
    assert bootstrap_interval(values, 5) != bootstrap_interval(values, 6)


def test_a_paired_difference_has_the_interval_of_scipys_paired_bootstrap() -> None:
    reference = sample(50, 1)
    condition = reference + np.random.default_rng(2).normal(0.1, 0.2, 50)
    theirs = stats.bootstrap(
        (condition, reference),
        lambda a, b, axis: np.mean(a, axis) - np.mean(b, axis),
        paired=True,
        n_resamples=20_000,
        method="percentile",
        random_state=3,
        vectorized=True,
    ).confidence_interval
    found = paired_difference(condition, reference, 42)
    assert found.value == pytest.approx(condition.mean() - reference.mean())
    np.testing.assert_allclose((found.ci_low, found.ci_high), theirs, atol=0.003)


def test_pairing_removes_what_both_conditions_share() -> None:
    hardness = 10 * sample(40, 4)
    condition = hardness + np.random.default_rng(5).normal(0.3, 0.1, 40)
    paired = paired_difference(condition, hardness, 1)
    shuffled = paired_difference(condition, np.random.default_rng(6).permutation(hardness), 1)
    assert paired.p_value < 0.001 < 0.3 < shuffled.p_value


def test_the_p_value_of_few_probes_is_that_of_all_their_resamples() -> None:
    differences = np.array([2.0, 1.0, 1.0, -1.0])
    means = np.array([np.mean(draw) for draw in product(differences, repeat=4)])
    exact = 2 * (means <= 0).mean()
    found = paired_difference(differences, np.zeros(4), 11).p_value
    error = 2 * np.sqrt(exact / 2 * (1 - exact / 2) / TEST_RESAMPLES)
    assert found == pytest.approx(exact, abs=4 * error)


def test_the_p_value_agrees_with_the_t_test_on_many_probes() -> None:
    differences = np.random.default_rng(8).normal(0.12, 1.0, 400)
    exact = stats.ttest_1samp(differences, 0).pvalue
    found = paired_difference(differences, np.zeros(400), 1).p_value
    assert 0.005 < exact < 0.2
    assert found == pytest.approx(exact, rel=0.25)


def test_conditions_that_agree_on_every_probe_do_not_differ() -> None:
    values = sample(12, 9)
    found = paired_difference(values, values.copy(), 1)
    assert (found.value, found.ci_low, found.ci_high, found.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_the_sign_of_a_difference_does_not_change_its_p_value() -> None:
    a, b = sample(30, 10), sample(30, 11)
    assert paired_difference(a, b, 1).p_value == paired_difference(b, a, 1).p_value


def test_rounding_makes_no_ties_significant() -> None:
    # In tenths, 1 + 2 - 3 sums to 6e-17 or to 0, by the order of the draws.
    whole = np.array([1.0, 2.0, -3.0])
    in_tenths = paired_difference(whole / 10, np.zeros(3), 1)
    assert in_tenths.p_value == paired_difference(whole, np.zeros(3), 1).p_value


def test_a_p_value_is_never_zero() -> None:
    found = paired_difference(np.ones(20), np.zeros(20), 1)
    assert found.p_value == pytest.approx(2 / (TEST_RESAMPLES + 1))


@pytest.mark.parametrize("counts", [(3, 4), (0, 0)])
def test_conditions_over_different_probes_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not paired"):
        paired_difference(np.ones(counts[0]), np.ones(counts[1]), 1)


def test_holm_on_the_textbook_case() -> None:
    # Sorted .005 .01 .03 .04 times 4 3 2 1 = .02 .03 .06 .04; running maximum .02 .03 .06 .06.
    found = holm([0.01, 0.04, 0.03, 0.005])
    assert found == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_rejects_what_the_step_down_rule_rejects() -> None:
    p_values = np.random.default_rng(12).uniform(0, 0.1, 15)
    rejected = set()
    for step, place in enumerate(np.argsort(p_values)):
        if p_values[place] > 0.05 / (15 - step):
            break
        rejected.add(int(place))
    corrected = holm(p_values.tolist())
    assert {i for i, p in enumerate(corrected) if p is not None and p <= 0.05} == rejected
    assert rejected


def test_holm_leaves_undefined_tests_out() -> None:
    assert holm([None, 0.02, None, 0.03]) == pytest.approx([None, 0.04, None, 0.04])
    assert holm([0.7, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_dissociation_of_a_hand_worked_table() -> None:
    # Target .75 -> .25: two thirds lost. Control .5 -> .375: a quarter lost.
    target_baseline, target = np.repeat([1.0, 0.0], [6, 2]), np.repeat([1.0, 0.0], [2, 6])
    control_baseline, control = np.repeat([1.0, 0.0], [4, 4]), np.repeat([1.0, 0.0], [3, 5])
    found = dissociation(target_baseline, target, control_baseline, control, 1)
    assert found.value == pytest.approx(2 / 3 - 1 / 4)
    assert found.reason is None
    assert found.ci_low is not None
    assert found.ci_high is not None
    assert found.ci_low < found.value < found.ci_high


def test_the_interval_of_a_dissociation_is_that_of_resampling_each_task() -> None:
    rng = np.random.default_rng(13)
    target_baseline = rng.uniform(0.4, 1.0, 50)
    target = target_baseline * rng.uniform(0.0, 0.5, 50)
    control_baseline = rng.uniform(0.4, 1.0, 30)
    control = control_baseline * rng.uniform(0.8, 1.0, 30)
    scores = []
    for _ in range(10_000):
        a, b = rng.integers(50, size=50), rng.integers(30, size=30)
        r0, r, p0, p = (
            v.mean() for v in (target_baseline[a], target[a], control_baseline[b], control[b])
        )
        scores.append((r0 - r) / r0 - (p0 - p) / p0)
    found = [
        dissociation(target_baseline, target, control_baseline, control, seed)
        for seed in range(100)
    ]
    ends = np.mean([(one.ci_low, one.ci_high) for one in found], axis=0)
    np.testing.assert_allclose(ends, np.percentile(scores, [2.5, 97.5]), atol=0.1 * np.std(scores))


def test_tasks_of_the_same_size_are_resampled_apart() -> None:
    # Paired by mistake, the two losses would cancel in every resample.
    rng = np.random.default_rng(14)
    baseline, ablated = np.ones(40), rng.integers(2, size=40).astype(float)
    found = dissociation(baseline, ablated, baseline, ablated, 5)
    assert found.value == 0.0
    assert found.ci_low is not None
    assert found.ci_low < -0.05


@pytest.mark.parametrize("zero", ["target", "control"])
def test_a_baseline_of_zero_leaves_the_dissociation_undefined(zero: str) -> None:
    full, nothing = np.ones(5), np.zeros(5)
    parts = {"target": (full, full), "control": (full, full), zero: (nothing, full)}
    found = dissociation(*parts["target"], *parts["control"], seed=1)
    assert found == Dissociation(None, None, None, f"the baseline of the {zero} task is 0")


def test_resamples_without_a_baseline_are_left_out_of_the_interval() -> None:
    # One right answer in three probes: nearly a third of the resamples miss it.
    baseline, ablated = np.array([1.0, 0.0, 0.0]), np.zeros(3)
    control = np.ones(3)
    found = dissociation(baseline, ablated, control, control, 1)
    assert (found.value, found.ci_low, found.ci_high) == (1.0, 1.0, 1.0)


def test_k_star_is_the_k_of_the_largest_dissociation() -> None:
    scores = {10: 0.4, 1: 0.1, 5: 0.4, 20: None}
    assert best_k({k: Dissociation(value) for k, value in scores.items()}) == 5


def test_k_star_is_undefined_where_no_dissociation_is_defined() -> None:
    assert best_k({1: Dissociation(None, reason="x"), 5: Dissociation(None, reason="x")}) is None
    assert best_k({}) is None
