"""Directions against their definitions, written out in plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from workflow_scripts.activations.score_block import Answer, score_block
from workflow_scripts.common.decoding import Conditions, PrefixRunner, plan_batches, prefill_batch
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.models import LanguageModel, Source, load_tokenizer, wrap_model
from workflow_scripts.lenses.layouts import read_lens

SHAPE = {
    "vocab_size": 90,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
PROMPT = list(range(10, 32))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(Source("tests/data/golden/model"))


def make(kind: str, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    torch.manual_seed(4)
    models: dict[str, Any] = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=8, **SHAPE)),
        "gemma3": lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(head_dim=8, sliding_window=16, query_pre_attn_scalar=8, **SHAPE)
        ),
        "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SHAPE)),
    }
    model = models[kind]()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # norms start as the identity; here their gains must matter
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return wrap_model(model, tokenizer)


def captured(lm: LanguageModel, directions: list[str]) -> tuple[int, dict[str, Any]]:
    """Return the token after PROMPT, and the planes of its row, each (layers, heads, keys)."""
    runner = PrefixRunner(lm, Conditions.unchanged())
    with torch.inference_mode():
        cache, logits = prefill_batch(runner, [PROMPT], plan_batches([PROMPT], tokens=999)[0])
        cache.crop(-8)
    token = int(logits.argmax())
    regions = np.zeros(len(PROMPT), np.int64)
    (capture,) = score_block(lm, cache, [Answer(PROMPT, [token], [0], regions, (3, 6))], directions)
    return token, capture.dense


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "olmo2"])
def test_frozen_norm_sums_to_the_attentions_part_of_the_logit(
    kind: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    lm = make(kind, tokenizer)
    token, dense = captured(lm, ["raw", "frozen_norm"])
    added: dict[int, torch.Tensor] = {}  # what each attention adds to the residual stream
    final: list[torch.Tensor] = []
    hooks = []
    for layer in lm.layers:
        module = layer.block.post_attention_layernorm if kind != "qwen3" else layer.projection
        hooks.append(
            module.register_forward_hook(
                lambda m, args, out, i=layer.index: added.__setitem__(i, out[0, -1])
            )
        )
    hooks.append(
        lm.model.model.norm.register_forward_pre_hook(lambda m, args: final.append(args[0][0, -1]))
    )
    with torch.inference_mode():
        lm.model(torch.tensor([PROMPT]), use_cache=False)
    for hook in hooks:
        hook.remove()
    norm = lm.model.model.norm
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    rms = (final[0].pow(2).mean() + epsilon).sqrt()
    gain = norm.weight + 1 if kind == "gemma3" else norm.weight
    u = lm.model.lm_head.weight[token]
    for layer in lm.layers:
        expected = float(u @ (added[layer.index] / rms * gain))
        found = dense["phi_frozen_norm"][layer.index].sum()
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_tuned_lens_turns_the_unembedding_row_by_each_layers_translator(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    lm = make("qwen3", tokenizer)
    generator = torch.Generator().manual_seed(1)
    lm.lens = [torch.randn(24, 24, generator=generator) for _ in lm.layers]
    token, dense = captured(lm, ["raw", "tuned_lens"])
    values: dict[int, torch.Tensor] = {}
    hooks = [
        layer.attention.v_proj.register_forward_hook(
            lambda m, args, out, i=layer.index: values.__setitem__(i, out[0])
        )
        for layer in lm.layers
    ]
    with torch.inference_mode():
        lm.model(torch.tensor([PROMPT]), use_cache=False)
    for hook in hooks:
        hook.remove()
    u = lm.model.lm_head.weight[token]
    for layer in lm.layers:
        turned = torch.stack(
            [
                u[i] + sum(float(lm.lens[layer.index][j, i] * u[j]) for j in range(24))
                for i in range(24)
            ]
        )
        for head in range(4):
            w_o = layer.projection.weight[:, head * 8 : head * 8 + 8]
            for key in (0, 7, 21):
                value = values[layer.index][key, head // 2 * 8 : head // 2 * 8 + 8]
                expected = dense["alpha"][layer.index, head, key] * float(turned @ (w_o @ value))
                found = dense["phi_tuned_lens"][layer.index, head, key]
                assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("layout", ["full", "under translators", "flat", "layer_translators"])
def test_both_public_layouts_give_the_same_translators(tmp_path: Path, layout: str) -> None:
    matrices = [torch.full((3, 3), float(i + 1)) for i in range(2)]
    full = {i: {"A": m + torch.eye(3), "b": torch.zeros(3)} for i, m in enumerate(matrices)}
    content: Any = {
        "full": full,
        "under translators": {"translators": full},
        "flat": {f"{i}.weight": m for i, m in enumerate(matrices)} | {"0.bias": torch.ones(3)},
        "layer_translators": {f"layer_translators.{i}.weight": m for i, m in enumerate(matrices)},
    }[layout]
    path = tmp_path / "lens.pt"
    torch.save(content, path)
    for found, expected in zip(read_lens(path, 2, 3), matrices, strict=True):
        assert torch.equal(found, expected)


def test_a_lens_of_safetensors_is_read(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(2, 2)}, tmp_path / "lens.safetensors")
    assert torch.equal(read_lens(tmp_path / "lens.safetensors", 1, 2)[0], torch.ones(2, 2))


def test_a_lens_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(2, 2)}, tmp_path / "lens.safetensors")
    with pytest.raises(UserError, match="no translator of layer 1"):
        read_lens(tmp_path / "lens.safetensors", 2, 2)
    with pytest.raises(UserError, match="another model"):
        read_lens(tmp_path / "lens.safetensors", 1, 3)


def test_a_file_that_is_no_lens_is_refused_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "lens.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UserError, match="cannot be read"):
        read_lens(tmp_path / "lens.pt", 1, 2)
