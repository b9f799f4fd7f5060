"""Make head scores of a dataset's activation shards."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.script import log, run_script
from workflow_scripts.common.shards import open_shard
from workflow_scripts.scores.causal import patching_effects
from workflow_scripts.scores.detectors import DETECTORS
from workflow_scripts.scores.formulas import evaluate
from workflow_scripts.scores.intervals import percentile_interval, resampled_heads
from workflow_scripts.scores.permutation import SIGNIFICANCE, PermutationFilter
from workflow_scripts.scores.pooling import (
    Floats,
    PerProbe,
    Values,
    choose,
    join,
    per_step,
    pool_heads,
    sum_by_probe,
)
from workflow_scripts.scores.ranking import rank_heads
from workflow_scripts.scores.reductions import NEED_NEEDLE, Rows
from workflow_scripts.scores.settings import ScoreSettings, parse_score

BLOCK = 1 << 21
"""Values of a column that a formula is evaluated on at once."""


@dataclass(frozen=True)
class ShardScores:
    """What the shards of a dataset give; P probes.

    Attributes
    ----------
    probes
        Per-probe sums.
    probe_ids
        Of the P probes.
    counts
        Probes by status, scored or not.
    group_size
        Query heads of a KV group.
    """

    probes: PerProbe
    probe_ids: list[str]
    counts: dict[str, int]
    group_size: int


@dataclass(frozen=True)
class HeadValues:
    """A score of every head; L layers, H heads.

    Attributes
    ----------
    value
        Shape (L, H).
    interval
        Lower and upper ends, each (L, H).
    n_probes, n_steps
        What the values were made from.
    counts
        Probes by status, scored or not.
    group_size
        Query heads of a KV group.
    """

    value: Floats
    interval: tuple[Floats, Floats]
    n_probes: int
    n_steps: int
    counts: dict[str, int]
    group_size: int


def formula_values(rows: Rows, settings: ScoreSettings) -> Values:
    """Evaluate a formula on every row, block by block so that memory stays bounded."""
    assert settings.formula is not None
    columns = {name: rows.column(name) for name in settings.columns}
    values = np.empty((len(rows), *rows.shape))
    size = max(1, BLOCK // values[0].size)
    for start in range(0, len(rows), size):
        block = {name: column[start : start + size] for name, column in columns.items()}
        values[start : start + size] = evaluate(settings.formula, block)
    return per_step(rows.probe, values)


def score_shards(
    shards: Iterable[str | Path], settings: ScoreSettings, *, spec: Any = None, seed: int = 42
) -> ShardScores:
    """Compute a score from shards, holding one at a time.

    Parameters
    ----------
    shards
        All shards of the dataset, in order.
    settings
        The score.
    spec
        What the shards must have been made for; None accepts any.
    seed
        Of the permutation filter.

    Raises
    ------
    UserError
        If a shard is not the one expected, a value is not finite, or no probe passes the gate.
    """
    detector = DETECTORS[settings.detector] if settings.detector else None
    needle = detector is not None or not NEED_NEEDLE.isdisjoint(settings.columns)
    shuffles = None
    if settings.permutations and detector is not None and detector.share is not None:
        shuffles = PermutationFilter(detector.share, settings.permutations, seed)
    parts, ids, counts, group_size = [], [], Counter[str](), 1
    for path in shards:
        with open_shard(path, spec=spec) as shard:
            group_size = shard.n_heads // shard.n_kv_heads
            counts.update(probe["status"] for probe in shard.probes)
            rows = Rows(
                shard,
                steps=settings.steps,
                gate=settings.gate,
                needle=needle,
                off=settings.off,
                direction=settings.direction,
            )
            if len(rows) == 0:
                continue
            found = detector.compute(rows) if detector else formula_values(rows, settings)
            _refuse_not_finite(settings, found, shard.probes)
            parts.append(sum_by_probe(found))
            ids += [shard.probes[index]["probe_id"] for index in np.unique(found.probe)]
            if shuffles is not None:
                shuffles.add(rows)
    if not ids:
        raise UserError(_nothing_to_rank(settings, counts))
    probes = join(parts)
    if shuffles is not None:
        probes.sums[:, shuffles.p_values() > SIGNIFICANCE] = 0
    return ShardScores(probes, ids, dict(sorted(counts.items())), group_size)


def head_values(settings: ScoreSettings, scores: ShardScores, seed: int) -> HeadValues:
    """Pool a score over its probes, with a bootstrap interval over them."""
    resampled = resampled_heads(scores.probes, settings.pool, seed)
    return HeadValues(
        pool_heads(scores.probes, settings.pool),
        percentile_interval(resampled),
        n_probes=len(scores.probe_ids),
        n_steps=int(scores.probes.steps.sum()),
        counts=scores.counts,
        group_size=scores.group_size,
    )


def pair_probes(
    name: str, terms: Sequence[str], ids: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[int]]]:
    """Return the probes that count in both terms of a difference, and their places in each.

    Parameters
    ----------
    name, terms
        The difference, and the two scores that it is taken of.
    ids
        Probe ids of each term.

    Raises
    ------
    UserError
        If no probe counts in both.
    """
    places = [{probe: place for place, probe in enumerate(known)} for known in ids]
    paired = [probe for probe in ids[0] if probe in places[1]]
    if not paired:
        raise UserError(
            f"scores.{name}: no probe counts in both {terms[0]} and {terms[1]}; take the "
            "difference of scores over datasets of the same needles, haystacks, lengths and depths"
        )
    return paired, [[place[probe] for probe in paired] for place in places]


def difference(
    name: str,
    first: tuple[ScoreSettings, ShardScores],
    second: tuple[ScoreSettings, ShardScores],
    seed: int,
) -> HeadValues:
    """Subtract a score from another over the probes, named alike, that count in both.

    Each is pooled in its own way; the interval resamples pairs. `n_steps` counts the steps of both.

    Raises
    ------
    UserError
        If no probe counts in both.
    """
    ids = [scores.probe_ids for _, scores in (first, second)]
    paired, places = pair_probes(name, (first[0].name, second[0].name), ids)
    values, resampled, steps = [], [], 0
    for (settings, scores), place in zip((first, second), places, strict=True):
        probes = choose(scores.probes, place)
        values.append(pool_heads(probes, settings.pool))
        resampled.append(resampled_heads(probes, settings.pool, seed))
        steps += int(probes.steps.sum())
    return HeadValues(
        values[0] - values[1],
        percentile_interval(resampled[0] - resampled[1]),
        n_probes=len(paired),
        n_steps=steps,
        counts={"paired": len(paired), "unpaired": len(set(ids[0]) ^ set(ids[1]))},
        group_size=first[1].group_size,
    )


def head_table(model: str, name: str, values: HeadValues, seed: int) -> pl.DataFrame:
    """Return the table of a score: a row a head, by layer and head, with interval and rank."""
    layer, head = np.indices(values.value.shape, dtype=np.int32)
    low, high = values.interval
    return pl.DataFrame(
        {
            "layer": layer.ravel(),
            "head": head.ravel(),
            "kv_group": (head // values.group_size).astype(np.int32).ravel(),
            "value": values.value.ravel(),
            "ci_low": low.ravel(),
            "ci_high": high.ravel(),
            "rank": rank_heads(values.value, seed).ravel(),
        }
    ).select(
        pl.lit(model).alias("model"),
        pl.lit(name).alias("score"),
        pl.col("layer", "head", "kv_group", "value", "ci_low", "ci_high"),
        pl.lit(values.n_probes, pl.Int32).alias("n_probes"),
        pl.lit(values.n_steps, pl.Int32).alias("n_steps"),
        pl.col("rank"),
    )


def _refuse_not_finite(
    settings: ScoreSettings, found: Values, probes: list[dict[str, Any]]
) -> None:
    bad = ~np.isfinite(found.values)
    if bad.any():
        row, layer, head = (int(index[0]) for index in np.nonzero(bad))
        value = found.values[row, layer, head]
        raise UserError(
            f"scores.{settings.name}: value {value} at layer {layer}, head {head}, probe "
            f"{probes[found.probe[row]]['probe_id']}; guard divisions, logarithms and roots"
        )


def _nothing_to_rank(settings: ScoreSettings, counts: Counter[str]) -> str:
    by_status = ", ".join(f"{status} {count}" for status, count in sorted(counts.items()))
    return (
        f"scores.{settings.name}: nothing to rank, no probe of dataset {settings.dataset} has "
        f"{settings.steps} steps under gate '{settings.gate}' ({by_status or 'no probes'}); "
        "use more or easier probes, or another gate"
    )


def read_evidence(spec: dict[str, Any], paths: list[str]) -> tuple[ScoreSettings, ShardScores]:
    """Compute a score, but no difference, from its shards or its patching effects.

    Parameters
    ----------
    spec
        See `common.layout.score_spec`.
    paths
        All its shards, or its one table of effects.
    """
    settings = parse_score(spec["score"], spec["row"])
    if "patching" in spec:
        probes, ids, group = patching_effects(
            paths[0], spec["row"]["metric"], spec["patching"]["spec"]
        )
        scores = ShardScores(probes, ids, {"patched": len(ids)}, group)
    else:
        scores = score_shards(paths, settings, spec=spec["activations"]["spec"], seed=spec["seed"])
    log.info(
        "score %s: %d probes; statuses %s", settings.name, len(scores.probe_ids), scores.counts
    )
    return settings, scores


def files_of(spec: dict[str, Any], paths: list[str]) -> list[str]:
    """Return the files of one of the two scores of a difference: their paths hold its key."""
    source = spec["patching"] if "patching" in spec else spec["activations"]
    return [path for path in paths if source["key"] in path]


def main(snakemake: Any) -> None:
    """Write one score's table."""
    spec = json.loads(snakemake.params.spec)
    name, seed, paths = spec["score"], spec["seed"], list(snakemake.input.evidence)
    if "terms" in spec:
        first, second = (read_evidence(term, files_of(term, paths)) for term in spec["terms"])
        values = difference(name, first, second, seed)
        log.info("score %s: probes %s", name, values.counts)
    else:
        values = head_values(*read_evidence(spec, paths), seed)
    table = head_table(spec["model"], name, values, seed)
    write_table(table, snakemake.output[0], kind="scores", spec=spec, counts=values.counts)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
