"""Tuned lenses: trained by their objective, written and fetched in the public layouts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tiny_models import COMMON, random_ids, random_model, tokenizer
from torch import Tensor

from workflow_scripts.common.errors import UserError
from workflow_scripts.common.models import LanguageModel, Source, load_model, wrap_model
from workflow_scripts.lenses import fetch_lens
from workflow_scripts.lenses.layouts import read_lens, write_lens
from workflow_scripts.lenses.training import (
    Translator,
    hold_out,
    mean_divergences,
    read_streams,
    token_windows,
    train_lens,
    unembed,
)

TINY = Path("data/models/tiny")
COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def tiny() -> LanguageModel:
    return load_model(Source(str(TINY)), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def windows(tiny: LanguageModel) -> tuple[Tensor, Tensor]:
    """Sequences held out and to train on."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((TINY / "haystacks").iterdir())]
    return hold_out(token_windows(tiny, texts), seed=1)


def trained(lm: LanguageModel, sequences: Tensor, **changes: Any) -> list[Translator]:
    settings = {"steps": 12, "tokens": 512, "rank": 8, "seed": 3} | changes
    return train_lens(lm, sequences, **settings, progress=lambda done: None)


def plain_divergences(lm: LanguageModel, lens: list[tuple[Tensor, Tensor]], ids: Tensor) -> Any:
    """Return KL(model || lens) of each layer by its definition, the mean over tokens."""
    with torch.no_grad():
        out = lm.model(ids, output_hidden_states=True, use_cache=False)
        log_p = out.logits.double().log_softmax(-1)
        found = []
        for (a, b), h in zip(lens, out.hidden_states[:-1], strict=True):
            logits = lm.model.lm_head(lm.model.model.norm(h + h @ a.T + b))
            log_q = logits.double().log_softmax(-1)
            found.append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
    return found


@pytest.mark.parametrize("rank", [8, 1000])
def test_a_trained_lens_is_nearer_to_the_model_than_the_identity_at_every_layer(
    tiny: LanguageModel, windows: tuple[Tensor, Tensor], rank: int
) -> None:
    held_out, training = windows
    lens = trained(tiny, training, rank=rank)
    zero = torch.zeros(192)
    before = plain_divergences(tiny, [(torch.diag(zero), zero)] * 4, held_out)
    after = plain_divergences(tiny, [(t.weight().detach(), t.bias) for t in lens], held_out)
    assert all(trained < untrained for trained, untrained in zip(after, before, strict=True))
    assert mean_divergences(tiny, lens, held_out) == pytest.approx(after, rel=1e-4)


def test_a_lens_of_low_rank_is_written_as_the_full_matrix_that_it_applies(
    tiny: LanguageModel, windows: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    lens = trained(tiny, windows[1], steps=6, rank=3)
    path = tmp_path / "lens.safetensors"
    weights = [translator.weight().detach() for translator in lens]
    write_lens(path, weights, [translator.bias.detach() for translator in lens], spec={})
    hidden = torch.randn(5, 192, generator=torch.Generator().manual_seed(1))
    biases = load_file(path)
    for layer, matrix in enumerate(read_lens(path, 4, 192)):
        sizes = torch.linalg.svdvals(matrix)
        assert sizes[3] < 1e-4 * sizes[0]
        expected = hidden + (hidden @ lens[layer].down.T) @ lens[layer].up.T + lens[layer].bias
        found = hidden + hidden @ matrix.T + biases[f"{layer}.bias"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_from_the_models_width_on_the_whole_matrix_is_trained() -> None:
    whole = Translator(6, 6, torch.Generator())
    assert {name: p.shape for name, p in whole.named_parameters()} == {"up": (6, 6), "bias": (6,)}
    with torch.no_grad():
        whole.up.copy_(torch.arange(36.0).view(6, 6))
    assert torch.equal(whole.weight(), whole.up)


def test_training_hangs_on_its_seed_alone(
    tiny: LanguageModel, windows: tuple[Tensor, Tensor]
) -> None:
    first, again, other = (
        [t.weight() for t in trained(tiny, windows[1], steps=2, seed=seed)] for seed in (3, 3, 4)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gemma3", "olmo2"])
def test_the_last_stream_unembeds_to_the_logits_in_families_with_their_own_ways(
    family: str,
) -> None:
    lm = random_model(family)
    ids = torch.tensor([random_ids(20, 1)])
    streams = read_streams(lm, ids)
    with torch.no_grad():
        out = lm.model(ids, output_hidden_states=True, use_cache=False)
    for found, expected in zip(streams.hidden, out.hidden_states[:-1], strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(streams.logprobs, out.logits.log_softmax(-1))
    assert unembed(lm, streams.hidden[0]).shape == out.logits.shape


def test_a_model_that_scales_its_logits_is_refused() -> None:
    config = tf.GraniteConfig(**{**COMMON, "num_hidden_layers": 1}, logits_scaling=2.0)
    lm = wrap_model(tf.GraniteForCausalLM(config), tokenizer())
    with pytest.raises(UserError, match="GraniteForCausalLM: its logits are not the unembedding"):
        read_streams(lm, torch.tensor([random_ids(20, 1)]))


def test_texts_become_sequences_of_equal_length_without_their_rest(tiny: LanguageModel) -> None:
    text = (TINY / "haystacks" / "filler_0.txt").read_text(encoding="utf-8")
    ids = tiny.tokenizer.encode(text, add_special_tokens=False)
    found = token_windows(tiny, [text, " ".join(text.split()[:300])])
    assert found.shape == (len(ids) // 128 + 2, 128)
    assert found[: len(ids) // 128].flatten().tolist() == ids[: len(ids) // 128 * 128]
    assert found[-2:].flatten().tolist() == ids[:256]


def test_too_little_text_is_refused(tiny: LanguageModel) -> None:
    with pytest.raises(UserError, match=r"tuned_lens\.train\.texts: give 0 sequences of 128"):
        token_windows(tiny, ["far too short ."])


def test_no_sequence_is_both_held_out_and_trained_on() -> None:
    numbers = torch.arange(400).view(200, 2)
    held_out, training = hold_out(numbers, seed=5)
    assert (len(held_out), len(training)) == (16, 184)
    assert sorted(torch.cat([held_out, training]).flatten().tolist()) == list(range(400))


# --- from the hub


def fetch(output: Path, **spec: str) -> None:
    spec = {"hub": "some/lenses", "revision": COMMIT, "path": "tiny/params.safetensors"} | spec
    row = {"source": {"folder": str(TINY)}, "trust_remote_code": False}
    fetch_lens.main(
        SimpleNamespace(
            config={"models": {"tiny": row}, "store": "unused"},
            wildcards=SimpleNamespace(model="tiny"),
            params=SimpleNamespace(spec=json.dumps(spec)),
            output=[str(output)],
        )
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache of its own, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("hub", "folder"),
    [
        ("some/lenses", "models--some--lenses"),
        ("spaces/some/lenses", "spaces--some--lenses"),
        ("datasets/some/lenses", "datasets--some--lenses"),
    ],
)
def test_a_cached_lens_of_the_hub_is_taken_without_the_network(
    cache: Path, tmp_path: Path, hub: str, folder: str
) -> None:
    matrices = [torch.full((192, 192), float(layer)) for layer in range(4)]
    place = cache / folder / "snapshots" / COMMIT / "tiny"
    place.mkdir(parents=True)
    full = {f"layer_translators.{i}.weight": m for i, m in enumerate(matrices)}
    save_file(full, place / "params.safetensors")
    fetch(tmp_path / "lens.safetensors", hub=hub)
    for found, expected in zip(
        read_lens(tmp_path / "lens.safetensors", 4, 192), matrices, strict=True
    ):
        assert torch.equal(found, expected)


def test_a_lens_that_cannot_be_fetched_is_one_line(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"model some/lenses at revision {COMMIT}") as caught:
        fetch(tmp_path / "lens.safetensors")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "lens.safetensors").exists()


def test_a_fetched_lens_of_another_model_is_refused(cache: Path, tmp_path: Path) -> None:
    place = cache / "models--some--lenses" / "snapshots" / COMMIT / "tiny"
    place.mkdir(parents=True)
    save_file({f"{i}.weight": torch.ones(3, 3) for i in range(4)}, place / "params.safetensors")
    with pytest.raises(UserError, match="another model"):
        fetch(tmp_path / "lens.safetensors")
