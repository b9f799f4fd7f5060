"""The score stage holds one shard at a time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from synthetic_shards import make_world, probe_record, write_world

from workflow_scripts.scores.score import score_shards
from workflow_scripts.scores.settings import parse_score


def test_peak_memory_is_flat_in_the_number_of_shards(tmp_path: Path) -> None:
    world = make_world([probe_record(n) for n in range(12)], layers=4, heads=16, kv_heads=4)
    path = write_world(world, tmp_path / "0.zarr.zip")
    settings = parse_score("a", {"dataset": "d", "formula": "needle_phi - off_phi / off_len"})

    def peak(shards: int) -> int:
        tracemalloc.start()
        score_shards([path] * shards, settings)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(1)  # what is imported and cached on the way
    # What stays of a shard is a sum a probe and head: all 15 others weigh less than one that is held.
    assert peak(16) < 1.8 * peak(1)
