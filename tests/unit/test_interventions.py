"""Ablated heads against models whose weights were changed to the same end, and against plain loops."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from tiny_models import assert_close_captures, random_ids, random_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from workflow_scripts.ablation import losses as losses_module
from workflow_scripts.ablation.calibration import calibrate, read_means
from workflow_scripts.ablation.generation import generate
from workflow_scripts.ablation.interventions import Head, Intervention, intervening
from workflow_scripts.ablation.losses import losses
from workflow_scripts.activations.capture_probes import capture_probes
from workflow_scripts.common.attention import AttentionCall, tapped
from workflow_scripts.common.decoding import Conditions, Generation
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.models import LanguageModel

KINDS = ["qwen3", "olmo2", "phi3", "gpt_neox", "gpt2"]
HEADS, DIM, LENGTH = 6, 8, 20
ALL_HEADS = [(layer, head) for layer in range(2) for head in range(HEADS)]
CHOSEN: list[Head] = [(0, 1), (1, 4)]
GENERATOR = torch.Generator().manual_seed(0)
MEANS = {head: torch.randn(DIM, generator=GENERATOR) for head in ALL_HEADS}
IDS = random_ids(LENGTH, 20)
EVERY_MODE = [
    ("mean_query", "q_proj"),
    ("mean_query", "query"),
    ("zero_query", "q_proj"),
    ("zero_query", "query"),
    ("mean_output", ""),
    ("zero_output", ""),
    ("scale", ""),
    ("knockout", ""),
    ("evict", ""),
]


@pytest.fixture(scope="module", params=KINDS)
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    return random_model(request.param)


@pytest.fixture(scope="module")
def qwen3() -> LanguageModel:
    return random_model("qwen3")


def logits_under(
    lm: LanguageModel,
    heads: list[Head],
    mode: str,
    site: str = "",
    *,
    factor: float = 0.5,
    needle: tuple[int, int] | None = (4, 9),
) -> Tensor:
    """Return the logits of every position of `IDS`."""
    conditions = Conditions.unchanged()
    conditions.lay_out([0], lm.device)
    change = Intervention(mode, site, [heads], MEANS, factor, [needle])
    with torch.inference_mode(), intervening(lm, conditions, change):
        return own_logits(lm.model)


def own_logits(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([IDS]), use_cache=False).logits
    return logits


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def linear_with_bias(module: Any) -> nn.Linear:
    """Return a projection as a plain nn.Linear with a bias, whatever class it is."""
    weight = module.weight.T if isinstance(module, Conv1D) else module.weight
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(torch.zeros(len(weight)) if module.bias is None else module.bias)
    return linear


def attention_of(model: Any, layer: int) -> Any:
    """Return the attention module of a layer, by the names its family uses."""
    if hasattr(model, "transformer"):
        return model.transformer.h[layer].attn
    if hasattr(model, "gpt_neox"):
        return model.gpt_neox.layers[layer].attention
    return model.model.layers[layer].self_attn


def replace_linear(attention: Any, names: str) -> nn.Linear:
    name = next(n for n in names.split() if hasattr(attention, n))
    linear = linear_with_bias(getattr(attention, name))
    setattr(attention, name, linear)
    return linear


def with_constant_query(lm: LanguageModel, value: Callable[[Head], Tensor]) -> Any:
    """Return a copy whose projection gives the chosen heads a query that is the same everywhere."""
    model = copy.deepcopy(lm.model)
    for layer, head in CHOSEN:
        attention = attention_of(model, layer)
        interleaved = hasattr(attention, "query_key_value")
        linear = replace_linear(attention, "q_proj query_key_value qkv_proj c_attn")
        start = head * DIM * (3 if interleaved else 1)
        with torch.no_grad():
            linear.weight[start : start + DIM] = 0
            linear.bias[start : start + DIM] = value((layer, head))
    return model


def with_changed_output(lm: LanguageModel, factor: float, add: Callable[[Head], Tensor]) -> Any:
    """Return a copy whose W_O takes `factor` of the chosen heads and adds a constant for them."""
    model = copy.deepcopy(lm.model)
    for layer, head in CHOSEN:
        linear = replace_linear(attention_of(model, layer), "o_proj dense c_proj")
        part = slice(head * DIM, (head + 1) * DIM)
        with torch.no_grad():
            linear.bias += linear.weight[:, part] @ add((layer, head))
            linear.weight[:, part] *= factor
    return model


def zero(head: Head) -> Tensor:
    return torch.zeros(DIM)


def mean(head: Head) -> Tensor:
    return MEANS[head]


@pytest.mark.parametrize(("mode", "value"), [("mean_query", mean), ("zero_query", zero)])
def test_a_query_at_q_proj_equals_zero_weights_and_a_constant_bias(
    lm: LanguageModel, mode: str, value: Callable[[Head], Tensor]
) -> None:
    found = logits_under(lm, CHOSEN, mode, "q_proj")
    assert_same(found, own_logits(with_constant_query(lm, value)))
    assert not torch.allclose(found, own_logits(lm.model), atol=1e-3)


@pytest.mark.parametrize(("mode", "value"), [("mean_query", mean), ("zero_query", zero)])
def test_a_query_at_query_equals_overwriting_the_query_norm(
    lm: LanguageModel, mode: str, value: Callable[[Head], Tensor]
) -> None:
    found = logits_under(lm, CHOSEN, mode, "query")
    if not hasattr(attention_of(lm.model, 0), "q_norm"):  # no norm: both sites are one
        assert torch.equal(found, logits_under(lm, CHOSEN, mode, "q_proj"))
        return
    model = copy.deepcopy(lm.model)
    for layer, head in CHOSEN:
        norm = attention_of(model, layer).q_norm

        def overwrite(
            module: Any, args: Any, out: Tensor, head: int = head, layer: int = layer
        ) -> Tensor:
            out = out.clone()
            if out.dim() == 3:  # one norm over all heads
                out[0, :, head * DIM : (head + 1) * DIM] = value((layer, head))
            else:  # (batch, tokens, heads, head_dim)
                out[0, :, head] = value((layer, head))
            return out

        norm.register_forward_hook(overwrite)
    assert_same(found, own_logits(model))
    assert not torch.allclose(found, own_logits(lm.model), atol=1e-3)


@pytest.mark.parametrize(
    ("mode", "kept", "add"),
    [("mean_output", 0.0, mean), ("zero_output", 0.0, zero), ("scale", 0.5, zero)],
)
def test_an_output_mode_equals_changed_columns_of_w_o(
    lm: LanguageModel, mode: str, kept: float, add: Callable[[Head], Tensor]
) -> None:
    found = logits_under(lm, CHOSEN, mode)
    assert_same(found, own_logits(with_changed_output(lm, kept, add)))
    assert not torch.allclose(found, own_logits(lm.model), atol=1e-3)


def test_scale_one_changes_no_bit(lm: LanguageModel) -> None:
    assert torch.equal(logits_under(lm, CHOSEN, "scale", factor=1.0), own_logits(lm.model))


def test_scale_zero_equals_zero_output(lm: LanguageModel) -> None:
    found = logits_under(lm, CHOSEN, "scale", factor=0.0)
    assert torch.equal(found, logits_under(lm, CHOSEN, "zero_output"))


@pytest.mark.parametrize(("mode", "site"), EVERY_MODE)
def test_an_empty_set_of_heads_changes_no_bit(lm: LanguageModel, mode: str, site: str) -> None:
    assert torch.equal(logits_under(lm, [], mode, site), own_logits(lm.model))


@pytest.mark.parametrize("layer", [0, 1])
def test_zero_output_of_all_heads_equals_the_layer_without_attention(
    lm: LanguageModel, layer: int
) -> None:
    found = logits_under(lm, [(layer, head) for head in range(HEADS)], "zero_output")
    model = copy.deepcopy(lm.model)
    attention = attention_of(model, layer)
    projection = next(
        getattr(attention, n) for n in ("o_proj", "dense", "c_proj") if hasattr(attention, n)
    )
    bias = getattr(projection, "bias", None)

    def silence(module: Any, args: Any, out: Any) -> Any:
        silent = torch.zeros_like(out[0])
        return (silent if bias is None else silent + bias, *out[1:])

    attention.register_forward_hook(silence)
    assert_same(found, own_logits(model))


def queries(lm: LanguageModel, heads: list[Head], site: str) -> dict[int, Tensor]:
    """Return each layer's query as attention sees it, (heads, tokens, head_dim)."""
    seen: dict[int, Tensor] = {}

    def keep(call: AttentionCall, output: Tensor) -> None:
        seen[call.layer] = call.query[0].clone()

    with tapped(keep):
        logits_under(lm, heads, "mean_query", site)
    return seen


def test_only_q_proj_of_olmo2_moves_the_queries_of_other_heads() -> None:
    lm = random_model("olmo2")
    before = queries(lm, [], "query")[0]
    others = [head for head in range(HEADS) if head != 1]
    at_query = queries(lm, [(0, 1)], "query")[0]
    assert torch.equal(at_query[others], before[others])
    assert not torch.allclose(at_query[1], before[1])
    at_q_proj = queries(lm, [(0, 1)], "q_proj")[0]
    assert all(not torch.allclose(at_q_proj[h], before[h], atol=1e-3) for h in others)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("needle", [(4, 9), (0, 5)])
@pytest.mark.parametrize("mode", ["knockout", "evict"])
def test_a_blind_head_reads_the_values_with_no_weight_on_the_needle(
    kind: str, needle: tuple[int, int], mode: str
) -> None:
    """Eager attention without the needle's columns, rescaled to the sum the rows would have.

    With evict, the needle's own tokens still see it.
    """
    lm = random_model(kind)
    layer, head = 0, 1
    attention = attention_of(lm.model, layer)
    kept: dict[str, Tensor] = {}
    hooks = [
        attention.o_proj.register_forward_pre_hook(lambda m, args: kept.update(z=args[0][0])),
        attention.v_proj.register_forward_hook(lambda m, args, out: kept.update(v=out[0])),
    ]
    logits_under(lm, [], mode)
    unchanged = dict(kept)
    logits_under(lm, [(layer, head)], mode, needle=needle)
    for hook in hooks:
        hook.remove()
    lm.model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = lm.model(torch.tensor([IDS]), use_cache=False, output_attentions=True)
    lm.model.set_attn_implementation("locos")
    alpha = out.attentions[layer][0, head].double()
    values = kept["v"][:, head // 3 * DIM : (head // 3 + 1) * DIM].double()
    found = kept["z"].view(LENGTH, HEADS, DIM)
    before = unchanged["z"].view(LENGTH, HEADS, DIM)
    others = [h for h in range(HEADS) if h != head]
    assert torch.equal(found[:, others], before[:, others])
    for query in range(LENGTH):
        weights = alpha[query].clone()
        if mode == "knockout" or query >= needle[1]:
            weights[needle[0] : needle[1]] = 0
        if weights.sum() == 0:  # it may see nothing else: itself
            weights[query] = alpha[query, query]
        # With a sink, exp(sink) stays in the denominator: alpha / (1 - removed).
        removed = alpha[query].sum() - weights.sum()
        expected = weights / (1 - removed) @ values
        np.testing.assert_allclose(found[query, head], expected, rtol=1e-3, atol=1e-4)


def test_knockout_changes_no_bit_where_there_is_no_needle(lm: LanguageModel) -> None:
    found = logits_under(lm, ALL_HEADS, "knockout", needle=None)
    assert torch.equal(found, own_logits(lm.model))


def plain_answer(
    lm: LanguageModel, prompt: list[int], change: Intervention, new_tokens: int
) -> Generation:
    """Generate one prompt under one condition, the whole sequence anew for every token."""
    conditions = Conditions.unchanged()
    ids: list[int] = []
    with torch.inference_mode(), intervening(lm, conditions, change):
        for _ in range(new_tokens):
            conditions.lay_out([0], lm.device)
            logits = lm.model(torch.tensor([prompt + ids]), use_cache=False).logits
            token = int(logits[0, -1].argmax())
            if token in lm.eos_ids or "\n" in lm.decode([token]):
                return Generation(ids, True)
            ids.append(token)
    return Generation(ids, False)


def shared_prefixes() -> list[list[int]]:
    """Return prompts of two lengths and two haystacks, with needles at two depths."""
    prompts = []
    for seed in (30, 31):
        haystack = random_ids(46, seed)
        for depth in (20, 34):
            for number in range(2):
                needle = random_ids(4, 40 + number)
                prompts.append(haystack[:depth] + needle + haystack[depth:] + [5, 6, 7])
    return [*prompts, prompts[0][:30], prompts[1][:30], random_ids(53, 50)]


HEAD_SETS: list[list[Head]] = [[], [(0, 1)], [(1, 0), (1, 3)], [(0, 5), (1, 2)], ALL_HEADS]


@pytest.fixture(scope="module", params=["qwen3", "gemma2", "gpt_neox", "gpt_oss", "gpt2"])
def ending(request: pytest.FixtureRequest) -> LanguageModel:
    """A model some of whose answers end early, so that rows leave the batch."""
    lm = random_model(request.param)
    first = [plain_answer(lm, p, Intervention("scale", "", [[]]), 5).ids for p in shared_prefixes()]
    lm.eos_ids = frozenset({first[0][3], first[5][2]})
    return lm


@pytest.mark.parametrize(("mode", "site"), EVERY_MODE)
def test_generation_in_batches_equals_one_by_one(
    ending: LanguageModel, mode: str, site: str
) -> None:
    prompts = shared_prefixes()
    needles: list[tuple[int, int] | None] = [(20, 24) for _ in prompts]
    needles[2], needles[-1] = (3, 11), None
    change = Intervention(mode, site, HEAD_SETS, MEANS, 0.5, needles)
    expected = [
        [
            plain_answer(ending, p, Intervention(mode, site, [heads], MEANS, 0.5, [needle]), 5)
            for p, needle in zip(prompts, needles, strict=True)
        ]
        for heads in HEAD_SETS
    ]
    assert len({g.stopped for row in expected for g in row}) == 2
    for batch_tokens in (100_000, 700, 1):
        done: list[int] = []
        found = generate(
            ending,
            prompts,
            change,
            max_new_tokens=5,
            batch_tokens=batch_tokens,
            progress=done.append,
        )
        assert found == expected
        assert sum(done) == len(prompts) * len(HEAD_SETS)


TEXTS = [random_ids(count, 60 + i) for i, count in enumerate((2, 15, 15, 31, 31, 31))]


def own_losses(model: Any) -> list[float]:
    """Return the loss that transformers itself computes, of one text after the other."""
    texts = [torch.tensor([ids]) for ids in TEXTS]
    with torch.inference_mode():
        return [float(model(ids, labels=ids, use_cache=False).loss) for ids in texts]


def losses_under(
    lm: LanguageModel, change: Intervention, batch_tokens: int = 100_000
) -> list[list[float]]:
    done: list[int] = []
    found = losses(lm, TEXTS, change, batch_tokens=batch_tokens, progress=done.append)
    assert sum(done) == len(TEXTS) * len(change.head_sets)
    return found


@pytest.mark.parametrize(
    ("mode", "changed"),
    [
        ("mean_query", lambda lm: with_constant_query(lm, mean)),
        ("zero_query", lambda lm: with_constant_query(lm, zero)),
        ("mean_output", lambda lm: with_changed_output(lm, 0.0, mean)),
        ("zero_output", lambda lm: with_changed_output(lm, 0.0, zero)),
        ("scale", lambda lm: with_changed_output(lm, 0.5, zero)),
    ],
)
def test_losses_are_those_of_transformers_on_the_model_and_on_one_with_changed_weights(
    lm: LanguageModel, mode: str, changed: Callable[[LanguageModel], Any]
) -> None:
    intact, ablated = losses_under(lm, Intervention(mode, "q_proj", [[], CHOSEN], MEANS, 0.5))
    np.testing.assert_allclose(intact, own_losses(lm.model), rtol=1e-5)
    np.testing.assert_allclose(ablated, own_losses(changed(lm)), rtol=1e-5)
    assert not np.allclose(intact, ablated, rtol=1e-4)


@pytest.mark.parametrize(("mode", "site"), EVERY_MODE)
def test_losses_in_batches_and_pieces_equal_one_by_one(
    qwen3: LanguageModel, mode: str, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = [
        losses_under(qwen3, Intervention(mode, site, [heads], MEANS, 0.5, [None] * len(TEXTS)), 1)[
            0
        ]
        for heads in HEAD_SETS
    ]
    change = Intervention(mode, site, HEAD_SETS, MEANS, 0.5, [None] * len(TEXTS))
    # Whole texts; pieces of at least 7 tokens, as 3 texts under 5 sets are read at once; of one token.
    for logit_tokens, batch_tokens in ((1024, 100_000), (7 * 15, 100_000), (7, 300)):
        monkeypatch.setattr(losses_module, "LOGIT_TOKENS", logit_tokens)
        found = losses_under(qwen3, change, batch_tokens)
        np.testing.assert_allclose(found, one_by_one, rtol=1e-5)


def test_calibration_means_equal_a_plain_loop_in_float64(lm: LanguageModel) -> None:
    prompts = [random_ids(n, n) for n in (5, 17, 30)]
    sums = {(s, *h): np.zeros(DIM) for s in ("q_proj", "query", "output") for h in ALL_HEADS}
    seen: dict[str, Tensor] = {}
    hooks = []
    for layer in range(2):
        attention = attention_of(lm.model, layer)
        first = next(
            n for n in "q_proj query_key_value qkv_proj c_attn".split() if hasattr(attention, n)
        )
        last = next(n for n in "o_proj dense c_proj".split() if hasattr(attention, n))

        def keep(name: str) -> Any:
            return lambda module, args, out: seen.__setitem__(name, out[0].clone())

        hooks.append(getattr(attention, first).register_forward_hook(keep(f"q_proj{layer}")))
        hooks.append(
            getattr(attention, last).register_forward_pre_hook(
                lambda module, args, n=f"output{layer}": seen.__setitem__(n, args[0][0].clone())
            )
        )
        if hasattr(attention, "q_norm"):
            hooks.append(attention.q_norm.register_forward_hook(keep(f"query{layer}")))
    for prompt in prompts:
        with torch.inference_mode():
            lm.model(torch.tensor([prompt]), use_cache=False)
        for layer, head in ALL_HEADS:
            for token in range(len(prompt)):
                row = seen[f"q_proj{layer}"][token]
                width = (
                    3 * DIM if hasattr(attention_of(lm.model, layer), "query_key_value") else DIM
                )
                query = row[head * width : head * width + DIM]
                sums["q_proj", layer, head] += query.double().numpy()
                if f"query{layer}" in seen:
                    query = seen[f"query{layer}"][token].reshape(HEADS, DIM)[head]
                sums["query", layer, head] += query.double().numpy()
                output = seen[f"output{layer}"][token, head * DIM : (head + 1) * DIM]
                sums["output", layer, head] += output.double().numpy()
    for hook in hooks:
        hook.remove()
    table = calibrate(lm, prompts)
    assert table.height == len(sums)
    for site in ("q_proj", "query", "output"):
        means = read_means(table, site)
        for layer, head in ALL_HEADS:
            expected = sums[site, layer, head] / 52
            np.testing.assert_allclose(means[layer, head], expected, rtol=1e-5, atol=1e-6)


@contextmanager
def little_memory(lm: LanguageModel, fits: Callable[[int, Tensor], bool]) -> Iterator[list[int]]:
    """Let the last layer run out of memory, after the first has changed the cache.

    `fits` is given the rows of the batch and the ids of the pass; the list counts the failures.
    """
    failures: list[int] = []
    latest: list[Tensor] = []
    hooks = [
        lm.model.get_input_embeddings().register_forward_pre_hook(
            lambda module, args: latest.__setitem__(slice(None), [args[0]])
        )
    ]

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        rows = (args[0] if args else kwargs["hidden_states"]).shape[0]
        if not fits(rows, latest[0]):
            failures.append(rows)
            raise torch.OutOfMemoryError("CUDA out of memory")

    hooks.append(lm.layers[-1].block.register_forward_pre_hook(refuse, with_kwargs=True))
    try:
        yield failures
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("only_decoding", [False, True])
def test_halves_after_out_of_memory_give_the_same_answers(
    qwen3: LanguageModel, only_decoding: bool
) -> None:
    def fits(rows: int, ids: Tensor) -> bool:
        return rows <= 7 or (only_decoding and ids.shape[1] > 1)

    prompts = shared_prefixes()
    change = Intervention("mean_query", "q_proj", HEAD_SETS, MEANS)

    def run() -> list[list[Generation]]:
        return generate(
            qwen3,
            prompts,
            change,
            max_new_tokens=4,
            batch_tokens=100_000,
            progress=lambda n: None,
        )

    expected = run()
    with little_memory(qwen3, fits) as failures:
        found = run()
    assert failures
    assert found == expected


def test_a_prompt_that_fits_nowhere_is_an_error_when_ablated(qwen3: LanguageModel) -> None:
    change = Intervention("scale", "", [[]])
    with (
        little_memory(qwen3, lambda rows, ids: False),
        pytest.raises(UserError, match="does not fit into memory even alone"),
    ):
        generate(qwen3, [IDS], change, max_new_tokens=2, batch_tokens=100, progress=lambda n: None)


def capture_rows(prompts: list[list[int]]) -> pl.DataFrame:
    row: dict[str, Any] = {
        "needle_id": "n",
        "haystack_id": "h",
        "question_type": "onehop",
        "depth_percent": 50.0,
        "answer": "t5",
        "has_bos": True,
        "max_new_tokens": 4,
        "max_thinking_tokens": 0,
        "forced_ids": None,
    }
    for name, span in {"needle": (20, 24), "real_needle": (21, 23), "haystack": (1, 40)}.items():
        row |= {f"{name}_start": span[0], f"{name}_end": span[1]}
    row |= {"question_start": 40, "question_end": 42}
    return pl.DataFrame(
        [
            row | {"probe_id": str(i), "input_ids": ids, "context_length": len(ids)}
            for i, ids in enumerate(prompts)
        ]
    )


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "mistral", "gpt_oss"])
def test_capture_in_batches_equals_one_probe_at_a_time(kind: str) -> None:
    lm = random_model(kind)
    # Every generated token of a document's answer is an answer step.
    rows = capture_rows(shared_prefixes()).with_columns(
        question_type=pl.lit("document"), answer=pl.lit(None, pl.String)
    )

    def run(probes: pl.DataFrame, batch_tokens: int) -> list[Any]:
        return capture_probes(
            lm,
            probes,
            directions=["raw", "frozen_norm"],
            batch_tokens=batch_tokens,
            max_length=512,
            progress=lambda n: None,
        )

    (whole,) = run(rows[:1], 1)
    lm.eos_ids = frozenset({whole.generation.ids[2]})  # so that some answers end early
    alone = [run(probe, 1)[0] for probe in rows.iter_slices(1)]
    assert len({len(result.generation.ids) for result in alone}) > 1
    for batch_tokens in (100_000, 200):
        for found, expected in zip(run(rows, batch_tokens), alone, strict=True):
            assert (found.status, found.generation) == (expected.status, expected.generation)
            assert_close_captures(found.capture, expected.capture)


def test_capture_in_halves_is_the_same_and_a_prompt_that_fits_nowhere_is_out_of_memory(
    qwen3: LanguageModel,
) -> None:
    prompts = [p for p in shared_prefixes() if len(p) == 53]
    last = len(prompts) - 1
    marked = 201  # a token of the last prompt only
    prompts[last][30] = marked

    def fits(rows: int, ids: Tensor) -> bool:
        return rows <= 2 and not bool((ids == marked).any())

    def run() -> list[Any]:
        return capture_probes(
            qwen3,
            capture_rows(prompts),
            directions=["raw"],
            batch_tokens=100_000,
            max_length=512,
            progress=lambda n: None,
        )

    expected = run()
    with little_memory(qwen3, fits) as failures:
        found = run()
    assert failures
    assert found[last].status == "out_of_memory"
    assert found[last].capture is None
    for one, other in zip(found[:last], expected[:last], strict=True):
        assert one.status == other.status
        assert one.generation == other.generation
        for name in ("alpha", "phi_raw"):
            np.testing.assert_allclose(
                one.capture.by_region[name], other.capture.by_region[name], rtol=1e-4, atol=1e-5
            )
