"""The contract of every supported family, on random weights of its own class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from tiny_models import (
    COMMON,
    FAMILIES,
    NEEDLE,
    WINDOW,
    capture_of,
    random_ids,
    random_model,
    tokenizer,
)
from torch import Tensor

from workflow_scripts.common import attention, decoding
from workflow_scripts.common.architecture import REFUSED, refuse_unknown_family
from workflow_scripts.common.decoding import Conditions, PrefixRunner
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.models import LanguageModel, wrap_model
from workflow_scripts.common.shards import REGIONS

WINDOWED = {"gemma2": [0], "gemma3_text": [0], "gemma3": [0], "olmo3": [0], "gpt_oss": [0]}
WINDOWED |= {"mistral": [0, 1], "phi3": [0, 1]}
POST_NORM = ["gemma2", "gemma3_text", "gemma3", "olmo2", "olmo3"]
LAYER_NORM = ["gpt2", "gpt_neox"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def lm(family: str) -> LanguageModel:
    return random_model(family)


@contextmanager
def eager(lm: LanguageModel) -> Iterator[None]:
    lm.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        lm.model.set_attn_implementation("locos")


@torch.inference_mode()
def inside(lm: LanguageModel, ids: list[int]) -> tuple[dict[Any, Tensor], Any]:
    """Run the model's own eager attention; return what goes in and out of W_O, and the output."""
    kept: dict[Any, Tensor] = {}
    hooks = []
    for layer in lm.layers:

        def keep(module: Any, args: Any, out: Tensor, index: int = layer.index) -> None:
            kept["in", index], kept["out", index] = args[0][0], out[0]

        hooks.append(layer.projection.register_forward_hook(keep))
    with eager(lm):
        out = lm.model(torch.tensor([ids]), use_cache=False, output_attentions=True)
    for hook in hooks:
        hook.remove()
    return kept, out


def test_logits_equal_the_familys_own_eager_attention_beyond_the_window(lm: LanguageModel) -> None:
    ids = torch.tensor([random_ids(3 * WINDOW, 1)])
    with torch.inference_mode():
        found = lm.model(ids, use_cache=False).logits
        with eager(lm):
            expected = lm.model(ids, use_cache=False).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "CHUNK_TOKENS", 11)
    prompt = random_ids(3 * WINDOW, 2)
    with torch.inference_mode(), eager(lm):
        expected = lm.model(torch.tensor([prompt]), use_cache=False).logits
    with torch.inference_mode():
        _, found = PrefixRunner(lm, Conditions.unchanged()).prefill([prompt], [0], 0)
    assert found.shape == (1, expected.shape[-1])  # of the last position only
    assert (found[0] - expected[0, -1]).abs().max() <= 1e-4 * expected.abs().max()


def test_alpha_and_phi_equal_the_familys_own_eager_attention(
    lm: LanguageModel, family: str, record_property: Callable[[str, object], None]
) -> None:
    prompt, generated = random_ids(40, 3), random_ids(3, 4)
    capture = capture_of(lm, prompt, generated, ["raw"])
    kept, out = inside(lm, prompt + generated[:-1])
    unembedding = lm.model.get_output_embeddings().weight
    dim, worst, offset = lm.layers[0].head_dim, 0.0, 0
    for step, token in enumerate(generated):
        query = len(prompt) - 1 + step
        cells = slice(offset, offset + query + 1)
        offset = cells.stop
        for layer in lm.layers:
            weight = layer.projection.weight
            if isinstance(layer.projection, tf.pytorch_utils.Conv1D):
                weight = weight.T
            scale = float(unembedding[token].norm())
            for head in range(lm.n_heads):
                attention = out.attentions[layer.index][0, head, query, : query + 1]
                np.testing.assert_allclose(
                    capture.dense["alpha"][layer.index, head, cells], attention, atol=1e-6
                )
                part = slice(head * dim, (head + 1) * dim)
                written = weight[:, part] @ kept["in", layer.index][query, part]
                expected = float(unembedding[token] @ written)
                found = capture.dense["phi_raw"][layer.index, head, cells].sum()
                worst = max(worst, abs(found - expected) / (scale * float(written.norm())))
                at = NEEDLE[0] + int(attention[slice(*NEEDLE)].argmax())
                peak = capture.dense["phi_raw"][layer.index, head, cells][at]
                assert capture.peak["phi_raw"][step + 7, layer.index, head] == peak
    assert offset == capture.dense["alpha"].shape[2]
    record_property("identity error", f"{family:12} {worst:.1e}")
    assert worst < 1e-5


def test_log_probabilities_are_those_of_the_rows_that_predict_the_answer(
    lm: LanguageModel,
) -> None:
    prompt, generated = random_ids(40, 14), random_ids(3, 15)
    capture = capture_of(lm, prompt, generated, ["raw"])
    _, out = inside(lm, prompt + generated[:-1])
    assert np.isnan(capture.logprob[:7]).all()
    for step, token in enumerate(generated):
        row = out.logits[0, len(prompt) - 1 + step].double()
        expected = float(row[token] - row.exp().sum().log())
        assert capture.logprob[7 + step] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", [*POST_NORM, *LAYER_NORM, "llama", "gpt_oss"], indirect=True)
def test_frozen_norm_sums_to_the_sublayers_part_of_the_logit(lm: LanguageModel) -> None:
    """A norm with its statistics frozen is linear: gain * (part - its mean) / scale of the whole."""
    prompt, generated = random_ids(40, 5), random_ids(2, 6)
    capture = capture_of(lm, prompt, generated, ["raw", "frozen_norm"])
    hidden: list[Tensor] = []
    decoder = lm.model.get_decoder() if hasattr(lm.model, "get_decoder") else lm.model.base_model
    decoder = getattr(decoder, "language_model", decoder)
    norm = next(
        getattr(decoder, n) for n in ("norm", "ln_f", "final_layer_norm") if hasattr(decoder, n)
    )
    hook = norm.register_forward_pre_hook(lambda module, args: hidden.append(args[0][0]))
    kept, _ = inside(lm, prompt + generated[:-1])
    hook.remove()

    def frozen(module: Any, at: Tensor, part: Tensor) -> Tensor:
        """Apply a norm to a part of its input, with the statistics of the whole input."""
        at, part = at.double(), part.double()
        gain = module.weight.double()
        if "Gemma" in type(module).__name__:
            gain = 1 + gain
        epsilon = next(
            getattr(module, n) for n in ("variance_epsilon", "eps") if hasattr(module, n)
        )
        if isinstance(module, torch.nn.LayerNorm):
            at, part = at - at.mean(), part - part.mean()
        result: Tensor = gain * part / (at.square().mean() + epsilon).sqrt()
        return result

    unembedding = lm.model.get_output_embeddings().weight.double()
    offset = 0
    for step, token in enumerate(generated):
        query = len(prompt) - 1 + step
        cells = slice(offset, offset + query + 1)
        offset = cells.stop
        for layer in lm.layers:
            bias = getattr(layer.projection, "bias", None)
            written = kept["out", layer.index][query]
            part = written - (0 if bias is None else bias)
            named = dict(layer.block.named_modules())
            if lm.model.config.model_type.startswith(("gemma", "olmo")):
                part = frozen(named["post_attention_layernorm"], written, part)
            expected = float(unembedding[token] @ frozen(norm, hidden[0][query], part))
            found = capture.dense["phi_frozen_norm"][layer.index][:, cells].sum()
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
            rows = capture.by_region["phi_frozen_norm"][step + 7, layer.index].sum()
            assert rows == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("family", list(WINDOWED), indirect=True)
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW])
def test_alpha_at_the_edge_of_the_window_equals_eager(lm: LanguageModel, length: int) -> None:
    prompt, generated = random_ids(length, 7), random_ids(3, 8)
    capture = capture_of(lm, prompt, generated, ["raw"])
    _, out = inside(lm, prompt + generated[:-1])
    offset = 0
    for step in range(3):
        query = length - 1 + step
        for layer in range(2):
            np.testing.assert_allclose(
                capture.dense["alpha"][layer, :, offset : offset + query + 1],
                out.attentions[layer][0, :, query, : query + 1],
                atol=1e-6,
            )
        offset += query + 1


@pytest.mark.parametrize("family", list(WINDOWED), indirect=True)
def test_a_needle_outside_the_window_scores_exactly_zero_in_windowed_layers(
    lm: LanguageModel, family: str
) -> None:
    capture = capture_of(lm, random_ids(2 * WINDOW + 8, 9), random_ids(2, 10), ["raw"], (3, 6))
    needle = REGIONS.index("needle")
    for layer in range(2):
        rows = [capture.by_region[name][7:, layer, :, needle] for name in ("alpha", "phi_raw")]
        if layer in WINDOWED[family]:
            assert all((values == 0).all() for values in rows)
            assert (capture.topn_needle_alpha[7:, layer] == 0).all()
            assert (capture.top10_in_needle[7:, layer] == 0).all()
        else:
            assert all((values != 0).all() for values in rows)


def test_attention_of_a_bfloat16_model_sums_to_one_in_float32() -> None:
    lm = random_model("qwen3")
    lm.model.bfloat16()
    capture = capture_of(lm, random_ids(200, 11), random_ids(2, 12), ["raw"])
    assert capture.dense["alpha"].dtype == np.float32
    np.testing.assert_allclose(capture.by_region["alpha"].sum(-1), 1, atol=1e-6)


def test_sinks_take_attention_away_from_every_row() -> None:
    capture = capture_of(random_model("gpt_oss"), random_ids(40, 13), [5, 6], ["raw"])
    assert (capture.by_region["alpha"].sum(-1) < 1).all()


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_refused_family_is_named_before_any_weights(kind: str) -> None:
    config = tf.AutoConfig.for_model(kind)
    with pytest.raises(UserError, match=f"'{kind}' cannot be captured"):
        refuse_unknown_family(config, "some-model")


def test_a_model_that_gates_its_attention_output_is_refused_by_the_identity_check() -> None:
    lm = random_model("llama")
    projection = lm.layers[1].projection
    projection.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    with pytest.raises(UserError, match="layer 1: the attention output is changed before W_O"):
        wrap_model(lm.model, lm.tokenizer)


def test_an_attention_that_differs_from_eager_is_refused_by_the_identity_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = random_model("llama")
    stock = attention.sdpa_attention_forward

    def off_by_a_percent(*args: Any, **kwargs: Any) -> Any:
        output, weights = stock(*args, **kwargs)
        return output * 1.01, weights

    monkeypatch.setattr(attention, "sdpa_attention_forward", off_by_a_percent)
    with pytest.raises(
        UserError, match="layer 0: the attention differs from the model's own eager"
    ):
        wrap_model(lm.model, lm.tokenizer)


def test_a_bfloat16_model_whose_logits_drown_in_rounding_is_not_refused() -> None:
    torch.manual_seed(1)
    config = tf.LlamaConfig(**(COMMON | {"num_hidden_layers": 12, "initializer_range": 1.0}))
    model = tf.LlamaForCausalLM(config).eval().bfloat16()
    ids = torch.arange(1, 9)[None]
    logits = []
    with torch.inference_mode():
        for kind in ("sdpa", "eager"):
            model.set_attn_implementation(kind)
            logits.append(model(ids).logits.float())
    # Both are the model's own; so far apart are they after twelve layers.
    assert (logits[0] - logits[1]).abs().max() > 0.05 * logits[1].abs().max()
    assert len(wrap_model(model, tokenizer()).layers) == 12
