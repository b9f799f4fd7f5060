"""Every table of the analyses against loops and enumerations; head files out and in again."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from synthetic_shards import World, make_world, probe_record, write_world

from workflow_scripts.ablation.selection import imported_score
from workflow_scripts.analysis import views
from workflow_scripts.analysis.comparison import compare_scores, paired_weights
from workflow_scripts.analysis.export_heads import head_file
from workflow_scripts.analysis.per_probe import (
    KIND,
    ProbeScores,
    per_probe,
    per_probe_table,
    read_per_probe,
)
from workflow_scripts.analysis.provenance import answer_positions, provenance_of
from workflow_scripts.analysis.rankings import (
    expected_groups,
    expected_jaccard,
    expected_rank_biased_overlap,
    jaccard,
    kendall,
    rank_biased_overlap,
    spearman,
)
from workflow_scripts.analysis.steps import values_by_step
from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.errors import UserError
from workflow_scripts.scores.pooling import PerProbe
from workflow_scripts.scores.score import head_table, head_values, score_shards
from workflow_scripts.scores.settings import parse_score

LOCOS = {"dataset": "d", "formula": "needle_phi - off_phi * needle_len / off_len"}


def random_ranks(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).permutation(n) + 1


# --- measures of two rankings


@pytest.mark.parametrize("k", [1, 3, 7, 12])
def test_jaccard_is_that_of_the_two_sets(k: int) -> None:
    one, other = random_ranks(12, 1), random_ranks(12, 2)
    a, b = (set(np.argsort(ranks)[:k].tolist()) for ranks in (one, other))
    assert jaccard(one, other, k) == pytest.approx(len(a & b) / len(a | b))


@pytest.mark.parametrize("k", range(1, 7))
def test_chance_of_jaccard_is_the_mean_over_all_pairs_of_sets(k: int) -> None:
    sets = [set(c) for c in combinations(range(6), k)]
    mean = np.mean([len(a & b) / len(a | b) for a in sets for b in sets])
    assert expected_jaccard(6, k) == pytest.approx(mean)


def slow_rbo(one: list[int], other: list[int], p: float = 0.9) -> float:
    """Webber et al. 2010, equation 32, at the full depth; arguments list heads, best first."""
    total = 0.0
    for depth in range(1, len(one) + 1):
        total += (1 - p) * p ** (depth - 1) * len({*one[:depth]} & {*other[:depth]}) / depth
    return total + p ** len(one)


def test_rank_biased_overlap_of_a_case_by_hand() -> None:
    # Heads a, b, c ranked a b c and b a c: overlaps 0, 2, 3; .1 (0 + .9 + .81) + .729
    assert rank_biased_overlap(np.array([1, 2, 3]), np.array([2, 1, 3])) == pytest.approx(0.9)


def test_rank_biased_overlap_is_its_sum_over_depths() -> None:
    one, other = random_ranks(30, 1), random_ranks(30, 2)
    expected = slow_rbo(np.argsort(one).tolist(), np.argsort(other).tolist())
    assert rank_biased_overlap(one, other) == pytest.approx(expected)
    assert rank_biased_overlap(one, one) == pytest.approx(1)


def test_chance_of_rank_biased_overlap_is_the_mean_over_all_rankings() -> None:
    first = list(range(5))
    mean = np.mean([slow_rbo(first, list(other)) for other in permutations(first)])
    assert expected_rank_biased_overlap(5) == pytest.approx(mean)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_chance_of_distinct_groups_is_the_mean_over_all_sets(size: int, k: int) -> None:
    mean = np.mean([len({head // size for head in c}) for c in combinations(range(8), k)])
    assert expected_groups(8, size, k) == pytest.approx(mean)


def test_spearman_and_kendall_are_their_textbook_formulas() -> None:
    one, other = random_ranks(9, 3), random_ranks(9, 4)
    assert spearman(one, other) == pytest.approx(1 - 6 * ((one - other) ** 2).sum() / (9 * 80))
    tied = np.minimum(other, 6)
    pairs = [
        (np.sign(one[i] - one[j]), np.sign(tied[i] - tied[j])) for i, j in combinations(range(9), 2)
    ]
    untied = [sum(bool(pair[side]) for pair in pairs) for side in (0, 1)]
    tau_b = sum(a * b for a, b in pairs) / np.sqrt(untied[0] * untied[1])
    assert kendall(one, tied) == pytest.approx(tau_b)
    assert np.isnan([spearman(one, np.ones(9)), kendall(np.ones(9), one)]).all()


# --- pairs of scores


def probe_scores(name: str, ids: list[str], seed: int, pool: str = "steps") -> ProbeScores:
    random = np.random.default_rng(seed)
    counts = random.integers(1, 4, len(ids)).astype(np.float64)
    sums = random.standard_normal((len(ids), 3, 4)) + np.arange(12).reshape(3, 4) / 8
    probes = PerProbe(sums, counts, counts.astype(np.int64))
    return ProbeScores("m", name, pool, [("d", probe) for probe in ids], probes)


def test_resamples_draw_shared_probes_together_and_all_others_among_themselves() -> None:
    first, second = [("d", x) for x in "abcd"], [("d", x) for x in "dcxyz"]
    one, other = paired_weights(first, second, 42)
    np.testing.assert_array_equal(one[:, 2], other[:, 1])
    np.testing.assert_array_equal(one[:, 3], other[:, 0])
    for drawn in (one[:, :2], one[:, 2:]):
        assert (drawn.sum(1) == 2).all() and (drawn != 1).any()
    assert (other[:, 2:].sum(1) == 3).all()


def slow_values(score: ProbeScores, weights: Any) -> list[float]:
    """Pool the probes drawn `weights` times, head by head."""
    sums, counts = score.probes.sums.reshape(len(weights), -1), score.probes.counts
    if score.pool == "probes":
        sums, counts = sums / counts[:, None], np.ones_like(counts)
    total = sum(w * c for w, c in zip(weights, counts, strict=True))
    return [sum(w * s for w, s in zip(weights, sums[:, h], strict=True)) / total for h in range(12)]


@pytest.mark.parametrize("pool", ["steps", "probes"])
def test_a_comparison_is_that_of_the_pooled_values_and_of_every_resample(pool: str) -> None:
    scores = [probe_scores("a", list("pqrst"), 1, pool), probe_scores("b", list("rstu"), 2, pool)]
    table = compare_scores(scores, [["a", "b"]], ["jaccard", "spearman"], [4], 42)

    def measured(weights: tuple[Any, Any]) -> tuple[float, float]:
        values = [slow_values(s, w) for s, w in zip(scores, weights, strict=True)]
        order = [np.argsort(-np.array(v)) for v in values]
        top = [set(o[:4].tolist()) for o in order]
        ranks = [np.argsort(o) for o in order]
        squares = ((ranks[0] - ranks[1]) ** 2).sum()
        return len(top[0] & top[1]) / len(top[0] | top[1]), 1 - 6 * squares / (12 * 143)

    observed = measured((np.ones(5), np.ones(4)))
    drawn = paired_weights(scores[0].ids, scores[1].ids, 42)
    resampled = np.array([measured(pair) for pair in zip(*drawn, strict=True)])
    low, high = np.quantile(resampled, (0.025, 0.975), axis=0)
    np.testing.assert_allclose(table["value"], observed)
    np.testing.assert_allclose(table["ci_low"], low)
    np.testing.assert_allclose(table["ci_high"], high)
    assert table["k"].to_list() == [4, None]
    assert table.select("n_probes_a", "n_probes_b", "n_shared").row(0) == (5, 4, 3)
    np.testing.assert_allclose(table["chance"], [expected_jaccard(12, 4), 0])


def test_a_score_agrees_with_itself_in_every_resample() -> None:
    score = probe_scores("a", list("pqrst"), 1)
    measures = ["jaccard", "rbo", "spearman", "kendall"]
    table = compare_scores([score], [["a", "a"]], measures, [1, 3], 42)
    assert table.height == 5
    for column in ("value", "ci_low", "ci_high"):
        np.testing.assert_allclose(table[column], 1)


def test_a_score_that_is_the_same_for_all_heads_has_no_rank_correlation() -> None:
    flat = probe_scores("flat", list("pqrst"), 1)
    flat.probes.sums[:] = 0
    table = compare_scores(
        [flat, probe_scores("a", list("pqrst"), 2)], [["flat", "a"]], ["kendall"], [1], 42
    )
    assert table.select("value", "ci_low", "ci_high").row(0) == (None, None, None)


def test_more_heads_than_there_are_is_refused_by_key() -> None:
    score = probe_scores("a", list("pq"), 1)
    with pytest.raises(UserError, match=r"analysis\.k .*: 13 is more than the model's 12 heads"):
        compare_scores([score], [["a", "a"]], ["jaccard"], [1, 13], 42)


# --- views of heads.parquet


@pytest.fixture(scope="module")
def heads() -> pl.DataFrame:
    """Two scores over 3 layers of 4 heads, 2 a KV group."""
    rows = []
    for score, seed in (("a", 1), ("b", 2)):
        values = np.random.default_rng(seed).standard_normal(12)
        ranks = np.argsort(np.argsort(-values)) + 1
        for index in range(12):
            layer, head = divmod(index, 4)
            value = float(values[index])
            interval = (value - 0.5, value + 0.5)
            rows.append(
                ("m", score, layer, head, head // 2, value, *interval, 9, int(ranks[index]))
            )
    columns = "model score layer head kv_group value ci_low ci_high n_probes rank".split()
    table = pl.DataFrame(rows, schema=columns, orient="row")
    return table.with_columns(pl.col("layer", "head", "kv_group", "rank").cast(pl.Int32))


def top_of(heads: pl.DataFrame, score: str, k: int) -> list[dict[str, Any]]:
    return [r for r in heads.to_dicts() if r["score"] == score and r["rank"] <= k]


def test_layers_count_the_top_heads(heads: pl.DataFrame) -> None:
    table = views.layers(heads, [2, 5])
    assert table.height == 2 * 2 * 3
    for row in table.to_dicts():
        found = [r["layer"] for r in top_of(heads, row["score"], row["k"])]
        assert row["n_top"] == found.count(row["layer"])
        assert row["share"] == row["n_top"] / row["k"]
        quartiles = [row["layer_q25"], row["layer_median"], row["layer_q75"]]
        np.testing.assert_allclose(quartiles, np.quantile(found, (0.25, 0.5, 0.75)))


def test_kv_groups_hold_means_and_distinct_groups(heads: pl.DataFrame) -> None:
    table = views.kv_groups(heads, [2, 5])
    assert table.height == 2 * 2 * 6
    for row in table.to_dicts():
        group = (row["layer"], row["kv_group"])
        members = [
            r["value"]
            for r in heads.to_dicts()
            if r["score"] == row["score"] and (r["layer"], r["kv_group"]) == group
        ]
        found = [(r["layer"], r["kv_group"]) for r in top_of(heads, row["score"], row["k"])]
        assert row["mean_value"] == pytest.approx(sum(members) / 2)
        assert row["n_top"] == found.count(group)
        assert row["groups_covered"] == len(set(found))
        assert row["groups_expected"] == pytest.approx(expected_groups(12, 2, row["k"]))


def test_distribution_summarises_each_score(heads: pl.DataFrame) -> None:
    table = views.distribution(heads)
    assert table["score"].to_list() == ["a", "b"]
    for row in table.to_dicts():
        values = heads.filter(pl.col("score") == row["score"])["value"].to_numpy()
        names = ("min", "q05", "q25", "median", "q75", "q95", "max")
        expected = np.quantile(values, (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1))
        np.testing.assert_allclose([row[name] for name in names], expected)
        np.testing.assert_allclose([row["mean"], row["std"]], [values.mean(), values.std(ddof=1)])
        assert row["share_above"] == (values > 0.5).sum() / 12
        assert row["share_below"] == (values < -0.5).sum() / 12
        assert (row["n_heads"], row["n_probes"]) == (12, 9)


def test_specificity_sets_the_ranks_of_two_scores_beside_each_other(heads: pl.DataFrame) -> None:
    table = views.specificity(heads, "a", "b")
    ranks = {(r["score"], r["layer"], r["head"]): r["rank"] for r in heads.to_dicts()}
    assert table.height == 12
    for row in table.to_dicts():
        literal, nonliteral = (ranks[score, row["layer"], row["head"]] for score in "ab")
        assert (row["rank_literal"], row["rank_nonliteral"]) == (literal, nonliteral)
        assert row["rank_gain"] == literal - nonliteral
    assert table["rank_nonliteral"].is_sorted()


def test_consensus_counts_the_scores_that_hold_a_head_in_their_top(heads: pl.DataFrame) -> None:
    table = views.consensus(heads, [3, 6])
    assert table.height == 2 * 12
    for row in table.to_dicts():
        ranks = [
            r["rank"]
            for r in heads.to_dicts()
            if (r["layer"], r["head"]) == (row["layer"], row["head"])
        ]
        assert row["n_top"] == sum(rank <= row["k"] for rank in ranks)
        assert (row["n_scores"], row["mean_rank"]) == (2, sum(ranks) / 2)
    assert table.filter(pl.col("k") == 6)["n_top"].is_sorted(descending=True)


# --- what needs the shards

TEXTS = {str(i): f" t{i}" for i in range(50)} | {"20": " An", "21": "na", "22": " ANNA"}


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    """Two shards; the answer stands in the needle as generated, twice by text, and not at all."""

    def probe(number: int, needle: list[int], **changes: Any) -> dict[str, Any]:
        record = probe_record(number, **changes)
        record["input_ids"][6:10] = needle
        return record

    one = [
        probe(0, [9, 4, 5, 9], answer="no such text"),
        probe(1, [20, 21, 9, 22]),
        probe(2, [4, 5, 4, 5], status="wrong", answer_steps=[]),
    ]
    other = [probe(3, [8, 7, 8, 7], generated_ids=[3, 8, 5, 6, 3], answer_steps=[1, 2, 3])]
    made = [make_world(one, seed=1), make_world(other, seed=2)]
    for world in made:
        world.token_text = TEXTS
    return made


@pytest.fixture(scope="module")
def shards(worlds: list[World], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    return [write_world(world, folder / f"{i}.zarr.zip") for i, world in enumerate(worlds)]


def test_provenance_is_a_loop_over_positions(worlds: list[World], shards: list[Path]) -> None:
    answer_at = {"probe-0": {7, 8}, "probe-1": {6, 7, 9}, "probe-3": set()}
    sums: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for world in worlds:
        for row in world.rows:
            if not row.is_answer:
                continue
            probe = world.probes[row.probe]
            ids = [*probe["input_ids"], *probe["generated_ids"]]
            for layer, head, position in np.ndindex(row.phi.shape):
                positive = max(row.phi[layer, head, position], 0)
                source = world.region(row, position)
                if position in answer_at[probe["probe_id"]]:
                    source = "answer"
                sums[layer, head][source] += positive
                sums[layer, head]["total"] += positive
                sums[layer, head]["equal"] += positive * (ids[position] == row.token)
    table = provenance_of("d", shards, spec="made up")
    assert table.height == 8
    assert (table["n_probes"] == 3).all()
    for found in table.to_dicts():
        expected = sums[found["layer"], found["head"]]
        total = expected["total"]
        assert found["positive"] == pytest.approx(total, rel=1e-5)
        for name in "needle answer haystack question bos template generated equal".split():
            assert expected[name] > 0
            assert found[f"share_{name}"] == pytest.approx(expected[name] / total, rel=1e-5)
        in_needle = expected["needle"] + expected["answer"]
        assert found["non_literality"] == pytest.approx(expected["needle"] / in_needle, rel=1e-5)


def test_a_head_that_writes_nothing_positive_has_no_shares(tmp_path: Path) -> None:
    world = make_world([probe_record(0)], heads=2)
    world.token_text = TEXTS
    for row in world.rows:
        row.phi[:, 0] = -1
        row.phi[:, 1, 6:10] = -1
    table = provenance_of("d", [write_world(world, tmp_path / "0.zarr.zip")], spec=None)
    silent = table.filter(pl.col("head") == 0)
    assert silent["positive"].to_list() == [0.0, 0.0]
    assert silent["share_haystack"].null_count() == silent["non_literality"].null_count() == 2
    elsewhere = table.filter(pl.col("head") == 1)
    assert elsewhere["share_needle"].to_list() == [0.0, 0.0]
    assert elsewhere["non_literality"].null_count() == 2


def test_no_passing_probe_is_an_error(tmp_path: Path) -> None:
    world = make_world([probe_record(0, status="wrong", answer_steps=[])])
    world.token_text = TEXTS
    path = write_world(world, tmp_path / "0.zarr.zip")
    with pytest.raises(UserError, match="dataset d: no probe passed"):
        provenance_of("d", [path], spec=None)
    with pytest.raises(UserError, match=r"scores\.x: no probe of dataset d has answer steps"):
        values_by_step([path], parse_score("x", LOCOS), spec=None, seed=1)


@pytest.mark.parametrize(
    ("needle", "spelled", "answer", "expected"),
    [
        ([1, 2, 3], [2, 3], "x", [0, 1, 1]),
        ([20, 21, 1], [], "anna", [1, 1, 0]),
        ([1, 20, 21, 22], [22], "Anna", [0, 1, 1, 1]),
        ([1, 2, 3], [], "t2 t3", [0, 1, 1]),
        ([1, 2, 3], [9], "nobody", [0, 0, 0]),
        ([1], [1, 2, 3], "", [0]),
    ],
)
def test_the_answer_word_is_found_by_tokens_and_by_text(
    needle: list[int], spelled: list[int], answer: str, expected: list[int]
) -> None:
    assert answer_positions(needle, spelled, answer, TEXTS).tolist() == list(map(bool, expected))


def test_steps_hold_the_mean_over_the_probes_that_have_the_token(
    worlds: list[World], shards: list[Path]
) -> None:
    by_token: dict[int, list[Any]] = defaultdict(list)
    for world in worlds:
        for row in world.rows:
            if row.is_answer:
                needle, n = row.phi[..., 6:10].sum(-1), 4
                off = row.phi.sum(-1) - needle
                place = world.probes[row.probe]["answer_steps"].index(row.step)
                by_token[place].append(needle - off * n / (row.length - n))
    table = values_by_step(shards, parse_score("locos", LOCOS), spec="made up", seed=42)
    assert table.height == 3 * 8
    for found in table.to_dicts():
        values = [v[found["layer"], found["head"]] for v in by_token[found["answer_token"]]]
        assert found["value"] == pytest.approx(np.mean(values), rel=1e-5, abs=1e-6)
        assert found["n_probes"] == len(values)
        if len(values) == 1:
            assert found["ci_low"] == found["ci_high"] == pytest.approx(found["value"])
        else:
            assert min(values) - 1e-6 <= found["ci_low"] < found["ci_high"] <= max(values) + 1e-6


# --- per-probe values and head files


@pytest.mark.parametrize("pool", ["steps", "probes"])
def test_an_exported_file_imported_again_gives_the_same_ranking(
    shards: list[Path], tmp_path: Path, pool: str
) -> None:
    settings = parse_score("locos", LOCOS | {"pool": pool})
    scores = score_shards(shards, settings)
    heads = head_table("m", "locos", head_values(settings, scores, 42), 42).sort("rank")
    ids = [("d", probe) for probe in scores.probe_ids]
    table = per_probe_table(ProbeScores("m", "locos", pool, ids, scores.probes))
    spec = {"model": "m", "score": "locos"}
    write_table(table, tmp_path / "p.parquet", kind=KIND, spec=spec, pool=pool)
    content = head_file(read_per_probe(tmp_path / "p.parquet"))
    (tmp_path / "heads.json").write_text(json.dumps(content), encoding="utf-8")
    grid = [f"{layer}-{head}" for layer in range(2) for head in range(4)]
    imported = imported_score(tmp_path / "heads.json", grid, 42)
    assert imported.select("layer", "head", "rank").rows() == (
        heads.select("layer", "head", "rank").rows()
    )
    np.testing.assert_allclose(imported["value"], heads["value"], rtol=1e-12)
    assert content["meta"]["probes"] == ["probe-0", "probe-1", "probe-3"]


def test_an_exported_value_is_the_mean_of_a_probe_s_steps(shards: list[Path]) -> None:
    settings = parse_score("locos", LOCOS | {"pool": "probes"})
    scores = score_shards(shards, settings)
    ids = [("d", probe) for probe in scores.probe_ids]
    content = head_file(ProbeScores("m", "locos", "probes", ids, scores.probes))
    # The second shard holds the last probe alone.
    alone = values_by_step(shards[1:], settings, spec=None, seed=1)
    assert len(content["scores"]) == 8
    for name, values in content["scores"].items():
        layer, head = map(int, name.split("-"))
        steps = alone.filter(pl.col("layer") == layer, pl.col("head") == head)["value"]
        assert values[2] == pytest.approx(steps.mean())


def test_a_difference_by_probe_has_the_mean_of_the_two_pooled_values(
    worlds: list[World], tmp_path: Path
) -> None:
    terms, paths = [], []
    for name, world, pool in (("one", worlds[0], "steps"), ("other", worlds[0], "probes")):
        spec = {"key": name, "spec": {"probes": {"dataset": name}}}
        (tmp_path / name).mkdir()
        path = write_world(world, tmp_path / name / "0.zarr.zip", spec=spec["spec"])
        paths.append(str(path))
        row = LOCOS | {"pool": pool, "formula": f"needle_phi - {len(paths)} * off_phi"}
        terms.append({"model": "m", "score": name, "row": row, "seed": 1, "activations": spec})
    found = per_probe({"model": "m", "score": "gap", "terms": terms}, paths)
    pooled = []
    for term, path in zip(terms, paths, strict=True):
        settings = parse_score(term["score"], term["row"])
        pooled.append(head_values(settings, score_shards([path], settings), 1).value)
    assert found.ids == [("one", "probe-0"), ("one", "probe-1")]
    np.testing.assert_allclose(found.probes.sums.mean(0), pooled[0] - pooled[1])
    assert (found.probes.counts == 1).all()
