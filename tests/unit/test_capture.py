"""Capture against the public code's values, and against plain loops over heads and positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

from workflow_scripts.activations.capture_probes import (
    ProbeResult,
    capture_probes,
    probe_records,
    region_lengths,
    shard_arrays,
    token_texts,
)
from workflow_scripts.activations.score_block import Answer, score_block
from workflow_scripts.common import decoding
from workflow_scripts.common.decoding import (
    Conditions,
    Generation,
    PrefixRunner,
    plan_batches,
    prefill_batch,
)
from workflow_scripts.common.models import LanguageModel, Source, load_model, wrap_model
from workflow_scripts.common.shards import REGIONS, write_shard
from workflow_scripts.scores.pooling import pool_heads
from workflow_scripts.scores.score import score_shards
from workflow_scripts.scores.settings import parse_score

GOLDEN = Path("tests/data/golden")
CASES = json.loads((GOLDEN / "cases.json").read_text())
SCORES: dict[str, dict[str, Any]] = {
    "locos": {"formula": "needle_phi - off_phi * needle_len / off_len"},
    "needle_phi": {"formula": "needle_phi"},
    "off_phi_rescaled": {"formula": "off_phi * needle_len / off_len"},
    "alpha_spatial": {"formula": "needle_alpha - off_alpha * needle_len / off_len"},
    "dla": {"formula": "needle_phi + off_phi"},
    "contrastive_top10": {"detector": "contrastive_top10"},
    "snapkv_window": {"detector": "snapkv_window"},
    "wu": {"detector": "wu"},
}
LOCOS = SCORES["locos"]["formula"]


@pytest.fixture(scope="module")
def golden_model() -> LanguageModel:
    return load_model(Source(str(GOLDEN / "model")), dtype="float32", device="cpu")


@pytest.fixture(scope="module", params=[(4, 4), (4, 2), (4, 1), (8, 1)], ids=str)
def random_model(request: pytest.FixtureRequest, golden_model: LanguageModel) -> LanguageModel:
    heads, kv_heads = request.param
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=202,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    return wrap_model(Qwen3ForCausalLM(config), golden_model.tokenizer)


def probe_row(
    ids: list[int], needle: tuple[int, int], answer: str, new_tokens: int
) -> dict[str, Any]:
    spans = {"needle": needle, "real_needle": needle, "haystack": (2, len(ids) - 3)}
    spans["question"] = (len(ids) - 3, len(ids) - 1)
    row: dict[str, Any] = {
        "probe_id": f"{needle}{answer}",
        "needle_id": "n",
        "haystack_id": "h",
        "question_type": "onehop",
        "context_length": len(ids),
        "depth_percent": 50.0,
        "answer": answer,
        "has_bos": True,
        "input_ids": ids,
        "max_new_tokens": new_tokens,
        "forced_ids": None,
        "max_thinking_tokens": 0,
    }
    for name, (start, stop) in spans.items():
        row |= {f"{name}_start": start, f"{name}_end": stop}
    return row


def score_of(
    lm: LanguageModel,
    rows: list[dict[str, Any]],
    results: list[ProbeResult],
    folder: Path,
    name: str,
    row: dict[str, Any],
) -> Any:
    """Write a shard without rounding and return a score's values, (layers, heads)."""
    probes = pl.DataFrame(rows)
    path = folder / "0.zarr.zip"
    about = {
        "probes": probe_records(results, probes),
        "token_text": token_texts(lm, results, probes),
        "n_layers": len(lm.layers),
        "n_heads": lm.n_heads,
        "n_kv_heads": lm.layers[0].n_kv_heads,
    }
    arrays = shard_arrays(results) | {"region_length": region_lengths(results, probes)}
    write_shard(
        path, folder / "0.json", arrays, about, {}, device="cpu", wall_seconds=0, keep_bits=23
    )
    settings = parse_score(name, {"dataset": "golden", **row})
    return pool_heads(score_shards([path], settings).probes, settings.pool)


def forced(lm: LanguageModel, case: dict[str, Any]) -> ProbeResult:
    """Read a case's rows with its own generated ids, whatever this model would generate."""
    ids = case["input_ids"]
    runner = PrefixRunner(lm, Conditions.unchanged())
    with torch.inference_mode():
        cache, _ = prefill_batch(runner, [ids], plan_batches([ids], tokens=10_000)[0])
        cache.crop(-8)
    needle = (case["needle_start"], case["needle_end"])
    regions = np.full(len(ids), REGIONS.index("template"))
    regions[slice(*needle)] = REGIONS.index("needle")
    answer = Answer(ids, case["generated_ids"], case["answer_steps"], regions, needle)
    (capture,) = score_block(lm, cache, [answer], ["raw"])
    assert capture.reproduced
    generation = Generation(case["generated_ids"], True)
    return ProbeResult("passed", generation, "", 1.0, case["answer_steps"], capture)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_scores_equal_the_public_code(
    golden_model: LanguageModel, tmp_path: Path, number: int, name: str
) -> None:
    case = CASES[number]
    expected = case[name]
    row = probe_row(
        case["input_ids"], (case["needle_start"], case["needle_end"]), case["answer"], 6
    )
    row |= {f"{part}_{end}": None for part in ("haystack", "question") for end in ("start", "end")}
    row["has_bos"] = False
    found = score_of(
        golden_model, [row], [forced(golden_model, case)], tmp_path, name, SCORES[name]
    )
    if expected is None:  # the needle reaches into the window: the public code gives no value
        assert name == "snapkv_window"
        assert case["needle_end"] > len(case["input_ids"]) - 8
    else:
        np.testing.assert_allclose(found, np.array(expected), rtol=1e-4, atol=1e-6)


def plain_planes(
    lm: LanguageModel, ids: list[int], step: int, prompt: int, token: int
) -> tuple[Any, Any]:
    """Return alpha and phi of one row, (layers, heads, keys), by plain loops from eager attention."""
    kept: dict[int, torch.Tensor] = {}
    hooks = [
        layer.attention.v_proj.register_forward_hook(
            lambda module, args, out, i=layer.index: kept.__setitem__(i, out[0])
        )
        for layer in lm.layers
    ]
    lm.model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = lm.model(
            torch.tensor([ids]), output_attentions=True, use_cache=False
        ).attentions
    lm.model.set_attn_implementation("locos")
    for hook in hooks:
        hook.remove()
    query = prompt - 1 + step
    u = lm.model.lm_head.weight[token]
    alpha = np.zeros((len(lm.layers), lm.n_heads, query + 1))
    phi = np.zeros_like(alpha)
    for layer in lm.layers:
        dim = layer.head_dim
        for head in range(layer.n_heads):
            kv = head // (layer.n_heads // layer.n_kv_heads)
            w_o = layer.projection.weight[:, head * dim : (head + 1) * dim]
            for key in range(query + 1):
                value = kept[layer.index][key, kv * dim : (kv + 1) * dim]
                a = float(attentions[layer.index][0, head, query, key])
                alpha[layer.index, head, key] = a
                phi[layer.index, head, key] = a * float(u @ (w_o @ value))
    return alpha, phi


def test_capture_equals_plain_loops_over_heads_and_positions(
    random_model: LanguageModel, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(15)
    draws = [torch.randint(3, 200, (30,), generator=generator).tolist() for _ in range(3)]
    draws[1][:12] = draws[0][:12]  # two share a prefix
    new_tokens = 5
    with torch.inference_mode():
        answers = []
        for ids in draws:
            out = list(ids)
            for _ in range(new_tokens):
                out.append(int(random_model.model(torch.tensor([out])).logits[0, -1].argmax()))
            answers.append(out[30:])
    rows = [
        probe_row(ids, (14, 19), random_model.decode(answer[1:3]), new_tokens)
        for ids, answer in zip(draws, answers, strict=True)
    ]
    results = capture_probes(
        random_model,
        pl.DataFrame(rows),
        directions=["raw"],
        batch_tokens=70,
        max_length=1000,
        progress=lambda _: None,
    )
    sums, steps = np.zeros((2, random_model.n_heads)), 0
    for ids, answer, result in zip(draws, answers, results, strict=True):
        assert result.status == "passed"
        assert result.generation.ids == answer
        assert result.capture is not None
        offset = 0
        for step in result.answer_steps:
            alpha, phi = plain_planes(random_model, ids + answer[:-1], step, 30, answer[step])
            cells = slice(offset, offset + 30 + step)
            offset = cells.stop
            dense = result.capture.dense
            np.testing.assert_allclose(dense["alpha"][:, :, cells], alpha, rtol=1e-4, atol=1e-7)
            np.testing.assert_allclose(dense["phi_raw"][:, :, cells], phi, rtol=1e-4, atol=1e-5)
            inside, keys = phi[..., 14:19].sum(-1), phi.shape[-1]
            sums += inside - (phi.sum(-1) - inside) * 5 / (keys - 5)
            steps += 1
        assert offset == result.capture.dense["alpha"].shape[2]
    found = score_of(random_model, rows, results, tmp_path, "locos", {"formula": LOCOS})
    np.testing.assert_allclose(found, sums / steps, rtol=1e-4, atol=1e-5)


def test_contributions_sum_to_what_the_head_writes(random_model: LanguageModel) -> None:
    ids = torch.Generator().manual_seed(2)
    prompt = torch.randint(3, 200, (25,), generator=ids).tolist()
    inputs: dict[int, torch.Tensor] = {}
    hooks = [
        layer.projection.register_forward_hook(
            lambda module, args, out, i=layer.index: inputs.__setitem__(i, args[0][0, -1])
        )
        for layer in random_model.layers
    ]
    with torch.inference_mode():
        token = int(random_model.model(torch.tensor([prompt])).logits[0, -1].argmax())
    for hook in hooks:
        hook.remove()
    case = {
        "input_ids": prompt,
        "generated_ids": [token],
        "answer_steps": [0],
        "needle_start": 4,
        "needle_end": 7,
    }
    capture = forced(random_model, case).capture
    assert capture is not None
    u = random_model.model.lm_head.weight[token]
    for layer in random_model.layers:
        dim = layer.head_dim
        for head in range(layer.n_heads):
            part = slice(head * dim, (head + 1) * dim)
            written = float(u @ (layer.projection.weight[:, part] @ inputs[layer.index][part]))
            total = capture.dense["phi_raw"][layer.index, head].sum()
            assert total == pytest.approx(written, rel=1e-4, abs=1e-5)


def test_a_later_token_changes_no_earlier_logit(random_model: LanguageModel) -> None:
    ids = torch.randint(3, 200, (1, 20), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[0, 15] = (changed[0, 15] + 1) % 200
    with torch.inference_mode():
        before, after = (random_model.model(x, use_cache=False).logits for x in (ids, changed))
    assert torch.equal(before[0, :15], after[0, :15])
    assert not torch.allclose(before[0, 15:], after[0, 15:])


def test_equal_prompts_with_other_forced_answers_are_captured_as_each_alone(
    golden_model: LanguageModel,
) -> None:
    ids = list(range(3, 43))
    rows = [
        probe_row(ids, (10, 14), golden_model.decode(forced), len(forced)) | {"forced_ids": forced}
        for forced in ([50, 51], [60, 61])
    ]

    def captured(chosen: list[dict[str, Any]]) -> list[ProbeResult]:
        return capture_probes(
            golden_model,
            pl.DataFrame(chosen),
            directions=["raw"],
            batch_tokens=1000,
            max_length=1000,
            progress=lambda _: None,
        )

    for row, result in zip(rows, captured(rows), strict=True):
        assert (result.status, result.generation.ids) == ("forced", row["forced_ids"])
        assert result.answer_steps == [0, 1]
        (alone,) = captured([row])
        assert result.capture is not None
        assert alone.capture is not None
        for name, plane in result.capture.dense.items():
            np.testing.assert_allclose(plane, alone.capture.dense[name], rtol=1e-4, atol=1e-6)
        for step, token in enumerate(row["forced_ids"]):
            alpha, phi = plain_planes(golden_model, ids + row["forced_ids"][:-1], step, 40, token)
            cells = slice(0, 40) if step == 0 else slice(40, 81)
            dense = result.capture.dense
            np.testing.assert_allclose(dense["alpha"][:, :, cells], alpha, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(dense["phi_raw"][:, :, cells], phi, rtol=1e-4, atol=1e-5)


def test_a_probe_beyond_the_models_positions_is_too_long(golden_model: LanguageModel) -> None:
    row = probe_row(list(range(3, 43)), (10, 14), "t5", 5)
    (result,) = capture_probes(
        golden_model,
        pl.DataFrame([row]),
        directions=["raw"],
        batch_tokens=100,
        max_length=44,
        progress=lambda _: None,
    )
    assert result.status == "too_long"
    assert result.capture is None


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_no_matrix_of_prompt_by_prompt_is_made(
    random_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "CHUNK_TOKENS", 64)
    largest = []
    for length in (400, 800):
        ids = torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(3)).tolist()
        with LargestTensor() as seen:
            (result,) = capture_probes(
                random_model,
                pl.DataFrame([probe_row(ids, (10, 14), "t5", 4)]),
                directions=["raw", "frozen_norm"],
                batch_tokens=8192,
                max_length=32768,
                progress=lambda _: None,
            )
        assert result.capture is not None
        assert length < seen.elements < length * length / 2
        largest.append(seen.elements)
    assert largest[1] <= 2 * largest[0]
