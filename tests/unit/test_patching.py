"""Causal activation patching against one plain forward a head, and the corruptions by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from workflow_scripts.common.attention import AttentionCall, tapped
from workflow_scripts.common.decoding import Conditions, PrefixRunner
from workflow_scripts.common.models import LanguageModel, Source, load_model, wrap_model
from workflow_scripts.patching.corruption import corrupt, find_run
from workflow_scripts.patching.patch_heads import Pair, patch_heads

TINY = Path("data/models/tiny")


@pytest.fixture(scope="module")
def tiny() -> LanguageModel:
    return load_model(Source(str(TINY)), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def random_gqa(tiny: LanguageModel) -> LanguageModel:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.4,
    )
    return wrap_model(Qwen3ForCausalLM(config), tiny.tokenizer)


def plain_effect(lm: LanguageModel, pair: Pair, layer: int, head: int) -> tuple[float, float]:
    """Run clean, corrupt and patched once each, whole, and take both metrics by their definition."""
    clean = torch.tensor([pair.clean + pair.answer[:-1]])
    twin = torch.tensor([pair.corrupt + pair.answer[:-1]])
    kept: dict[int, torch.Tensor] = {}

    def keep(call: AttentionCall, output: torch.Tensor) -> None:
        kept[call.layer] = output.clone()

    def patch(call: AttentionCall, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        if call.layer == layer:
            output[0, :, head] = kept[layer][0, :, head]
        return output

    def metrics(logits: torch.Tensor, rival: int | None) -> tuple[float, float, int]:
        rows = logits[0, -len(pair.answer) :]
        gold = pair.answer[0]
        if rival is None:
            rival = max((t for t in range(rows.shape[1]) if t != gold), key=lambda t: rows[0, t])
        logprobs = [
            float(row[token] - row.logsumexp(0))
            for row, token in zip(rows, pair.answer, strict=True)
        ]
        return float(rows[0, gold] - rows[0, rival]), sum(logprobs) / len(logprobs), rival

    with torch.inference_mode():
        with tapped(keep):
            lm.model(clean, use_cache=False)
        base = metrics(lm.model(twin, use_cache=False).logits, None)
        with tapped(patch):
            patched = metrics(lm.model(twin, use_cache=False).logits, base[2])
    return patched[0] - base[0], patched[1] - base[1]


@pytest.mark.parametrize("batch_tokens", [10_000, 60])
@pytest.mark.parametrize("first", [0, 7])
def test_patching_in_a_batch_equals_one_forward_a_head(
    random_gqa: LanguageModel, batch_tokens: int, first: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    clean = torch.randint(1, 90, (20,), generator=generator).tolist()
    twin = clean[:7] + torch.randint(1, 90, (3,), generator=generator).tolist() + clean[10:]
    pair = Pair(clean, twin, first, [4, 11])
    runner = PrefixRunner(random_gqa, Conditions.unchanged())
    effects = patch_heads(random_gqa, pair, runner, batch_tokens=batch_tokens)
    for layer in range(3):
        for head in range(6):
            logit, logprob = plain_effect(random_gqa, pair, layer, head)
            assert float(effects.heads["logit"][layer, head]) == pytest.approx(logit, abs=1e-4)
            assert float(effects.heads["logprob"][layer, head]) == pytest.approx(logprob, abs=1e-4)


def test_the_planted_retrieval_head_has_the_largest_effect(tiny: LanguageModel) -> None:
    def encode(text: str) -> list[int]:
        return tiny.tokenizer.encode(text, add_special_tokens=False)

    filler = (TINY / "haystacks" / "filler_0.txt").read_text(encoding="utf-8").split(" .")[:12]
    before, after = encode(" .".join(filler[:5]) + " ."), encode(" .".join(filler[5:]) + " .")
    needle = encode("Anna lives next to kiasma .")
    question = encode("which character has been to helsinki ? answer :")
    clean = before + needle + after + question
    probe = {
        "input_ids": clean,
        "needle_start": len(before),
        "needle_end": len(before) + len(needle),
        "haystack_start": 0,
        "haystack_end": len(clean) - len(question),
        "answer": "Anna",
        "other_answers": ["Bruno"],
    }
    twin = corrupt(probe, "filler", encode)
    assert twin is not None
    pair = Pair(clean, twin, len(before), encode("Anna"))
    effects = patch_heads(
        tiny, pair, PrefixRunner(tiny, Conditions.unchanged()), batch_tokens=8192
    ).heads["logit"]
    assert divmod(int(effects.argmax()), effects.shape[1]) == (2, 0)


def words(text: str) -> list[int]:
    table = {"ann": 1, "bo": 2, "mary": 3, "jo": 4}
    return [token for word in text.split() for token in ([table[word]] + [9] * (word == "mary"))]


PROBE = {
    "input_ids": [50, 20, 21, 1, 30, 31, 22, 23, 60],
    "needle_start": 3,
    "needle_end": 6,
    "haystack_start": 1,
    "haystack_end": 8,
    "answer": "ann",
    "other_answers": ["mary", "bo"],
}


def test_filler_replaces_the_needle_by_the_haystack_token_for_token() -> None:
    assert corrupt(PROBE, "filler", words) == [50, 20, 21, 20, 21, 22, 22, 23, 60]


def test_another_character_of_equal_length_takes_the_place_of_the_answer() -> None:
    assert corrupt(PROBE, "character", words) == [50, 20, 21, 2, 30, 31, 22, 23, 60]


def test_no_other_character_of_equal_length_gives_none() -> None:
    assert corrupt(PROBE | {"other_answers": ["mary"]}, "character", words) is None


def test_a_run_is_found_where_it_first_stands() -> None:
    assert find_run([1, 2, 1, 2], [1, 2]) == 0
    assert find_run([1, 2], [2, 1]) is None
    assert find_run([1], []) is None
