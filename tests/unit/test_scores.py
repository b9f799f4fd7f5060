"""Formulas, settings, pooling, intervals, ranks, and the score script from shards to tables."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from synthetic_shards import World, make_world, probe_record, write_world

from workflow_scripts.common.artifacts import read_provenance, read_table
from workflow_scripts.common.errors import UserError
from workflow_scripts.scores import collect_heads, score
from workflow_scripts.scores.formulas import check_formula, evaluate
from workflow_scripts.scores.intervals import RESAMPLES, percentile_interval, resampled_heads
from workflow_scripts.scores.pooling import PerProbe, pool_heads
from workflow_scripts.scores.ranking import rank_heads
from workflow_scripts.scores.reductions import COLUMNS
from workflow_scripts.scores.settings import check_score, parse_score

LOCOS = "needle_phi - off_phi * needle_len / off_len"


# --- formulas


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("needle_phi - off_phi * needle_len / off_len", 3 - 5 * 2 / 4),
        ("off_phi / 2 * (1 / 2)", 5 / 2 * 0.5),  # whole numbers do not divide like whole numbers
        ("CASE WHEN needle_phi > 2 THEN 1 ELSE 0 END", 1.0),
        ("greatest(needle_phi, 4) - abs(-off_phi)", 4 - 5),
        ("COALESCE(needle_phi / NULLIF(off_len - 4, 0), 7)", 7.0),
        ("needle_phi > 2 and off_phi < 2", 0.0),
        ("1e1 * needle_phi", 30.0),
    ],
)
def test_a_formula_is_the_arithmetic_it_spells(formula: str, value: float) -> None:
    columns = {"needle_phi": 3.0, "off_phi": 5.0, "needle_len": 2.0, "off_len": 4.0}
    used = check_formula("scores.x.formula", formula, COLUMNS)
    result = evaluate(formula, {name: np.full((2, 1), columns[name]) for name in used})
    np.testing.assert_array_equal(result, np.full((2, 1), value))


def test_columns_a_row_and_columns_a_head_broadcast() -> None:
    phi, length = np.arange(12.0).reshape(2, 2, 3), np.array([[[2.0]], [[4.0]]])
    result = evaluate("needle_phi / needle_len", {"needle_phi": phi, "needle_len": length})
    np.testing.assert_array_equal(result, phi / length)


def test_a_null_becomes_not_a_number() -> None:
    assert np.isnan(evaluate("1 / NULLIF(off_len, 0)", {"off_len": np.zeros(1)}))[0]


@pytest.mark.parametrize(
    ("formula", "named"),
    [
        ("needle_phy - off_phi", "needle_phy"),
        ("needle_phi -", "not an SQL expression"),
        ("needle_phi off_phi", "off_phi"),
        ("(needle_phi) off_phi", "off_phi"),
        ("needle_phi 2", "'2'"),
        ("CASE WHEN needle_phi > 1 THEN 1 ELSE 0 END off_phi", "off_phi"),
        ("needle_phi, off_phi", "not an SQL expression"),
        ("read_csv('/etc/passwd')", "read_csv"),
        ("needle_phi + (select 1)", "select"),
        ("sum(needle_phi)", "'sum'"),
        ("rank() over (order by needle_phi)", "rank"),
        ("needle_phi + 'text'", "'text'"),
        ('"needle_phi"', "not allowed"),
        ("needle_phi; drop table self", "; drop"),
        ("needle_phi -- off_phi", "--"),
        ("needle_phi /* off */", "/*"),
        ("self.needle_phi", "self"),
        ("1 + 1", "names no column"),
        ("", "names no column"),
        ("abs(needle_phi, off_phi)", "not an SQL expression"),
    ],
)
def test_what_is_not_arithmetic_on_known_columns_is_refused_by_name(
    formula: str, named: str
) -> None:
    with pytest.raises(UserError) as error:
        check_formula("scores.mine.formula", formula, COLUMNS)
    message = str(error.value)
    assert message.startswith("scores.mine.formula: ")
    assert named in message
    assert "\n" not in message


def test_an_unknown_column_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        UserError, match="known columns: needle_phi, needle_alpha, needle_len, off_"
    ):
        check_formula("scores.x.formula", "phi", COLUMNS)


# --- settings


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"formula": LOCOS}, "dataset"),
        ({"dataset": "d"}, "formula"),
        ({"dataset": "d", "formula": LOCOS, "detector": "wu"}, "detector"),
        ({"dataset": "d", "formula": LOCOS, "pol": "steps"}, "pol"),
        ({"dataset": "d", "formula": LOCOS, "pool": "mean"}, "mean"),
        ({"dataset": "d", "formula": LOCOS, "off": "everything"}, "everything"),
        ({"dataset": "d", "formula": LOCOS, "gate": "open"}, "open"),
        ({"dataset": "d", "formula": LOCOS, "direction": "up"}, "up"),
        ({"dataset": "d", "formula": LOCOS, "steps": "prompt"}, "needle_phi, off_phi"),
        ({"dataset": "d", "formula": LOCOS, "permutations": 10}, "permutations"),
        ({"dataset": "d", "formula": LOCOS, "compat": "official", "pool": "steps"}, "compat"),
        ({"dataset": "d", "detector": "we"}, "we"),
        ({"dataset": "d", "detector": "wu", "off": "context"}, "off"),
        ({"dataset": "d", "detector": "argmax_ov", "steps": "content"}, "steps"),
        ({"dataset": "d", "detector": "contrastive_mass", "permutations": 0}, "permutations"),
    ],
)
def test_a_wrong_score_row_is_refused_by_key(row: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=r"^scores\.mine") as error:
        parse_score("mine", row)
    assert named in str(error.value)


def test_official_compatibility_pools_probes() -> None:
    row = {"dataset": "d", "formula": LOCOS}
    assert parse_score("x", row).pool == "steps"
    assert parse_score("x", row | {"compat": "official"}).pool == "probes"


# --- pooling, intervals, ranks


def uneven() -> PerProbe:
    """Two probes, one head: steps 1, 2, 3 and step 10."""
    return PerProbe(np.array([6.0, 10.0]).reshape(2, 1, 1), np.array([3.0, 1.0]), np.array([3, 1]))


def test_pooling_over_steps_weighs_steps_alike_and_over_probes_probes() -> None:
    assert pool_heads(uneven(), "steps")[0, 0] == pytest.approx((1 + 2 + 3 + 10) / 4)
    assert pool_heads(uneven(), "probes")[0, 0] == pytest.approx(((1 + 2 + 3) / 3 + 10) / 2)


@pytest.mark.parametrize("pool", ["steps", "probes"])
def test_the_interval_equals_a_resampling_loop(pool: str) -> None:
    random = np.random.default_rng(3)
    counts = random.integers(1, 4, 9).astype(float)
    probes = PerProbe(random.standard_normal((9, 2, 3)), counts, counts.astype(np.int64))
    low, high = percentile_interval(resampled_heads(probes, pool, seed=5))
    draws = np.random.default_rng(5).multinomial(9, [1 / 9] * 9, RESAMPLES)
    resampled = []
    for draw in draws:
        chosen = np.repeat(np.arange(9), draw)
        if pool == "steps":
            resampled.append(probes.sums[chosen].sum(0) / counts[chosen].sum())
        else:
            resampled.append((probes.sums[chosen] / counts[chosen, None, None]).mean(0))
    np.testing.assert_allclose(low, np.percentile(resampled, 2.5, axis=0))
    np.testing.assert_allclose(high, np.percentile(resampled, 97.5, axis=0))


def test_the_interval_of_many_probes_is_that_of_the_normal_law() -> None:
    values = np.random.default_rng(0).standard_normal((400, 1, 1))
    probes = PerProbe(values, np.ones(400), np.ones(400, int))
    low, high = percentile_interval(resampled_heads(probes, "steps", 1))
    half = 1.96 * values.std() / 20
    assert low[0, 0] == pytest.approx(values.mean() - half, abs=0.02)
    assert high[0, 0] == pytest.approx(values.mean() + half, abs=0.02)


def test_the_interval_of_one_probe_is_its_value() -> None:
    probes = PerProbe(np.full((1, 1, 1), 4.0), np.array([2.0]), np.array([2]))
    interval = percentile_interval(resampled_heads(probes, "steps", 1))
    assert [float(end[0, 0]) for end in interval] == [2.0, 2.0]


def test_ranks_follow_the_value_downwards() -> None:
    values = np.array([[0.5, -1.0], [2.0, 1.0]])
    np.testing.assert_array_equal(rank_heads(values, seed=0), [[3, 4], [1, 2]])


def test_ties_are_ordered_by_the_seed_and_never_by_layer() -> None:
    values = np.zeros((20, 10))
    values[7, 3] = 1.0
    ranks = rank_heads(values, seed=42)
    assert ranks[7, 3] == 1
    assert sorted(ranks.ravel()) == list(range(1, 201))
    # Mean rank of each half of the layers: 100 each if random, 50 and 150 by layer.
    assert abs(ranks[:10].mean() - ranks[10:].mean()) < 25
    np.testing.assert_array_equal(ranks, rank_heads(values, seed=42))
    assert (ranks != rank_heads(values, seed=43)).any()


# --- from shards to tables

SHARD_SPEC = {"model": "synthetic"}


def run_score(folder: Path, row: dict[str, Any], *, name: str = "locos", shards: int = 2) -> Path:
    spec = {
        "model": "synthetic",
        "score": name,
        "row": {"dataset": "nolima"} | row,
        "activations": {"key": "0123", "spec": SHARD_SPEC},
        "seed": 42,
    }
    output = folder / f"{name}.parquet"
    score.main(
        SimpleNamespace(
            input=SimpleNamespace(evidence=[str(folder / f"{i}.zarr.zip") for i in range(shards)]),
            output=[str(output)],
            params=SimpleNamespace(spec=json.dumps(spec)),
        )
    )
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of three probes each, and a third of which no probe could be run."""
    folder = tmp_path_factory.mktemp("store")
    for shard in range(2):
        numbers = range(3 * shard, 3 * shard + 3)
        probes = [
            probe_record(i, **({"status": "wrong", "answer_steps": []} if i == 4 else {}))
            for i in numbers
        ]
        world = make_world(probes, heads=6, kv_heads=2, seed=shard)
        write_world(world, folder / f"{shard}.zarr.zip", spec=SHARD_SPEC)
    skipped = make_world([], heads=6, kv_heads=2)
    skipped.probes = [probe_record(6, status="too_long", generated_ids=[], answer_steps=[])]
    write_world(skipped, folder / "2.zarr.zip", spec=SHARD_SPEC)
    return folder


def test_the_table_has_a_row_a_head_with_interval_rank_and_counts(folder: Path) -> None:
    path = run_score(folder, {"formula": LOCOS}, shards=3)
    table = read_table(path, kind="scores")
    assert table.columns == (
        "model score layer head kv_group value ci_low ci_high n_probes n_steps rank".split()
    )
    assert table.height == 12
    assert table.schema["value"] == pl.Float64
    assert {table.schema[c] for c in ("layer", "head", "kv_group", "rank")} == {pl.Int32}
    assert table["kv_group"].to_list() == [0, 0, 0, 1, 1, 1] * 2
    assert table["n_probes"].unique().to_list() == [5]
    assert table["n_steps"].unique().to_list() == [10]
    assert table.sort("rank")["value"].is_sorted(descending=True)
    assert (table["ci_low"] <= table["value"]).all()
    assert (table["ci_high"] >= table["value"]).all()
    assert read_provenance(path)["counts"] == {"passed": 5, "too_long": 1, "wrong": 1}


def test_the_same_score_gives_the_same_bytes(folder: Path) -> None:
    first = run_score(folder, {"formula": LOCOS}).read_bytes()
    assert run_score(folder, {"formula": LOCOS}).read_bytes() == first


def test_a_formula_evaluated_in_blocks_equals_the_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_table(run_score(folder, {"formula": LOCOS}), kind="scores")
    monkeypatch.setattr(score, "BLOCK", 13)
    assert read_table(run_score(folder, {"formula": LOCOS}), kind="scores").equals(whole)


def test_a_ranking_from_no_passing_probe_is_an_error_with_the_counts(tmp_path: Path) -> None:
    probes = [probe_record(i, status="wrong", answer_steps=[]) for i in range(3)]
    probes.append(probe_record(3, status="no_answer_step", answer_steps=[]))
    write_world(make_world(probes), tmp_path / "0.zarr.zip", spec=SHARD_SPEC)
    with pytest.raises(UserError, match=r"scores\.locos.*nolima.*no_answer_step 1, wrong 3"):
        run_score(tmp_path, {"formula": LOCOS}, shards=1)
    assert not (tmp_path / "locos.parquet").exists()


def run_difference(folder: Path, rows: list[dict[str, Any]], keys: list[str]) -> pl.DataFrame:
    """Return the difference of two scores whose shards lie in folders named by their keys."""
    terms = [
        {
            "model": "synthetic",
            "score": f"term{i}",
            "row": {"dataset": key} | row,
            "activations": {"key": key, "spec": SHARD_SPEC},
            "seed": 42,
        }
        for i, (row, key) in enumerate(zip(rows, keys, strict=True))
    ]
    spec = {"model": "synthetic", "score": "d", "row": {"difference": ["term0", "term1"]},
            "terms": terms, "seed": 42}  # fmt: skip
    paths = sorted(str(path) for key in set(keys) for path in (folder / key).glob("*.zarr.zip"))
    output = folder / "d.parquet"
    score.main(
        SimpleNamespace(
            input=SimpleNamespace(evidence=paths),
            output=[str(output)],
            params=SimpleNamespace(spec=json.dumps(spec)),
        )
    )
    return read_table(output, kind="scores")


@pytest.fixture
def controls(tmp_path: Path) -> dict[str, list[World]]:
    """Probes 0 to 8 with a needle and 2 to 9 without, answers of 1 to 3 tokens; two shards each."""

    def world(numbers: range, seed: int, **changes: Any) -> World:
        probes = [
            probe_record(i, **({"answer_steps": list(range(1 + i % 3))} | changes)) for i in numbers
        ]
        return make_world(probes, seed=seed)

    worlds = {
        "0a0a": [world(range(5), 1), world(range(5, 9), 2)],
        "1b1b": [world(range(2, 4), 3, status="forced", answer_steps=[0, 1, 2, 3]),
                 world(range(4, 10), 4, status="forced")],
    }  # fmt: skip
    for key, shards in worlds.items():
        for index, shard in enumerate(shards):
            (tmp_path / key).mkdir(exist_ok=True)
            write_world(shard, tmp_path / key / f"{index}.zarr.zip", spec=SHARD_SPEC)
    return worlds


def needle_mass(worlds: list[World]) -> dict[str, list[Any]]:
    """Return, by probe, the attention to the needle of each answer step, (layers, heads)."""
    found: dict[str, list[Any]] = {}
    for world in worlds:
        for row in world.rows:
            if row.is_answer:
                start, stop = world.needle(row)
                found.setdefault(world.probes[row.probe]["probe_id"], []).append(
                    row.alpha[..., start:stop].sum(-1)
                )
    return found


@pytest.mark.parametrize("pool", ["steps", "probes"])
def test_a_difference_is_over_the_probes_in_both_and_its_interval_over_pairs(
    controls: dict[str, list[World]], tmp_path: Path, pool: str
) -> None:
    row = {"formula": "needle_alpha", "pool": pool}
    table = run_difference(tmp_path, [row, row], list(controls))
    first, second = (needle_mass(worlds) for worlds in controls.values())
    paired = [name for name in first if name in second]
    assert paired == [f"probe-{i}" for i in range(2, 9)]

    def pooled(terms: dict[str, list[Any]], names: list[str]) -> Any:
        if pool == "steps":
            return np.mean([value for name in names for value in terms[name]], axis=0)
        return np.mean([np.mean(terms[name], axis=0) for name in names], axis=0)

    expected = pooled(first, paired) - pooled(second, paired)
    resampled = []
    for draw in np.random.default_rng(42).multinomial(7, [1 / 7] * 7, RESAMPLES):
        names = list(np.repeat(paired, draw))
        resampled.append(pooled(first, names) - pooled(second, names))
    for column, values in (
        ("value", expected),
        ("ci_low", np.percentile(resampled, 2.5, axis=0)),
        ("ci_high", np.percentile(resampled, 97.5, axis=0)),
    ):
        np.testing.assert_allclose(table[column], values.ravel(), rtol=1e-5, atol=1e-7)
    assert table["n_probes"].unique().to_list() == [7]
    assert table["n_steps"].unique().to_list() == [
        sum(len(terms[name]) for terms in (first, second) for name in paired)
    ]
    assert read_provenance(tmp_path / "d.parquet")["counts"] == {"paired": 7, "unpaired": 3}
    assert table.sort("rank")["value"].is_sorted(descending=True)


def test_a_difference_of_two_formulas_over_one_dataset_is_the_formula_of_the_difference(
    controls: dict[str, list[World]], tmp_path: Path
) -> None:
    rows = [{"formula": "needle_alpha"}, {"formula": "off_alpha"}]
    table = run_difference(tmp_path, rows, ["0a0a", "0a0a"])
    whole = run_difference(
        tmp_path,
        [{"formula": "needle_alpha - off_alpha"}, {"formula": "0 * off_alpha"}],
        ["0a0a"] * 2,
    )
    for column in ("value", "ci_low", "ci_high"):
        np.testing.assert_allclose(table[column], whole[column], rtol=1e-9, atol=1e-12)


def test_a_difference_without_a_pair_names_both_scores(
    controls: dict[str, list[World]], tmp_path: Path
) -> None:
    rows = [{"formula": "needle_alpha"}, {"formula": "needle_alpha", "gate": "rouge"}]
    for path in (tmp_path / "1b1b").glob("*"):
        path.unlink()
    other = make_world([probe_record(20, answer_steps=[0])])
    write_world(other, tmp_path / "1b1b" / "0.zarr.zip", spec=SHARD_SPEC)
    with pytest.raises(UserError, match=r"scores\.d: no probe counts in both term0 and term1"):
        run_difference(tmp_path, rows, list(controls))


def test_a_difference_takes_no_other_key() -> None:
    check_score("d", {"difference": ["a", "b"]})
    with pytest.raises(UserError, match=r"scores\.d: a difference has just the key"):
        check_score("d", {"difference": ["a", "b"], "pool": "steps"})


@pytest.mark.parametrize("gate", ["passed", "rouge", "none"])
def test_forced_answers_pass_every_gate(tmp_path: Path, gate: str) -> None:
    world = make_world([probe_record(0, status="forced"), probe_record(1, status="mismatch")])
    write_world(world, tmp_path / "0.zarr.zip", spec=SHARD_SPEC)
    path = run_score(tmp_path, {"formula": "needle_alpha", "gate": gate}, shards=1)
    assert read_table(path, kind="scores")["n_probes"][0] == 1


@pytest.mark.parametrize("formula", ["needle_phi / (off_len - off_len)", "ln(-needle_alpha - 1)"])
def test_a_value_that_is_not_finite_is_refused_by_score_and_probe(
    folder: Path, formula: str
) -> None:
    with pytest.raises(UserError, match=r"scores\.bad.*layer \d, head \d, probe probe-0"):
        run_score(folder, {"formula": formula}, name="bad")


def test_a_direction_that_was_not_captured_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(UserError, match="'frozen_norm' was not captured, only raw"):
        run_score(folder, {"formula": LOCOS, "direction": "frozen_norm"})


def test_shards_made_for_something_else_are_refused(tmp_path: Path) -> None:
    write_world(make_world([probe_record(0)]), tmp_path / "0.zarr.zip", spec={"model": "other"})
    with pytest.raises(UserError, match=r'"other".*"synthetic"'):
        run_score(tmp_path, {"formula": LOCOS}, shards=1)


def test_gate_none_adds_the_probes_that_failed(folder: Path) -> None:
    row = {"formula": "needle_alpha", "steps": "content", "gate": "none"}
    assert read_table(run_score(folder, row), kind="scores")["n_probes"][0] == 6


def collect(paths: list[Path], output: Path, specs: dict[str, Any]) -> pl.DataFrame:
    collect_heads.main(
        SimpleNamespace(
            input=SimpleNamespace(scores=[str(path) for path in paths]),
            output=[str(output)],
            params=SimpleNamespace(spec=json.dumps(specs)),
        )
    )
    return read_table(output, kind="heads", spec=specs)


def test_heads_are_all_scores_by_score_and_rank(folder: Path, tmp_path: Path) -> None:
    paths = [
        run_score(folder, {"formula": LOCOS}, name="locos"),
        run_score(folder, {"detector": "snapkv_window"}, name="snapkv"),
    ]
    specs = {path.stem: read_provenance(path)["spec"] for path in paths}
    heads = collect(paths[::-1], tmp_path / "heads.parquet", specs)
    assert heads["score"].to_list() == ["locos"] * 12 + ["snapkv"] * 12
    assert heads["rank"].to_list() == [*range(1, 13), *range(1, 13)]
    counts = read_provenance(tmp_path / "heads.parquet")["counts"]
    assert counts["locos"] == {"passed": 5, "wrong": 1}


def test_a_score_table_of_another_formula_is_refused(folder: Path, tmp_path: Path) -> None:
    path = run_score(folder, {"formula": LOCOS})
    spec = read_provenance(path)["spec"]
    spec["row"] |= {"formula": "needle_phi"}
    with pytest.raises(UserError, match=r"locos.parquet: made for .*, expected .*needle_phi"):
        collect([path], tmp_path / "heads.parquet", {"locos": spec})
