"""The plain ways that the workflow is measured against, written as most users would write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from workflow_scripts.ablation.interventions import Head
from workflow_scripts.common.answers import find_answer_steps
from workflow_scripts.common.attention import INTERFACE
from workflow_scripts.common.models import LanguageModel

Array = NDArray[Any]


def ends_answer(lm: LanguageModel, token: int) -> bool:
    """Return whether a token ends an answer: an end of sequence, or a newline."""
    return token in lm.eos_ids or "\n" in lm.piece(token)


class _EndsAnswer(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([ends_answer(self.lm, int(ids[-1])) for ids in input_ids])


@torch.inference_mode()
def generate(lm: LanguageModel, prompt: list[int], tokens: int) -> list[int]:
    """Answer one prompt with the library's own greedy loop; return the ids before the end."""
    ids = torch.tensor([prompt], device=lm.device)
    out = lm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([_EndsAnswer(lm)]),
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer[:-1] if ends_answer(lm, answer[-1]) else answer


def ablate(
    lm: LanguageModel,
    prompts: list[list[int]],
    sets: list[list[Head]],
    means: dict[Head, Tensor],
    tokens: int,
) -> list[list[list[int]]]:
    """Run one generation a condition and prompt, with a hook on each query projection."""
    answers = []
    for heads in sets:
        with ExitStack() as stack:
            for layer in lm.layers:
                chosen = [head for index, head in heads if index == layer.index]

                def hook(
                    module: Any, args: Any, output: Tensor, chosen: Any = chosen, at: Any = layer
                ) -> None:
                    for head in chosen:
                        span = slice(head * at.head_dim, (head + 1) * at.head_dim)
                        output[..., span] = means[at.index, head].to(output)

                if chosen:
                    projection: Any = layer.attention.q_proj
                    stack.callback(projection.register_forward_hook(hook).remove)
            answers.append([generate(lm, prompt, tokens) for prompt in prompts])
    return answers


@torch.inference_mode()
def head_outputs(lm: LanguageModel, ids: list[int]) -> list[Tensor]:
    """Return what goes into W_O of each layer, (1, tokens, heads * head_dim)."""
    kept: list[Tensor] = []
    with ExitStack() as stack:
        for layer in lm.layers:
            stack.callback(
                layer.projection.register_forward_pre_hook(
                    lambda module, args: kept.append(args[0])
                ).remove
            )
        lm.model(torch.tensor([ids], device=lm.device), use_cache=False, logits_to_keep=1)
    return kept


@torch.inference_mode()
def patch(
    lm: LanguageModel, ids: list[int], clean: list[Tensor], heads: list[Head], keep: int
) -> Iterator[Tensor]:
    """Yield the logits of one forward a head, with the clean input of W_O of that head.

    `keep` is the number of last positions whose logits are computed; 0, the library's default, is all.
    """
    tokens = torch.tensor([ids], device=lm.device)
    for index, head in heads:
        layer = lm.layers[index]
        span = slice(head * layer.head_dim, (head + 1) * layer.head_dim)

        def hook(module: Any, args: tuple[Tensor], span: slice = span, index: int = index) -> Any:
            changed = args[0].clone()
            changed[..., span] = clean[index][..., span]
            return (changed,)

        handle = layer.projection.register_forward_pre_hook(hook)
        yield lm.model(tokens, use_cache=False, logits_to_keep=keep).logits[0]
        handle.remove()


@contextmanager
def eager(lm: LanguageModel) -> Iterator[None]:
    """Give the model its own eager attention, which returns the weights that are asked for."""
    lm.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        lm.model.set_attn_implementation(INTERFACE)


class Probe:
    """One probe answered, then read with `output_attentions`: where each detector starts from."""

    @torch.inference_mode()
    def __init__(self, lm: LanguageModel, row: dict[str, Any], tokens: int) -> None:
        self.lm, self.row = lm, row
        prompt = list(row["input_ids"])
        self.generated = generate(lm, prompt, tokens)
        ids = torch.tensor([prompt + self.generated[:-1]], device=lm.device)
        values: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for layer in lm.layers:

                def keep(module: Any, args: Any, output: Tensor, index: int = layer.index) -> None:
                    values[index] = output[0]

                projection: Any = layer.attention.v_proj
                stack.callback(projection.register_forward_hook(keep).remove)
            attentions = lm.model(ids, use_cache=False, output_attentions=True).attentions
        self.attentions, self.values = attentions, values
        self.start, self.stop = row["needle_start"], row["needle_end"]
        self.answer = find_answer_steps(lm.tokenizer, self.generated, row["answer"])
        self.first = len(prompt) - 1  # the query that predicts the first token

    def alpha(self, query: int) -> Array:
        """Return the weights of a query, (layers, heads, keys up to it)."""
        rows = [weights[0, :, query, : query + 1] for weights in self.attentions]
        return torch.stack(rows).double().cpu().numpy()

    def phi(self, step: int) -> Array:
        """Return the logit contributions of a step, head by head, (layers, heads, keys)."""
        query = self.first + step
        u = self.lm.unembedding()[self.generated[step]]
        alpha = self.alpha(query)
        found = np.empty(alpha.shape)
        for layer in self.lm.layers:
            size = layer.head_dim
            for head in range(layer.n_heads):
                own = head // (layer.n_heads // layer.n_kv_heads)
                value = self.values[layer.index][: query + 1, own * size : (own + 1) * size]
                weight: Any = layer.projection.weight
                write = weight[:, head * size : (head + 1) * size]
                found[layer.index, head] = (value @ (write.T @ u)).double().cpu().numpy()
        return alpha * found

    def contrast(self, plane: Array) -> Array:
        """Return the needle's sum less the mean elsewhere times the needle's length."""
        needle, size = plane[..., self.start : self.stop].sum(-1), self.stop - self.start
        contrast: Array = needle - (plane.sum(-1) - needle) * size / (plane.shape[-1] - size)
        return contrast


def _locos(probe: Probe) -> list[Array]:
    return [probe.contrast(probe.phi(step)) for step in probe.answer]


def _alpha_spatial(probe: Probe) -> list[Array]:
    return [probe.contrast(probe.alpha(probe.first + step)) for step in probe.answer]


def _dla(probe: Probe) -> list[Array]:
    return [probe.phi(step).sum(-1) for step in probe.answer]


def _argmax_ov(probe: Probe) -> list[Array]:
    found = []
    for step in probe.answer:
        phi, needle = probe.phi(step), slice(probe.start, probe.stop)
        at = probe.alpha(probe.first + step)[..., needle].argmax(-1)[..., None]
        peak = np.take_along_axis(phi[..., needle], at, -1)[..., 0]
        others = phi.shape[-1] - (probe.stop - probe.start)
        found.append(peak - (phi.sum(-1) - phi[..., needle].sum(-1)) / others)
    return found


def _wu(probe: Probe) -> list[Array]:
    prompt, start, stop = (
        probe.row["input_ids"],
        probe.row["real_needle_start"],
        probe.row["real_needle_end"],
    )
    total = np.zeros(probe.alpha(0).shape[:2])
    for step, token in enumerate(probe.generated):
        at = probe.alpha(probe.first + step).argmax(-1)
        copied = [j for j in range(start, stop) if prompt[j] == token]
        total += np.isin(at, copied) / (stop - start)
    return [total]


def _snapkv_window(probe: Probe) -> list[Array]:
    queries = range(probe.first - 7, probe.first + 1)
    mass = [probe.alpha(q)[..., probe.start : probe.stop].sum(-1) for q in queries]
    return [np.max(mass, 0)]


def _headkv_r2(probe: Probe) -> list[Array]:
    size, found = probe.stop - probe.start, []
    for step in range(len(probe.generated)):
        alpha = probe.alpha(probe.first + step)
        top = np.argsort(-alpha, -1, kind="stable")[..., :size]
        inside = (top >= probe.start) & (top < probe.stop)
        found.append((np.take_along_axis(alpha, top, -1) * inside).sum(-1) / size)
    return found


def _contrastive_mass(probe: Probe) -> list[Array]:
    steps = range(len(probe.generated))
    mass = [probe.alpha(probe.first + s)[..., probe.start : probe.stop].sum(-1) for s in steps]
    others = [mass[s] for s in steps if s not in probe.answer]
    answer = np.mean([mass[s] for s in probe.answer], 0)
    return [np.maximum(answer - np.mean(others, 0), 0) if others else answer]


PEER: dict[str, Callable[[Probe], list[Array]]] = {
    "locos": _locos,
    "alpha_spatial": _alpha_spatial,
    "dla": _dla,
    "argmax_ov": _argmax_ov,
    "wu": _wu,
    "snapkv_window": _snapkv_window,
    "headkv_r2": _headkv_r2,
    "contrastive_mass": _contrastive_mass,
}
"""Detector -> its values on one probe, one array (layers, heads) a row that is pooled."""


def detect(lm: LanguageModel, rows: list[dict[str, Any]], tokens: int) -> dict[str, Array]:
    """Run every detector as its own program would: the model anew for each, probe by probe."""
    with eager(lm):
        return {
            name: np.mean([v for row in rows for v in values(Probe(lm, row, tokens))], 0)
            for name, values in PEER.items()
        }
