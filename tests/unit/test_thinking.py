"""A <think> block has its own budget and is neither answer nor scored."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from test_capture import probe_row
from tiny_models import random_ids, random_model

from workflow_scripts.ablation.generate import status_of
from workflow_scripts.ablation.generation import generate
from workflow_scripts.ablation.interventions import Intervention
from workflow_scripts.activations.capture_probes import ProbeResult, capture_probes
from workflow_scripts.common.models import LanguageModel

LENGTH, LAST = 30, 110


class Pieces:
    """A tokenizer that writes each token as it is told, and the others as "." each."""

    eos_token_id = None

    def __init__(self, texts: dict[int, str]) -> None:
        self.texts = texts

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.texts.get(token, ".") for token in ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [token for token, piece in self.texts.items() if piece == text]


def model_that_writes(*pieces: str, prompt_ends_with: str = "") -> tuple[LanguageModel, list[int]]:
    """Return a model and a prompt that it continues with these pieces, one a token."""
    lm = random_model("qwen2")
    with torch.no_grad():
        # Every token is followed by the next one: what a token writes outweighs all layers.
        embedding = lm.model.get_input_embeddings().weight
        embedding.copy_(10 * torch.randn(embedding.shape, generator=torch.manual_seed(5)))
        lm.model.get_output_embeddings().weight.copy_(embedding.roll(1, 0))
    prompt = [token % 100 for token in random_ids(LENGTH - 1, 6)] + [LAST]
    texts = dict(enumerate(pieces, LAST + 1)) | {LAST: prompt_ends_with or "."}
    lm.tokenizer = Pieces(texts)  # type: ignore[assignment]
    return lm, prompt


def captured(
    lm: LanguageModel, prompt: list[int], new_tokens: int, thinking_tokens: int
) -> ProbeResult:
    row = probe_row(prompt, (10, 14), "Yuki", new_tokens)
    row["max_thinking_tokens"] = thinking_tokens
    (result,) = capture_probes(
        lm,
        pl.DataFrame([row]),
        directions=["raw", "frozen_norm"],
        batch_tokens=1000,
        max_length=1000,
        progress=lambda _: None,
    )
    return result


BLOCK = ("<think>", "hm", "\n", "Yuki?\n", "</think>", "\n\n")


def test_the_budget_of_an_answer_begins_behind_its_block() -> None:
    lm, prompt = model_that_writes(*BLOCK, "Yuki", " is", " it")
    result = captured(lm, prompt, 2, 10)
    assert result.status == "passed"
    assert result.generation.thinking == len(BLOCK)
    assert lm.decode(result.generation.answer_ids) == "Yuki is"
    assert (result.generation.stopped, result.generation.closed) == (False, True)


def test_a_newline_ends_the_answer_but_not_the_block() -> None:
    lm, prompt = model_that_writes(*BLOCK, "Yuki", "!\n", "more")
    result = captured(lm, prompt, 9, 10)
    assert lm.decode(result.generation.answer_ids) == "Yuki"
    assert result.generation.stopped


def test_rows_of_the_block_are_not_kept_and_the_others_are_those_of_plain_loops() -> None:
    lm, prompt = model_that_writes(*BLOCK, "Yuki", " is")
    result = captured(lm, prompt, 2, 10)
    capture, steps = result.capture, [*range(-7, 1), 6, 7]
    assert capture is not None
    assert capture.step.tolist() == steps
    assert capture.token.tolist() == [-1] * 8 + result.generation.answer_ids
    assert capture.length.tolist() == [LENGTH + step for step in steps]
    for values in (capture.logprob, capture.u_norm, capture.by_region["phi_raw"]):
        assert np.isnan(values[:8]).all()
        assert np.isfinite(values[8:]).all()
    assert result.answer_steps == [6]
    ids = prompt + result.generation.ids
    lm.model.set_attn_implementation("eager")
    with torch.inference_mode():
        out = lm.model(torch.tensor([ids[:-1]]), output_attentions=True)
    lm.model.set_attn_implementation("locos")
    query = LENGTH - 1 + 6
    for layer in range(2):
        expected = out.attentions[layer][0, :, query, : query + 1]
        np.testing.assert_allclose(capture.dense["alpha"][layer], expected, atol=1e-6)
    expected = out.logits[0, query].log_softmax(-1)[ids[query + 1]]
    assert capture.logprob[8] == pytest.approx(float(expected), abs=1e-5)


def test_a_block_that_the_prompt_opens_needs_no_opening_tag() -> None:
    lm, prompt = model_that_writes("hm\n", "</think>", "\n", "Yuki", prompt_ends_with="<think>")
    result = captured(lm, prompt, 1, 5)
    assert result.status == "passed"
    assert result.generation.thinking == 3


@pytest.mark.parametrize(("opened", "written"), [("", 4), ("<think>", 4)])
def test_an_unclosed_block_is_reported_even_if_it_names_the_answer(
    opened: str, written: int
) -> None:
    pieces = ("Yuki", " a", " b", " c", " d") if opened else ("<think>", "Yuki", " a", " b", " c")
    lm, prompt = model_that_writes(*pieces, prompt_ends_with=opened)
    result = captured(lm, prompt, 9, written)
    assert result.status == "unclosed_thinking"
    assert len(result.generation.ids) == written
    assert (result.recall, list(result.answer_steps)) == (0.0, [])
    assert not result.generation.closed


def test_a_tag_may_take_several_tokens() -> None:
    lm, prompt = model_that_writes("<", "think", ">", "a\n", "</th", "ink>", "Yuki", "->", "b")
    result = captured(lm, prompt, 3, 9)
    assert result.generation.thinking == 6
    assert lm.decode(result.generation.answer_ids) == "Yuki->b"


def test_generation_reports_an_unclosed_block() -> None:
    lm, prompt = model_that_writes("<think>", "a", "b", "c", "d")
    intervention = Intervention("zero_query", "query", [[], [(1, 2)]])
    limits: dict[str, Any] = {"batch_tokens": 100, "progress": lambda _: None}
    ((unablated,), _) = generate(
        lm, [prompt], intervention, max_new_tokens=9, max_thinking_tokens=3, **limits
    )
    assert len(unablated.ids) == unablated.thinking == 3
    assert status_of(unablated) == "unclosed_thinking"
