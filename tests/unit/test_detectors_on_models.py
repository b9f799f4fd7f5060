"""Every detector from a captured pass against its definition on the model's own eager attention."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from synthetic_shards import Row, World, probe_record
from test_scores_detectors import SCORES, expected
from tiny_models import random_ids, random_model

from workflow_scripts.activations.capture_probes import (
    capture_probes,
    probe_records,
    region_lengths,
    shard_arrays,
    token_texts,
)
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.models import LanguageModel, Source, load_model
from workflow_scripts.common.shards import write_shard
from workflow_scripts.scores.pooling import pool_heads
from workflow_scripts.scores.score import score_shards
from workflow_scripts.scores.settings import parse_score

NEW_TOKENS = 5
BUDGET = {"max_new_tokens": NEW_TOKENS, "max_thinking_tokens": 0, "forced_ids": None}
TINY = Path("data/models/tiny")


@cache
def model(name: str) -> LanguageModel:
    """Return the planted model, or a random one with groups of 3 query heads.

    even: head 0-1 attends to all keys alike. sink: head 0-1 attends to its sink only.
    """
    if name == "tiny":
        return load_model(Source(str(TINY)), dtype="float32", device="cpu")
    lm = random_model("gpt_oss" if name == "sink" else "llama")
    attention = lm.layers[0].attention
    with torch.no_grad():
        if name == "even":
            attention.q_proj.weight[8:16] = 0
        if name == "sink":
            attention.sinks[1] = 1000.0
    return lm


def generate(lm: LanguageModel, ids: list[int]) -> list[int]:
    """Continue greedily, one whole forward pass a token, until the model's end."""
    found: list[int] = []
    with torch.inference_mode():
        while len(found) < NEW_TOKENS:
            logits = lm.model(torch.tensor([ids + found]), use_cache=False).logits
            if int(logits[0, -1].argmax()) in lm.eos_ids:
                break
            found.append(int(logits[0, -1].argmax()))
    return found


def plain_rows(lm: LanguageModel, probe: int, record: dict[str, Any]) -> list[Row]:
    """Return alpha and phi of the last 8 prompt tokens and of every generated step."""
    values: dict[int, torch.Tensor] = {}
    hooks = [
        layer.attention.v_proj.register_forward_hook(
            lambda module, args, out, i=layer.index: values.__setitem__(i, out[0])
        )
        for layer in lm.layers
    ]
    prompt, generated = record["input_ids"], record["generated_ids"]
    lm.model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = lm.model(
            torch.tensor([prompt + generated[:-1]]), output_attentions=True, use_cache=False
        ).attentions
    lm.model.set_attn_implementation("locos")
    for hook in hooks:
        hook.remove()
    rows = []
    for step in range(1 - min(8, len(prompt)), len(generated)):
        token = generated[step] if step >= 0 else -1
        length = len(prompt) + step
        u = lm.model.lm_head.weight[token].detach()
        alpha, phi = (np.zeros((len(lm.layers), lm.n_heads, length)) for _ in range(2))
        for layer in lm.layers:
            dim, group = layer.head_dim, layer.n_heads // layer.n_kv_heads
            for head in range(layer.n_heads):
                weights = attentions[layer.index][0, head, length - 1, :length]
                w_o = layer.projection.weight[:, head * dim : (head + 1) * dim].detach()
                kv = slice(head // group * dim, (head // group + 1) * dim)
                read = values[layer.index][:length, kv]
                alpha[layer.index, head] = weights
                phi[layer.index, head] = weights * (read @ (w_o.T @ u))
        answered = step in record["answer_steps"]
        rows.append(Row(probe, step, token, answered, float(u.norm()), alpha, phi))
    return rows


def probe(
    lm: LanguageModel, number: int, ids: list[int], needle: tuple[int, int], asked: slice | str
) -> dict[str, Any]:
    """Return a probe whose answer is a text, or what the model generates at some of its steps."""
    generated = generate(lm, ids)
    answer = asked if isinstance(asked, str) else lm.decode(generated[asked])
    wanted = lm.tokenizer.encode(answer, add_special_tokens=False)
    starts = range(len(generated) - len(wanted) + 1)
    first = next((i for i in starts if generated[i : i + len(wanted)] == wanted), None)
    steps = [] if first is None else list(range(first, first + len(wanted)))
    return probe_record(
        number,
        input_ids=ids,
        needle_start=needle[0],
        needle_end=needle[1],
        haystack_start=0,
        haystack_end=max(len(ids) - 3, needle[1]),
        question_start=None,
        question_end=None,
        has_bos=False,
        context_length=len(ids),
        answer=answer,
        generated_ids=generated,
        answer_steps=steps,
        status="passed" if steps else "wrong",
    )


def shard_of(lm: LanguageModel, records: list[dict[str, Any]], path: Path) -> Path:
    """Capture probes and write them without rounding; what was generated must be as expected."""
    rows = [record | BUDGET for record in records]
    table = pl.DataFrame(rows)
    results = capture_probes(
        lm,
        table,
        directions=["raw"],
        batch_tokens=200,
        max_length=4000,
        progress=lambda done: None,
    )
    for record, result in zip(records, results, strict=True):
        assert result.generation.ids == record["generated_ids"]
        assert list(result.answer_steps) == record["answer_steps"]
        assert (result.status == "passed") == (record["status"] == "passed")
    about = {
        "probes": probe_records(results, table),
        "token_text": token_texts(lm, results, table),
        "n_layers": len(lm.layers),
        "n_heads": lm.n_heads,
        "n_kv_heads": lm.layers[0].n_kv_heads,
    }
    arrays = shard_arrays(results) | {"region_length": region_lengths(results, table)}
    write_shard(path, path.with_suffix(".json"), arrays, about, {}, keep_bits=23)
    return path


def world_of(lm: LanguageModel, records: list[dict[str, Any]]) -> World:
    world = World(len(lm.layers), lm.n_heads, lm.layers[0].n_kv_heads, records)
    world.rows = [row for i, record in enumerate(records) for row in plain_rows(lm, i, record)]
    ids = {token for record in records for token in record["input_ids"] + record["generated_ids"]}
    world.token_text = {str(token): lm.decode([token]) for token in ids}
    return world


def score(path: Path, name: str) -> Any:
    settings = parse_score(name, {"dataset": "d"} | SCORES[name])
    return pool_heads(score_shards([path], settings).probes, settings.pool)


def edge_records(lm: LanguageModel, edge: str) -> list[dict[str, Any]]:
    ids = random_ids(30, 1)
    match edge:
        case "needle at the very start":
            return [probe(lm, 0, ids, (0, 4), slice(1, 3))]
        case "needle at the very end":
            return [probe(lm, 0, ids, (26, 30), slice(1, 3))]
        case "needle of one token":
            return [probe(lm, 0, ids, (9, 10), slice(1, 3))]
        case "no other steps":
            return [probe(lm, 0, ids, (9, 14), slice(0, 5))]
        case "top-10 longer than the context":
            return [probe(lm, 0, ids[:5], (1, 3), slice(0, 1))]
        case "answer found twice":
            record = probe(lm, 0, ids, (9, 14), slice(4, 5))
            return [record]
        case "one answer not found":
            unknown = lm.decode([201])
            return [
                probe(lm, 0, ids, (9, 14), slice(1, 3)),
                probe(lm, 1, random_ids(24, 9), (4, 8), unknown),
            ]
    raise ValueError(edge)


EDGES = (
    "needle at the very start,needle at the very end,needle of one token,no other steps,"
    "top-10 longer than the context,answer found twice,one answer not found"
).split(",")


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", ["llama", "even", "sink"])
def test_every_detector_equals_its_definition_at_the_edge(
    tmp_path: Path, name: str, edge: str
) -> None:
    lm = model(name)
    records = edge_records(lm, edge)
    path, world = shard_of(lm, records, tmp_path / "0.zarr.zip"), world_of(lm, records)
    for detector in SCORES:
        np.testing.assert_allclose(
            score(path, detector),
            expected(world, detector),
            rtol=1e-4,
            atol=1e-6,
            err_msg=detector,
        )


def test_a_head_that_attends_to_its_sink_only_scores_zero(tmp_path: Path) -> None:
    lm = model("sink")
    path = shard_of(lm, edge_records(lm, "needle of one token"), tmp_path / "0.zarr.zip")
    for detector in SCORES:
        assert score(path, detector)[0, 1] == 0, detector


def test_a_head_that_attends_to_all_keys_alike_takes_the_first_ten(tmp_path: Path) -> None:
    # Every key ties: the top ten are positions 0 to 9, of which the needle holds 8 and 9.
    lm = model("even")
    record = probe(lm, 0, random_ids(30, 1), (8, 12), slice(0, 5))
    path = shard_of(lm, [record], tmp_path / "0.zarr.zip")
    assert score(path, "contrastive_top10")[0, 1] == pytest.approx(2 / 10)
    # Of n = 4 keys, positions 0 to 3, none is in the needle.
    assert score(path, "headkv_r2")[0, 1] == 0
    assert score(path, "locos")[0, 1] != 0
    assert score(path, "alpha_spatial")[0, 1] == pytest.approx(0, abs=1e-7)


def test_no_answer_anywhere_is_an_error_that_counts(tmp_path: Path) -> None:
    lm = model("llama")
    records = [edge_records(lm, "one answer not found")[1]]
    path = shard_of(lm, records, tmp_path / "0.zarr.zip")
    with pytest.raises(UserError, match="nothing to rank.*truncated 1"):
        score(path, "locos")
    assert score(path, "snapkv_window").shape == (2, 6)


def test_every_detector_equals_its_definition_on_the_planted_model(tmp_path: Path) -> None:
    lm = model("tiny")
    encode = lm.tokenizer.encode
    filler = (TINY / "haystacks" / "filler_0.txt").read_text(encoding="utf-8").split(" . ")
    records = []
    for number, (name, depth) in enumerate((("Anna", 0), ("Ivan Holm", 4), ("Karl Lund", 8))):
        before = encode("".join(f"{text} . " for text in filler[:depth]))
        needle = encode(f"{name} lives next to Kiasma .")
        after = encode("".join(f"{text} . " for text in filler[depth:8]))
        asked = encode("which character has been to Helsinki ? answer :")
        ids = before + needle + after + asked
        records.append(probe(lm, number, ids, (len(before), len(before) + len(needle)), name))
    assert all(record["answer_steps"] for record in records)
    path, world = shard_of(lm, records, tmp_path / "0.zarr.zip"), world_of(lm, records)
    for detector in SCORES:
        np.testing.assert_allclose(
            score(path, detector),
            expected(world, detector),
            rtol=1e-4,
            atol=1e-5,
            err_msg=detector,
        )
