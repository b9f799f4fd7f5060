"""Random-weight models of every supported family, small enough to run in milliseconds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from transformers import AutoTokenizer

from workflow_scripts.activations.score_block import Answer, Capture, score_block
from workflow_scripts.common.decoding import Conditions, PrefixRunner
from workflow_scripts.common.models import LanguageModel, wrap_model
from workflow_scripts.common.shards import REGIONS

VOCABULARY = 202
WINDOW = 16
"""Sliding window of the families that have one."""
NEEDLE = (2, 5)
"""Where the needle of a capture lies."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SLIDING: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
OWN_NAMES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _gemma3_text() -> dict[str, Any]:
    return {**COMMON, **SLIDING, "query_pre_attn_scalar": 8}


def _gemma3_wrapper() -> tf.PreTrainedModel:
    config = tf.Gemma3Config(
        text_config=_gemma3_text(), vision_config=VISION, mm_tokens_per_image=4, image_token_id=201
    )
    return tf.Gemma3ForConditionalGeneration(config)


def _build(family: str) -> tf.PreTrainedModel:
    plain = {
        "llama": (tf.LlamaConfig, COMMON),
        "qwen2": (tf.Qwen2Config, COMMON),
        "qwen3": (tf.Qwen3Config, COMMON),
        "qwen3_moe": (tf.Qwen3MoeConfig, {**COMMON, **EXPERTS, "num_experts": 4}),
        "gemma2": (tf.Gemma2Config, {**_gemma3_text(), "attn_logit_softcapping": 2.0}),
        "gemma3_text": (tf.Gemma3TextConfig, _gemma3_text()),
        "olmo2": (tf.Olmo2Config, COMMON),
        "olmo3": (tf.Olmo3Config, {**COMMON, **SLIDING}),
        "mistral": (tf.MistralConfig, {**COMMON, "sliding_window": WINDOW}),
        "phi3": (tf.Phi3Config, {**COMMON, "sliding_window": WINDOW}),
        "gpt_oss": (tf.GptOssConfig, {**COMMON, **SLIDING, **EXPERTS, "num_local_experts": 4}),
        "gpt2": (tf.GPT2Config, OWN_NAMES),
        "gpt_neox": (tf.GPTNeoXConfig, COMMON),
    }
    if family == "gemma3":
        return _gemma3_wrapper()
    kind, settings = plain[family]
    model: tf.PreTrainedModel = tf.AutoModelForCausalLM.from_config(
        kind(**settings), dtype=torch.float32
    )
    return model


FAMILIES = (
    "llama qwen2 qwen3 qwen3_moe gemma2 gemma3_text gemma3 olmo2 olmo3 mistral phi3 gpt_oss gpt2 "
    "gpt_neox"
).split()


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(Path("tests/data/golden/model"))


def random_model(family: str) -> LanguageModel:
    """Return a model of a family; biases, norm gains and sinks are random, not at their start."""
    torch.manual_seed(3)
    model = _build(family).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                noise = torch.randn_like(parameter)
                parameter.add_(noise, alpha=1.0 if name.endswith("sinks") else 0.2)
    return wrap_model(model, tokenizer())


def random_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(3, 200, (count,), generator=generator).tolist()
    return drawn


@torch.inference_mode()
def capture_of(
    lm: LanguageModel,
    prompt: list[int],
    generated: list[int],
    directions: list[str],
    needle: tuple[int, int] = NEEDLE,
) -> Capture:
    """Read the rows of some generated ids, every one an answer step."""
    runner = PrefixRunner(lm, Conditions.unchanged())
    cache, _ = runner.prefill([prompt], [0], 0)
    cache.crop(-8)
    regions = np.full(len(prompt), REGIONS.index("template"))
    regions[slice(*needle)] = REGIONS.index("needle")
    steps = list(range(len(generated)))
    answer = Answer(prompt, generated, steps, regions, needle)
    (capture,) = score_block(lm, cache, [answer], directions)
    return capture


def assert_close_captures(found: Capture, expected: Capture) -> None:
    """Compare two captures of one probe: floats to rounding, counts and positions exactly."""
    for part in ("by_region", "peak", "dense"):
        values, others = getattr(found, part), getattr(expected, part)
        assert values.keys() == others.keys()
        for name in values:
            assert values[name].shape == others[name].shape
            np.testing.assert_allclose(values[name], others[name], rtol=1e-4, atol=1e-5)
    for name in ("argmax", "top10_in_needle", "step", "token", "length"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_allclose(found.topn_needle_alpha, expected.topn_needle_alpha, atol=1e-5)
