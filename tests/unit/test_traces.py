"""Traces of answers, and the retrieval signal: against loops over whole rows, pairs and hand-worked cases."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest
from scipy.stats import mannwhitneyu
from synthetic_shards import World, make_world, probe_record, write_world
from test_answers import byte_tokenizer
from transformers import PreTrainedTokenizerFast

from workflow_scripts.common.errors import UserError
from workflow_scripts.common.shards import open_shard
from workflow_scripts.scores.ranking import top_heads
from workflow_scripts.traces.retrieval import (
    auc_interval,
    auc_table,
    best_threshold,
    document_shares,
    kind_of,
    roc_auc,
)
from workflow_scripts.traces.trace import (
    answer_of,
    head_table,
    probe_index,
    question_of,
    token_pieces,
    token_table,
    writers,
)

HEADS = [(1, 3), (0, 2)]
# Two, three and four bytes a character, at the start, in the middle and at the end.
MIXED = "école 東京 is <b>not</b> 🦉🦉 far, señor — ß漢"


def traced_world() -> World:
    return make_world(
        [
            probe_record(0),
            probe_record(1, status="wrong", answer_steps=[]),
            probe_record(2, status="mismatch"),
            probe_record(3, answer_steps=[0, 3], generated_ids=[9, 8, 7, 2]),
            probe_record(
                4,
                needle_start=None,
                needle_end=None,
                real_needle_start=None,
                real_needle_end=None,
                status="answered",
                answer_steps=[0],
                generated_ids=[5],
            ),
        ],
        seed=4,
    )


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, one a token: most of its tokens are parts of a character."""
    return byte_tokenizer()


def document_phi(world: World, probe: int, heads: list[tuple[int, int]]) -> float:
    """What heads wrote from the document's positions into every generated token of a probe."""
    return math.fsum(
        row.phi[layer, head, position]
        for row in world.rows
        if row.probe == probe and row.token >= 0
        for layer, head in heads
        for position in range(row.length)
        if world.region(row, position) in ("needle", "haystack")
    )


def written_phi(world: World, probe: int) -> float:
    """The sum of |phi of a region| over every generated token, head and region of a probe."""
    total = 0.0
    for row in world.rows:
        if row.probe != probe or row.token < 0:
            continue
        for layer, head in np.ndindex(world.layers, world.heads):
            regions: dict[str, float] = {}
            for position in range(row.length):
                name = world.region(row, position)
                regions[name] = regions.get(name, 0.0) + row.phi[layer, head, position]
            total += sum(abs(value) for value in regions.values())
    return total


def test_document_shares_are_those_of_a_loop_over_every_position(tmp_path):
    world = traced_world()
    with open_shard(write_world(world, tmp_path / "0.zarr.zip")) as shard:
        shares = document_shares(shard, HEADS)
    assert sorted(shares) == [0, 1, 3, 4]  # no mismatch
    for probe, share in shares.items():
        expected = document_phi(world, probe, HEADS) / written_phi(world, probe)
        assert share == pytest.approx(expected, abs=1e-6)


def test_a_shard_without_rows_has_no_shares(tmp_path):
    world = World(2, 4, 2, [probe_record(0, status="unclosed_thinking")])
    with open_shard(write_world(world, tmp_path / "0.zarr.zip")) as shard:
        assert document_shares(shard, HEADS) == {}


def test_a_probe_is_of_the_kind_its_answer_and_dataset_make_it():
    assert kind_of("passed", removed=False) == "passing"
    for status in ("wrong", "truncated", "no_answer_step"):
        assert kind_of(status, removed=False) == "failing"
    assert kind_of("passed", removed=True) == "removed"


@pytest.mark.parametrize("seed", range(4))
def test_roc_auc_is_the_share_of_pairs_won_and_scipys_u(seed):
    random = np.random.default_rng(seed)
    # One decimal place: many ties.
    positive = random.normal(0.4, 1, 17).round(1)
    negative = random.normal(0, 1, 11).round(1)
    won = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    found = roc_auc(positive, negative)
    assert found == pytest.approx(won / (17 * 11), abs=1e-12)
    assert found == pytest.approx(mannwhitneyu(positive, negative).statistic / (17 * 11), abs=1e-12)


def test_the_auc_interval_covers_the_auc_and_is_a_point_where_the_groups_part():
    random = np.random.default_rng(0)
    positive, negative = random.normal(0.5, 1, 60), random.normal(0, 1, 60)
    low, high = auc_interval(positive, negative, 42)
    assert low < roc_auc(positive, negative) < high
    # Hanley and McNeil (1982), equation 1, for this area and these numbers.
    area = roc_auc(positive, negative)
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    spread = math.sqrt((area * (1 - area) + 59 * (q1 - area**2) + 59 * (q2 - area**2)) / (60 * 60))
    assert (high - low) / (2 * 1.96 * spread) == pytest.approx(1, abs=0.15)
    assert auc_interval(np.array([2.0, 3.0]), np.array([0.0, 1.0]), 42) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("positive", "negative", "expected"),
    [
        # Thresholds 1, 3, 4 keep 3/3, 2/3, 1/3 and let 1/2, 0, 0 through: 3 is best.
        ([1, 3, 4], [0, 2], 3),
        # 0.5 and 0.9 both part by 1/2: the smaller.
        ([0.5, 0.9], [0.7, 0.1], 0.5),
        # A negative at the threshold counts as let through.
        ([1, 2], [1, 1], 2),
        ([5, 6], [1, 2], 5),
    ],
)
def test_the_threshold_parts_best(positive, negative, expected):
    assert best_threshold(np.array(positive, float), np.array(negative, float)) == expected


def test_the_auc_table_names_an_empty_group():
    probes = pl.DataFrame(
        {"kind": ["passing"] * 2 + ["failing"] * 2, "share": [0.3, 0.4, 0.1, 0.35]}
    )
    rows = {row["negative"]: row for row in auc_table(probes, 42).iter_rows(named=True)}
    assert rows["failing"]["auc"] == rows["failing or removed"]["auc"] == 0.75
    assert rows["failing"]["n_passing"] == rows["failing"]["n_negative"] == 2
    assert rows["removed"]["auc"] is None
    assert rows["removed"]["reason"] == "no removed probes"
    nothing = auc_table(probes.filter(pl.col("kind") == "failing"), 42)
    assert nothing["reason"].to_list()[0] == "no passing probes"


def test_the_heads_of_an_answer_are_sums_over_its_positions_by_region(tmp_path):
    world = traced_world()
    with open_shard(write_world(world, tmp_path / "0.zarr.zip")) as shard:
        found = head_table(shard, 3)
    assert found.height == 2 * world.layers * world.heads
    for row in world.rows:
        if row.probe != 3 or not row.is_answer:
            continue
        for layer, head in np.ndindex(world.layers, world.heads):
            of_head = found.filter(step=row.step, layer=layer, head=head).row(0, named=True)
            assert of_head["token_id"] == row.token
            assert of_head["kv_group"] == head // 2
            phi = row.phi[layer, head]
            assert of_head["phi"] == pytest.approx(phi.sum(), abs=1e-5)
            for name in ("needle", "haystack", "question", "bos", "template", "generated"):
                at = [j for j in range(row.length) if world.region(row, j) == name]
                assert of_head[f"phi_{name}"] == pytest.approx(phi[at].sum(), abs=1e-5)


def test_source_tokens_are_the_whole_rows_and_sum_to_their_heads(tmp_path, byte_level):
    world = traced_world()
    heads = [(1, 3), (0, 2), (1, 0)]
    record = world.probes[3]
    ids = [*record["input_ids"], *record["generated_ids"]]
    with open_shard(write_world(world, tmp_path / "0.zarr.zip")) as shard:
        found = token_table(shard, 3, heads, token_pieces(byte_level, ids))
        of_heads = head_table(shard, 3)
    for row in world.rows:
        if row.probe != 3 or not row.is_answer:
            continue
        for layer, head in heads:
            part = found.filter(step=row.step, layer=layer, head=head)
            assert part["position"].to_list() == list(range(row.length))
            assert part["source_id"].to_list() == ids[: row.length]
            assert part["region"].to_list() == [world.region(row, j) for j in range(row.length)]
            np.testing.assert_allclose(part["phi"], row.phi[layer, head], atol=1e-6)
            np.testing.assert_allclose(part["alpha"], row.alpha[layer, head], atol=1e-6)
            total = of_heads.filter(step=row.step, layer=layer, head=head)["phi"].item()
            assert part["phi"].sum() == pytest.approx(total, abs=1e-5)
    assert found.height == sum(
        3 * row.length for row in world.rows if row.probe == 3 and row.is_answer
    )


def test_writers_wrote_most_from_the_document(tmp_path):
    world = traced_world()
    with open_shard(write_world(world, tmp_path / "0.zarr.zip")) as shard:
        found = writers(head_table(shard, 0), 3)
    written = {}
    for pair in np.ndindex(world.layers, world.heads):
        written[pair] = math.fsum(
            row.phi[*pair, position]
            for row in world.rows
            if row.probe == 0 and row.is_answer
            for position in range(row.length)
            if world.region(row, position) in ("needle", "haystack")
        )
    assert found == sorted(written, key=lambda pair: -written[pair])[:3]


def test_top_heads_are_the_first_by_rank():
    ranking = pl.DataFrame({"layer": [0, 0, 1], "head": [0, 1, 0], "rank": [3, 1, 2]})
    assert top_heads(ranking, 2) == [(0, 1), (1, 0)]


def test_a_probe_that_cannot_be_traced_says_so(tmp_path):
    with open_shard(write_world(traced_world(), tmp_path / "0.zarr.zip")) as shard:
        assert probe_index(shard, "probe-3") == 3
        assert probe_index(shard, "other") is None
        for probe, status in (("probe-1", "wrong"), ("probe-2", "mismatch")):
            with pytest.raises(UserError, match=f"{probe}: cannot be traced, it ended as {status}"):
                probe_index(shard, probe)


def test_pieces_of_bytes_joined_are_the_text(byte_level):
    ids = byte_level.encode(MIXED)
    assert len(ids) == len(MIXED.encode())  # a token a byte
    pieces = token_pieces(byte_level, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == MIXED
    # A character stands at its last byte, nothing at the bytes before.
    expected = [piece for c in MIXED for piece in [*[""] * (len(c.encode()) - 1), c]]
    assert pieces == expected


def test_an_open_character_at_the_end_shows_as_the_replacement_sign(byte_level):
    ids = byte_level.encode("ab漢")[:-1]
    assert "".join(token_pieces(byte_level, ids)) == byte_level.decode(ids) == "ab\ufffd"


def test_question_and_answer_are_read_from_their_tokens(byte_level):
    prompt, said = byte_level.encode("Für wen? Für 漢 ."), byte_level.encode(" Zoë")
    question = "Für 漢"
    start = len("Für wen? ".encode())
    probe = {
        "input_ids": prompt,
        "generated_ids": said,
        "question_start": start,
        "question_end": start + len(question.encode()),
        "answer_steps": [1, 2, 3, 4],
    }
    pieces = token_pieces(byte_level, [*prompt, *said])
    assert question_of(probe, pieces) == question
    assert answer_of(probe, pieces) == ["Z", "o", "", "ë"]
