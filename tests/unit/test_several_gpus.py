"""Layers on two GPUs, played on the CPU: every stage gives its numbers, and no operation mixes devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from played_gpus import PlayedGpus, place, place_of
from tiny_models import capture_of, random_ids, random_model
from torch import nn

from workflow_scripts.ablation.calibration import calibrate, read_means
from workflow_scripts.ablation.generation import generate
from workflow_scripts.ablation.interventions import Intervention
from workflow_scripts.common.architecture import final_norm
from workflow_scripts.common.decoding import Conditions, PrefixRunner
from workflow_scripts.common.models import LanguageModel, wrap_model
from workflow_scripts.patching.patch_heads import Pair, patch_heads

GPUS = [torch.device("cuda:0"), torch.device("cuda:1")]
KINDS = ["llama", "qwen3", "gemma3", "olmo2", "phi3", "gpt2"]
"""Not gpt_oss: on a GPU its experts take a way of their own, which the CPU cannot play."""
HEADS = [[], [(0, 1), (1, 4)], [(1, 2)], [(0, 5)]]
DIRECTIONS = ["raw", "frozen_norm", "tuned_lens"]
GENERATOR = torch.Generator().manual_seed(0)
LENS = [torch.randn(48, 48, generator=GENERATOR) for _ in range(2)]


def spread(lm: LanguageModel) -> None:
    """Put a model of two layers on two GPUs as accelerate's device map does: a layer and its end on each."""
    first, second = GPUS

    def put(module: nn.Module, device: torch.device) -> None:
        place([*module.parameters(), *module.buffers()], device)
        add_hook_to_module(module, AlignDevicesHook(execution_device=device))

    place([*lm.model.parameters(), *lm.model.buffers()], first)
    for layer, device in zip(lm.layers, GPUS, strict=True):
        put(layer.block, device)
    put(final_norm(lm.model), second)
    embedding, head = lm.model.get_input_embeddings(), lm.model.get_output_embeddings()
    # accelerate keeps tied weights on one device
    put(head, first if head.weight is embedding.weight else second)
    add_hook_to_module(lm.model, AlignDevicesHook(execution_device=first, io_same_device=True))


def captured(lm: LanguageModel) -> dict[str, Any]:
    lm.lens = LENS
    capture = capture_of(lm, random_ids(40, 3), random_ids(3, 4), DIRECTIONS)
    return capture.dense | capture.by_region | capture.peak | {"argmax": capture.argmax}


def calibrated(lm: LanguageModel) -> dict[str, Any]:
    table = calibrate(lm, [random_ids(30, 5), random_ids(20, 6)])
    return {"mean": np.asarray(table["mean"].to_list())}


def ablated(lm: LanguageModel) -> dict[str, Any]:
    means = read_means(calibrate(lm, [random_ids(30, 5)]), "q_proj")
    shared = random_ids(20, 7)
    prompts = [shared + random_ids(12, seed) for seed in (8, 9)]
    found = {}
    for mode, site in [("mean_query", "q_proj"), ("zero_output", ""), ("knockout", "")]:
        needles = [(18, 24)] * len(prompts)
        change = Intervention(mode, site, HEADS, means, 0.5, needles)
        answers = generate(
            lm, prompts, change, max_new_tokens=6, batch_tokens=512, progress=lambda _: None
        )
        found[mode] = [answer.ids for row in answers for answer in row]
    return found


def patched(lm: LanguageModel) -> dict[str, Any]:
    clean = random_ids(30, 10)
    twin = [*clean[:12], *random_ids(4, 11), *clean[16:]]
    pair = Pair(clean, twin, 12, random_ids(3, 12))
    runner = PrefixRunner(lm, Conditions.unchanged())
    return dict(patch_heads(lm, pair, runner, batch_tokens=256).heads)


@pytest.mark.parametrize("stage", [captured, calibrated, ablated, patched])
@pytest.mark.parametrize("kind", KINDS)
def test_two_gpus_give_the_numbers_of_one_device(
    kind: str, stage: Callable[[LanguageModel], dict[str, Any]]
) -> None:
    expected = stage(random_model(kind))
    plain = random_model(kind)
    with PlayedGpus():
        spread(plain)
        lm = wrap_model(plain.model, plain.tokenizer)
        assert [place_of(layer.output_weight()) for layer in lm.layers] == GPUS
        found = stage(lm)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if name in ("mean_query", "zero_output", "knockout"):
            assert found[name] == values
        else:
            np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-6)


def test_mixed_devices_are_an_error_as_on_a_real_machine() -> None:
    with PlayedGpus():
        first, second = (torch.ones(2, device=device) for device in GPUS)
        assert (first + first.to(first.device)).device == GPUS[0]
        assert (first[torch.tensor([1])] + 1).device == GPUS[0]
        for other in (second, torch.ones(2)):
            with pytest.raises(AssertionError, match=r"add of tensors on c.*, cuda:0|cuda:1"):
                first + other
        with pytest.raises(AssertionError, match="numpy cannot read"):
            first.numpy()
        assert first.to(second.device).cpu().numpy().tolist() == [1, 1]
