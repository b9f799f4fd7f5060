"""Pairs of scores compared over the heads they rank, with intervals from resampled probes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl

from workflow_scripts.analysis.per_probe import ProbeScores
from workflow_scripts.analysis.rankings import (
    expected_jaccard,
    expected_rank_biased_overlap,
    jaccard,
    kendall,
    rank_biased_overlap,
    spearman,
)
from workflow_scripts.common.errors import UserError
from workflow_scripts.scores.intervals import RESAMPLES, percentile_interval, resampled_values
from workflow_scripts.scores.pooling import Floats, pool_heads
from workflow_scripts.scores.ranking import rank_heads

SCHEMA: dict[str, Any] = {
    "model": pl.String,
    "score_a": pl.String,
    "score_b": pl.String,
    "measure": pl.String,
    "k": pl.Int32,
    "value": pl.Float64,
    "ci_low": pl.Float64,
    "ci_high": pl.Float64,
    "chance": pl.Float64,
    "n_probes_a": pl.Int32,
    "n_probes_b": pl.Int32,
    "n_shared": pl.Int32,
}

Ids = Sequence[tuple[str, str]]


def paired_weights(first: Ids, second: Ids, seed: int) -> tuple[Floats, Floats]:
    """Return how often each resample draws each probe of two scores, (resample, probe) each.

    Probes that both scores have are drawn together, once for both; those of one score alone are
    drawn among themselves. So the pairing is kept and every resample has as many probes as there are.
    """
    random = np.random.default_rng(seed)
    weights = [np.zeros((RESAMPLES, len(ids))) for ids in (first, second)]
    places = [{probe: place for place, probe in enumerate(ids)} for ids in (first, second)]
    shared = places[0].keys() & places[1].keys()
    for stratum in (shared, places[0].keys() - shared, places[1].keys() - shared):
        if not stratum:
            continue
        members, count = sorted(stratum), len(stratum)
        draws = random.multinomial(count, np.full(count, 1 / count), RESAMPLES)
        for weight, place in zip(weights, places, strict=True):
            if members[0] in place:
                weight[:, [place[probe] for probe in members]] = draws
    return weights[0], weights[1]


def compare_scores(
    scores: Sequence[ProbeScores],
    pairs: Sequence[Sequence[str]],
    measures: Sequence[str],
    ks: Sequence[int],
    seed: int,
) -> pl.DataFrame:
    """Compare pairs of scores.

    Parameters
    ----------
    scores
        All that the pairs name.
    pairs
        Pairs of names.
    measures
        Of "jaccard" (of the top k, a row a k), "rbo" (rank-biased overlap), "spearman", "kendall".
    ks
        Sizes of the top k.
    seed
        Of ties and draws.

    Returns
    -------
    DataFrame
        The columns of `SCHEMA`: a row a pair, measure and k. value, its 95 % percentile bootstrap
        interval over probes, and chance, the exact mean over independent random rankings. k is null
        where it means nothing; value is null where a score is the same for all heads. Overlap is
        not a mean: its interval shows how it varies with the probes, and may lie below the value,
        because resampling adds noise to both rankings.

    Raises
    ------
    UserError
        If a k exceeds the number of heads.
    """
    by_name = {score.score: score for score in scores}
    n_heads = scores[0].probes.sums[0].size
    check_k(ks, n_heads)
    rows: list[tuple[Any, ...]] = []
    for names in pairs:
        first, second = (by_name[name] for name in names)
        # The observed values stand in front of the resampled ones.
        weights = paired_weights(first.ids, second.ids, seed)
        values = [
            np.concatenate(
                [pool_heads(s.probes, s.pool)[None], resampled_values(s.probes, s.pool, w)]
            ).reshape(-1, n_heads)
            for s, w in zip((first, second), weights, strict=True)
        ]
        counts = (len(first.ids), len(second.ids), len(set(first.ids) & set(second.ids)))
        for measure, k, chance, found in _measured(values, measures, ks, seed):
            rows.append((first.model, *names, measure, k, *_summary(found), chance, *counts))
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def check_k(ks: Sequence[int], n_heads: int) -> None:
    """Raise UserError if a k exceeds the number of heads."""
    if max(ks) > n_heads:
        raise UserError(
            f"config: analysis.k (ablation.k where left out): {max(ks)} is more than the model's "
            f"{n_heads} heads; lower it"
        )


def _measured(
    values: Sequence[Floats], measures: Sequence[str], ks: Sequence[int], seed: int
) -> Iterator[tuple[str, int | None, float, Floats]]:
    """Yield measure, k, chance, and the measure of each row of two arrays (row, head)."""
    first, second = values
    n_heads = first.shape[1]
    ranks = [np.stack([rank_heads(row, seed) for row in rows]) for rows in values]
    correlations: dict[str, Callable[[Floats, Floats], float]] = {
        "spearman": spearman,
        "kendall": kendall,
    }
    for measure in measures:
        if measure == "jaccard":
            for k in ks:
                yield measure, k, expected_jaccard(n_heads, k), jaccard(ranks[0], ranks[1], k)
        elif measure == "rbo":
            chance = expected_rank_biased_overlap(n_heads)
            yield measure, None, chance, rank_biased_overlap(ranks[0], ranks[1])
        else:
            correlate = correlations[measure]
            found = [correlate(a, b) for a, b in zip(first, second, strict=True)]
            yield measure, None, 0.0, np.array(found)


def _summary(found: Floats) -> tuple[float | None, float | None, float | None]:
    """Return the observed value (in front) and the percentile interval of the resampled ones."""
    defined = found[1:][~np.isnan(found[1:])]
    if np.isnan(found[0]) or not defined.size:
        return None, None, None
    low, high = percentile_interval(defined)
    return float(found[0]), float(low), float(high)
