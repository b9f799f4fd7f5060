"""Every formula and detector against plain loops over heads, steps and positions, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from synthetic_shards import Row, World, make_world, probe_record, write_world

from workflow_scripts.common.errors import UserError
from workflow_scripts.common.shards import open_shard
from workflow_scripts.scores.detectors import DETECTORS
from workflow_scripts.scores.permutation import PermutationFilter
from workflow_scripts.scores.pooling import pool_heads
from workflow_scripts.scores.reductions import Rows
from workflow_scripts.scores.score import score_shards
from workflow_scripts.scores.settings import parse_score

Array = NDArray[Any]
LOCOS = "needle_phi - off_phi * needle_len / off_len"
ALPHA = "needle_alpha - off_alpha * needle_len / off_len"
SCORES: dict[str, dict[str, Any]] = {
    "locos": {"formula": LOCOS},
    "locos_context": {"formula": LOCOS, "off": "context"},
    "locos_no_bos": {"formula": LOCOS, "off": "no_bos"},
    "locos_unit": {"formula": LOCOS, "direction": "unit"},
    "alpha_spatial": {"formula": ALPHA},
    "dla": {"formula": "needle_phi + off_phi"},
    "wu": {"detector": "wu"},
    "wu_text": {"detector": "wu_text"},
    "contrastive_top10": {"detector": "contrastive_top10"},
    "contrastive_mass": {"detector": "contrastive_mass"},
    "snapkv_window": {"detector": "snapkv_window"},
    "headkv_r2": {"detector": "headkv_r2"},
    "argmax_ov": {"detector": "argmax_ov"},
    "argmax_ov_unit_context": {"detector": "argmax_ov", "direction": "unit", "off": "context"},
}


def score_file(path: Path, row: dict[str, Any], *others: Path) -> NDArray[np.float64]:
    """Return the pooled head values of a score, (L, H)."""
    settings = parse_score("test", {"dataset": "nolima"} | row)
    return pool_heads(score_shards([path, *others], settings).probes, settings.pool)


def scored(world: World, folder: Path, row: dict[str, Any]) -> NDArray[np.float64]:
    # A shard that is there is left as it is, so each world gets a file of its own.
    number = len(list(folder.glob("*.zarr.zip")))
    return score_file(write_world(world, folder / f"{number}.zarr.zip"), row)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes a world and its shard, once for each maker and arguments."""

    @cache
    def write(make: Callable[..., World], *arguments: Any) -> tuple[World, Path]:
        world = make(*arguments)
        return world, write_world(world, tmp_path_factory.mktemp("shard") / "0.zarr.zip")

    return write


# --- the definitions, one head, step and position at a time


def needle_and_off(
    world: World, row: Row, values: Array, off: str
) -> tuple[float, float, int, int]:
    """Return needle_x, off_x, n and off_len of one head's values."""
    start, stop = world.needle(row)
    outside = {
        "all": set(),
        "no_bos": {"bos"},
        "context": {"bos", "question", "template", "generated"},
    }[off]
    needle = off_sum = 0.0
    off_len = 0
    for j in range(row.length):
        if start <= j < stop:
            needle += values[j]
        elif world.region(row, j) not in outside:
            off_sum += values[j]
            off_len += 1
    return needle, off_sum, stop - start, off_len


def contrast(world: World, row: Row, values: Array, off: str = "all") -> float:
    needle, off_sum, n, off_len = needle_and_off(world, row, values, off)
    return needle - off_sum * n / off_len


def argmax_contrast(world: World, row: Row, alpha: Array, phi: Array, off: str) -> float:
    start, stop = world.needle(row)
    best = max(range(start, stop), key=lambda j: alpha[j])
    _, off_sum, _, off_len = needle_and_off(world, row, phi, off)
    return phi[best] - off_sum / off_len


def copy_share(
    world: World, row: Row, layer: int, head: int, same: Callable[[int, int], bool]
) -> float:
    probe = world.probes[row.probe]
    start, stop = probe["real_needle_start"], probe["real_needle_end"]
    weights = row.alpha[layer, head]
    best = int(np.argmax(weights))
    if weights[best] == 0 or not start <= best < stop:
        return 0.0
    return 1 / (stop - start) if same(probe["input_ids"][best], row.token) else 0.0


def top_share(world: World, row: Row, layer: int, head: int) -> float:
    start, stop = world.needle(row)
    top = world.top(row, layer, head, 10)
    return sum(start <= j < stop for j in top) / min(10, row.length)


def mass(world: World, row: Row, layer: int, head: int) -> float:
    return needle_and_off(world, row, row.alpha[layer, head], "all")[0]


def expected(world: World, name: str) -> NDArray[np.float64]:
    """Return a score by its definition, pooled over steps (one value a probe: over probes)."""
    texts = world.token_text or {}
    result = np.empty((world.layers, world.heads))
    gate = {
        "wu": {"passed", "no_answer_step"},
        "wu_text": {"passed", "no_answer_step"},
        "snapkv_window": {"passed", "no_answer_step", "wrong", "truncated"},
    }.get(name, {"passed"})
    chosen = [
        i
        for i, p in enumerate(world.probes)
        if p["status"] in gate and p["needle_start"] is not None
    ]
    for layer, head in np.ndindex(result.shape):
        found: list[float] = []
        for index in chosen:
            rows = [row for row in world.rows if row.probe == index]
            answer = [row for row in rows if row.is_answer]
            content = [row for row in rows if row.token >= 0]
            others = [row for row in content if not row.is_answer]

            def phi(row: Row, layer: int = layer, head: int = head) -> Array:
                return row.phi[layer, head]

            def alpha(row: Row, layer: int = layer, head: int = head) -> Array:
                return row.alpha[layer, head]

            if name.startswith("locos"):
                off = {"locos_context": "context", "locos_no_bos": "no_bos"}.get(name, "all")
                found += [
                    contrast(world, r, phi(r), off) / (r.u_norm if name == "locos_unit" else 1)
                    for r in answer
                ]
            elif name == "alpha_spatial":
                found += [contrast(world, r, alpha(r)) for r in answer]
            elif name == "dla":
                found += [sum(phi(r)) for r in answer]
            elif name == "argmax_ov":
                found += [argmax_contrast(world, r, alpha(r), phi(r), "all") for r in answer]
            elif name == "argmax_ov_unit_context":
                found += [
                    argmax_contrast(world, r, alpha(r), phi(r), "context") / r.u_norm
                    for r in answer
                ]
            elif name == "headkv_r2":
                for r in content:
                    start, stop = world.needle(r)
                    top = world.top(r, layer, head, stop - start)
                    found.append(
                        sum(alpha(r)[j] for j in top if start <= j < stop) / (stop - start)
                    )
            elif name == "snapkv_window":
                found.append(max(mass(world, r, layer, head) for r in rows if r.step <= 0))
            elif name == "wu":
                found.append(
                    sum(copy_share(world, r, layer, head, lambda a, b: a == b) for r in content)
                )
            elif name == "wu_text":
                found.append(
                    sum(
                        copy_share(
                            world,
                            r,
                            layer,
                            head,
                            lambda a, b: (
                                texts[str(a)].strip().lower() == texts[str(b)].strip().lower()
                            ),
                        )
                        for r in content
                    )
                )
            else:
                share = top_share if name == "contrastive_top10" else mass
                if not answer:
                    continue
                value = float(np.mean([share(world, r, layer, head) for r in answer]))
                if others:
                    value -= float(np.mean([share(world, r, layer, head) for r in others]))
                found.append(max(value, 0.0))
        result[layer, head] = np.mean(found)
    return result


def texts() -> dict[str, str]:
    """Token texts in which ids differ by a leading space or case from their neighbour."""
    return {str(i): (f"w{i // 3}", f" w{i // 3}", f" W{i // 3}")[i % 3] for i in range(50)}


def copying(row: Row) -> Array:
    """Heads 0 and 1 put most weight on a needle token that is, by id or by text, y_t."""
    random = np.random.default_rng(row.probe * 100 + row.step + 50)
    alpha = random.dirichlet(np.full(row.length, 0.3), (2, 4))
    for head in range(2):
        position = 7 if row.token % 2 else 8
        alpha[:, head] *= 0.1
        alpha[:, head, position] += 0.9
    return alpha


def usual_probes() -> list[dict[str, Any]]:
    """Return probes of several lengths and statuses; probes 0 and 4 copy the needle's tokens."""
    ids = [(11 * j + 5) % 50 for j in range(20)]
    longer = [(3 * j + 1) % 50 for j in range(33)]
    return [
        probe_record(0, input_ids=ids, generated_ids=[ids[7], ids[8] // 3 * 3, ids[7], 2]),
        probe_record(1, status="wrong", answer_steps=[]),
        probe_record(2, input_ids=longer, generated_ids=[1, 2, 3], answer_steps=[0, 1, 2]),
        probe_record(3, has_bos=False, generated_ids=[9, 8, 7, 6, 5], answer_steps=[4]),
        probe_record(4, status="no_answer_step", answer_steps=[], generated_ids=[(7 * 7 + 4) % 50]),
        probe_record(5, status="mismatch"),
        probe_record(6, real_needle_start=7, real_needle_end=9),
    ]


def usual_world() -> World:
    world = make_world(usual_probes(), attention=copying)
    world.token_text = texts()
    return world


@pytest.mark.parametrize("name", SCORES)
def test_a_score_equals_its_definition(written: Any, name: str) -> None:
    world, path = written(usual_world)
    reference = expected(world, name)
    assert np.abs(reference).max() > 0
    np.testing.assert_allclose(score_file(path, SCORES[name]), reference, rtol=1e-4, atol=1e-6)


def grouped_world(group: int) -> World:
    return make_world([probe_record(0)], heads=8, kv_heads=8 // group, layers=1)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["locos", "argmax_ov", "alpha_spatial"])
def test_query_heads_read_their_own_group(written: Any, name: str, group: int) -> None:
    world, path = written(grouped_world, group)
    reference = expected(world, name)
    np.testing.assert_allclose(score_file(path, SCORES[name]), reference, rtol=1e-4, atol=1e-6)


SPANS = {
    "needle at the very start": {"needle_start": 0, "needle_end": 4, "haystack_start": 0,
                                 "has_bos": False},
    "needle at the very end": {"needle_start": 16, "needle_end": 20, "haystack_end": 20,
                               "question_start": None, "question_end": None},
    "needle of one token": {"needle_start": 9, "needle_end": 10},
    "no other steps": {"answer_steps": [0, 1, 2, 3]},
    "top-10 longer than the context": {
        "input_ids": [1, 2, 3, 4, 5], "needle_start": 2, "needle_end": 4, "haystack_start": 1,
        "haystack_end": 4, "question_start": 4, "question_end": 5},
}  # fmt: skip


def edge_world(edge: str) -> World:
    world = make_world([probe_record(0, **SPANS[edge])])
    world.token_text = texts()
    return world


@pytest.mark.parametrize("edge", SPANS)
@pytest.mark.parametrize("name", SCORES)
def test_a_score_equals_its_definition_at_the_edge(written: Any, name: str, edge: str) -> None:
    world, path = written(edge_world, edge)
    reference = expected(world, name)
    np.testing.assert_allclose(score_file(path, SCORES[name]), reference, rtol=1e-4, atol=1e-6)


# --- by hand


def one_head(attention: Callable[[Row], Array], **changes: Any) -> World:
    return make_world(
        [probe_record(0, **changes)], layers=1, heads=1, kv_heads=1, attention=attention
    )


def at(row: Row, weights: dict[int, float]) -> Array:
    alpha = np.zeros((1, 1, row.length))
    for position, weight in weights.items():
        alpha[0, 0, position] = weight
    return alpha


def test_a_head_that_attends_to_the_sink_only_scores_below_zero_on_alpha_and_zero_elsewhere(
    tmp_path: Path,
) -> None:
    world = one_head(lambda row: at(row, {0: 1.0}), answer_steps=[1])
    # n = 4, N_t = 21 at step 1: 0 - 1 * 4 / 17
    assert scored(world, tmp_path, SCORES["alpha_spatial"])[0, 0] == pytest.approx(-4 / 17)
    # The sink is the BOS: without it nothing is left.
    assert scored(world, tmp_path, SCORES["alpha_spatial"] | {"off": "no_bos"})[0, 0] == 0
    for name in ("wu", "contrastive_top10", "contrastive_mass", "snapkv_window", "headkv_r2"):
        assert scored(world, tmp_path, SCORES[name])[0, 0] == 0


def test_wu_counts_two_copies_of_four_needle_tokens_as_one_half(tmp_path: Path) -> None:
    ids = list(range(20))
    positions = {0: 7, 1: 8, 2: 9, 3: 12}
    world = one_head(
        lambda row: at(row, {positions.get(row.step, 0): 1.0}),
        input_ids=ids,
        generated_ids=[7, 8, 40, 12],  # copy, copy, another token, outside the needle
    )
    assert scored(world, tmp_path, SCORES["wu"])[0, 0] == pytest.approx(2 / 4)
    inner = one_head(
        lambda row: at(row, {positions.get(row.step, 0): 1.0}),
        input_ids=ids,
        generated_ids=[7, 8, 40, 12],
        real_needle_start=8,
        real_needle_end=10,
    )
    assert scored(inner, tmp_path, SCORES["wu"])[0, 0] == pytest.approx(1 / 2)


def test_wu_text_takes_a_word_with_a_leading_space_for_the_word(tmp_path: Path) -> None:
    world = one_head(
        lambda row: at(row, {7: 1.0}), input_ids=list(range(20)), generated_ids=[8, 6, 9]
    )
    world.token_text = texts()  # 6, 7, 8 are the same word, 9 is another
    assert scored(world, tmp_path, SCORES["wu_text"])[0, 0] == pytest.approx(2 / 4)
    assert scored(world, tmp_path, SCORES["wu"])[0, 0] == 0


def test_wu_text_without_token_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no token texts"):
        scored(one_head(lambda row: at(row, {7: 1.0})), tmp_path, SCORES["wu_text"])


def test_contrastive_is_the_difference_of_the_means_and_never_negative(tmp_path: Path) -> None:
    # Needle mass by step: 0.2, 0.8, 0.6, 0.0; answer steps 1 and 2.
    share = {0: 0.2, 1: 0.8, 2: 0.6, 3: 0.0}

    def attention(row: Row) -> Array:
        return at(row, {6: share.get(row.step, 0.0), 1: 0.1})

    assert scored(one_head(attention), tmp_path, SCORES["contrastive_mass"])[0, 0] == (
        pytest.approx(0.7 - 0.1)
    )
    reverse = one_head(attention, answer_steps=[0, 3])
    assert scored(reverse, tmp_path, SCORES["contrastive_mass"])[0, 0] == 0
    no_others = one_head(attention, generated_ids=[3, 4], answer_steps=[0, 1])
    assert scored(no_others, tmp_path, SCORES["contrastive_mass"])[0, 0] == pytest.approx(0.5)


def test_snapkv_takes_the_largest_of_the_last_eight_prompt_tokens(tmp_path: Path) -> None:
    share = {-8: 0.9, -7: 0.1, -3: 0.4, 0: 0.2, 1: 0.95}
    world = one_head(lambda row: at(row, {6: share.get(row.step, 0.0), 9: 0.01}),
                     status="wrong", answer_steps=[])  # fmt: skip
    assert scored(world, tmp_path, SCORES["snapkv_window"])[0, 0] == pytest.approx(0.41)


def test_headkv_counts_only_needle_keys_among_the_top_n(tmp_path: Path) -> None:
    # n = 4: the four largest are 0, 6, 7, 12; positions 8 and 9 fall behind.
    weights = {0: 0.4, 6: 0.2, 7: 0.15, 12: 0.12, 8: 0.08, 9: 0.05}
    world = one_head(lambda row: at(row, weights), generated_ids=[3, 4, 5])
    assert scored(world, tmp_path, SCORES["headkv_r2"])[0, 0] == pytest.approx(0.35 / 4)


def test_argmax_ov_takes_phi_where_attention_is_largest_not_where_phi_is(tmp_path: Path) -> None:
    world = one_head(lambda row: at(row, {6: 0.5, 7: 0.3, 1: 0.2}), answer_steps=[1])
    for row in world.rows:
        row.phi = at(row, {6: 0.25, 7: 9.0, 1: 3.4})
    # off_len = 17
    assert scored(world, tmp_path, SCORES["argmax_ov"])[0, 0] == pytest.approx(0.25 - 3.4 / 17)


def bare_world() -> World:
    """Return the edge world's probe and, after it, one without a needle."""
    bare = probe_record(1, needle_start=None, needle_end=None)
    world = make_world([probe_record(0), bare])
    world.token_text = texts()
    return world


def lone_world() -> World:
    world = bare_world()
    world.probes, world.rows = world.probes[:1], [r for r in world.rows if r.probe == 0]
    return world


@pytest.mark.parametrize("name", sorted(set(SCORES) - {"dla"}))
def test_probes_without_a_needle_leave_a_needle_score_as_it_is(written: Any, name: str) -> None:
    both, alone = (score_file(written(make)[1], SCORES[name]) for make in (bare_world, lone_world))
    np.testing.assert_array_equal(both, alone)


def test_probes_without_a_needle_count_where_no_needle_is_named(written: Any) -> None:
    settings = parse_score("test", {"dataset": "d", "formula": "total_alpha"})
    assert score_shards([written(bare_world)[1]], settings).probe_ids == ["probe-0", "probe-1"]


# --- what holds for every detector and formula


@pytest.fixture(params=[*SCORES, *sorted(set(DETECTORS) - set(SCORES))])
def score_row(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every score of this page and every detector that is registered."""
    return SCORES.get(request.param, {"detector": request.param})


def test_a_score_has_a_finite_value_a_head(written: Any, score_row: dict[str, Any]) -> None:
    values = score_file(written(usual_world)[1], score_row)
    assert values.shape == (2, 4)
    assert values.dtype == np.float64
    assert np.isfinite(values).all()


ORDER = [2, 0, 3, 1]


def permuted_world() -> World:
    world = usual_world()
    for row in world.rows:
        row.alpha, row.phi = row.alpha[:, ORDER], row.phi[:, ORDER]
    return world


def test_permuting_the_heads_permutes_the_score(written: Any, score_row: dict[str, Any]) -> None:
    before, after = (score_file(written(w)[1], score_row) for w in (usual_world, permuted_world))
    np.testing.assert_allclose(after, before[:, ORDER])


def silent_world() -> World:
    world = usual_world()
    for row in world.rows:
        row.alpha[:, 1] = row.phi[:, 1] = 0
    return world


def test_zero_attention_scores_zero(written: Any, score_row: dict[str, Any]) -> None:
    assert (score_file(written(silent_world)[1], score_row)[:, 1] == 0).all()


def shifted_world() -> World:
    """Swap the needle, positions 6 to 9, with the filler at 10 and 11, with all they have."""
    world = usual_world()
    for row in world.rows:
        moved = np.arange(row.length)
        moved[6:12] = [10, 11, 6, 7, 8, 9]
        row.alpha, row.phi = row.alpha[..., moved], row.phi[..., moved]
    for probe in world.probes:
        ids = probe["input_ids"]
        probe["input_ids"] = ids[:6] + ids[10:12] + ids[6:10] + ids[12:]
        for name in ("needle_start", "needle_end", "real_needle_start", "real_needle_end"):
            probe[name] += 2
    return world


def test_moving_the_needle_with_its_attention_leaves_the_score(
    written: Any, score_row: dict[str, Any]
) -> None:
    before, after = (score_file(written(w)[1], score_row) for w in (usual_world, shifted_world))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-7)


def part_world(*chosen: int) -> World:
    world = usual_world()
    part = World(2, 4, 2, [world.probes[i] for i in chosen], token_text=texts())
    part.rows = [row for row in world.rows if row.probe in chosen]
    for row in part.rows:
        row.probe = chosen.index(row.probe)
    return part


def test_splitting_the_probes_into_shards_leaves_the_score(
    written: Any, score_row: dict[str, Any]
) -> None:
    paths = [written(part_world, *chosen)[1] for chosen in ((0, 1), (2, 3, 4), (5, 6))]
    whole = score_file(written(usual_world)[1], score_row)
    split = score_file(paths[0], score_row, *paths[1:])
    np.testing.assert_allclose(split, whole, rtol=1e-12, atol=1e-15)


# --- the permutation filter


def test_the_permutation_p_value_equals_the_share_of_all_relabellings(tmp_path: Path) -> None:
    # One probe, 6 steps, 2 answer steps: 15 relabellings; the observed one is the largest of them.
    share = [0.9, 0.8, 0.1, 0.2, 0.15, 0.05]
    world = one_head(lambda row: at(row, {6: share[max(row.step, 0)]}),
                     generated_ids=[1, 2, 3, 4, 5, 6], answer_steps=[0, 1])  # fmt: skip
    with open_shard(write_world(world, tmp_path / "0.zarr.zip")) as shard:
        rows = Rows(shard, steps="content", gate="passed")
        test = PermutationFilter(lambda r: r.column("needle_alpha"), 4000, seed=1)
        test.add(rows)
    assert test.p_values()[0, 0] == pytest.approx(1 / 15, abs=0.015)


def test_the_filter_keeps_a_head_that_follows_the_answer_and_drops_noise(tmp_path: Path) -> None:
    def attention(row: Row) -> Array:
        random = np.random.default_rng(100 + 1000 * row.probe + row.step)
        alpha = np.zeros((1, 4, row.length))
        alpha[0, :, 6] = 0.1 * random.random(4)
        alpha[0, 2, 6] += 0.5 * row.is_answer
        return alpha

    probes = [probe_record(i) for i in range(12)]
    world = make_world(probes, layers=1, attention=attention)
    row = {"detector": "contrastive_mass"}
    plain = scored(world, tmp_path, row)
    kept = scored(world, tmp_path, row | {"permutations": 500})
    assert kept[0, 2] == plain[0, 2] > 0.4
    assert (plain[0, [0, 1, 3]] > 0).all()
    assert (kept[0, [0, 1, 3]] == 0).all()
