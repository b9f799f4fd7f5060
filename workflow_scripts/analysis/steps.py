"""Scores by answer token: do heads change their role while the answer is written?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from workflow_scripts.common.errors import UserError
from workflow_scripts.common.shards import open_shard
from workflow_scripts.scores.intervals import percentile_interval, resampled_heads
from workflow_scripts.scores.pooling import PerProbe
from workflow_scripts.scores.reductions import NEED_NEEDLE, Rows, groups_of
from workflow_scripts.scores.score import formula_values
from workflow_scripts.scores.settings import ScoreSettings


def values_by_step(
    shards: Iterable[str | Path], settings: ScoreSettings, *, spec: Any, seed: int
) -> pl.DataFrame:
    """Return the mean value of each head at each answer token.

    Parameters
    ----------
    shards
        All shards of the score's dataset; one is held at a time.
    settings
        A formula over answer steps.
    spec
        What the shards must have been made for.
    seed
        Of the bootstrap.

    Returns
    -------
    DataFrame
        score, answer_token (int32, 0 for the first), layer, head (int32), value (mean over the
        probes that have this token), ci_low, ci_high (95 %, bootstrap over them), n_probes (int32).
        Later tokens are of fewer probes, those with long answers.

    Raises
    ------
    UserError
        If a shard is not the one expected, or no probe passes the gate.
    """
    places, parts = [], []
    for path in shards:
        with open_shard(path, spec=spec) as shard:
            rows = Rows(
                shard,
                steps=settings.steps,
                gate=settings.gate,
                needle=not NEED_NEEDLE.isdisjoint(settings.columns),
                off=settings.off,
                direction=settings.direction,
            )
            if len(rows) == 0:
                continue
            places += [np.arange(group.stop - group.start) for group in groups_of(rows.probe)]
            parts.append(formula_values(rows, settings).values)
    if not parts:
        raise UserError(
            f"scores.{settings.name}: no probe of dataset {settings.dataset} has answer steps under "
            f"gate '{settings.gate}'; use more or easier probes, or another gate"
        )
    place, values = np.concatenate(places), np.concatenate(parts)
    layer, head = np.indices(values.shape[1:], dtype=np.int32)
    tables = []
    for token in range(place.max() + 1):
        chosen = values[place == token]
        ones = np.ones(len(chosen))
        probes = PerProbe(chosen, ones, ones.astype(np.int64))
        low, high = percentile_interval(resampled_heads(probes, "probes", seed))
        tables.append(
            pl.DataFrame(
                {
                    "layer": layer.ravel(),
                    "head": head.ravel(),
                    "value": chosen.mean(0).ravel(),
                    "ci_low": low.ravel(),
                    "ci_high": high.ravel(),
                }
            ).select(
                pl.lit(settings.name).alias("score"),
                pl.lit(token, pl.Int32).alias("answer_token"),
                pl.all(),
                pl.lit(len(chosen), pl.Int32).alias("n_probes"),
            )
        )
    return pl.concat(tables)
