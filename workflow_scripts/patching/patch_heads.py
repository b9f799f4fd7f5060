"""Causal activation patching of every head (method, section 3: cri).

The metric of a head is that of the corrupt run with the head's clean input to W_O patched in, less that
of the corrupt run. Heads are rows of one batch: below its layer a head's run equals the corrupt run, so
all share that trunk, and only what lies above is computed a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from workflow_scripts.common.attention import AttentionCall, tapped
from workflow_scripts.common.decoding import (
    Conditions,
    GrowingCache,
    PrefixRunner,
    copy_rows,
    fill_cache,
    order_conditions,
    run_conditions,
)
from workflow_scripts.common.models import LanguageModel

Head = tuple[int, int]

UNPATCHED_LAYER = 1 << 30


@dataclass(frozen=True)
class Pair:
    """A prompt, its corrupt twin of equal length, and the gold answer's tokens.

    Attributes
    ----------
    clean, corrupt
        Token ids; equal before `first`.
    first
        First position at which the two may differ.
    answer
        Token ids of the gold answer, teacher-forced after the prompt.
    """

    clean: list[int]
    corrupt: list[int]
    first: int
    answer: list[int]


@dataclass(frozen=True)
class Effects:
    """Both metrics of a probe: of its clean and corrupt runs, and what each head adds.

    Attributes
    ----------
    clean, corrupt
        "logit": gold first token's logit minus that of the corrupt run's best other token, at the
        last prompt position. "logprob": mean log probability of the answer's tokens.
    heads
        By metric: patched minus corrupt, float32, shape (layers, heads).
    """

    clean: dict[str, float]
    corrupt: dict[str, float]
    heads: dict[str, Tensor]


@torch.inference_mode()
def patch_heads(
    lm: LanguageModel, pair: Pair, runner: PrefixRunner, *, batch_tokens: int
) -> Effects:
    """Return the effect of patching every head of a model on one probe.

    Parameters
    ----------
    runner
        Holds the tokens before the needle, shared between probes.
    batch_tokens
        Bound on rows times tokens that run at once.
    """
    prefix = runner.prefix(pair.clean[: pair.first])
    outputs: dict[tuple[int, int], Tensor] = {}

    def keep(call: AttentionCall, output: Tensor) -> None:
        outputs[_piece(call)] = output[0]

    with tapped(keep):
        clean = _last_logits(lm, pair, pair.clean, prefix, Conditions.unchanged())[0]
    corrupt = _last_logits(lm, pair, pair.corrupt, prefix, Conditions.unchanged())[0]
    others = corrupt[0].clone()
    others[pair.answer[0]] = -torch.inf
    rival = int(others.argmax())

    base = _metrics(corrupt, pair.answer, rival)
    heads = {name: torch.zeros(len(lm.layers), lm.n_heads) for name in base}
    rows = max(1, batch_tokens // (len(pair.clean) + len(pair.answer)))
    names = [(layer.index, head) for layer in lm.layers for head in range(layer.n_heads)]
    for start in range(0, len(names), rows):
        part = names[start : start + rows]
        part = [part[i] for i in order_conditions([layer for layer, _ in part])]
        logits = _patched_logits(lm, pair, prefix, part, outputs)
        for row, (layer, head) in enumerate(part):
            for name, value in _metrics(logits[row], pair.answer, rival).items():
                heads[name][layer, head] = value - base[name]
    return Effects(_metrics(clean, pair.answer, rival), base, heads)


def _patched_logits(
    lm: LanguageModel,
    pair: Pair,
    prefix: DynamicCache,
    heads: Sequence[Head],
    clean: dict[tuple[int, int], Tensor],
) -> Tensor:
    """Return the corrupt run's logits with one head patched a row, (heads, answer, vocabulary)."""
    conditions = Conditions([layer for layer, _ in heads])

    def patch(call: AttentionCall, output: Tensor) -> Tensor:
        for row, (layer, head) in enumerate(heads):
            if layer == call.layer:
                output[row, :, head] = clean[_piece(call)][:, head]
        return output

    with ExitStack() as stack:
        stack.enter_context(tapped(patch))
        return _last_logits(lm, pair, pair.corrupt, prefix, conditions)


def _piece(call: AttentionCall) -> tuple[int, int]:
    """Return what tells the pieces of a run apart: layer and first position."""
    return call.layer, call.key.shape[2] - call.query.shape[2]


def _last_logits(
    lm: LanguageModel, pair: Pair, prompt: list[int], prefix: DynamicCache, conditions: Conditions
) -> Tensor:
    """Run a prompt from where it may differ, and the answer; return the answer's logits, float32.

    Shape (conditions, answer tokens, vocabulary).
    """
    cache: DynamicCache = GrowingCache()
    if pair.first:
        rows: Callable[[int], Tensor] = lambda n: torch.zeros(  # noqa: E731
            conditions.active(n), dtype=torch.long
        )
        cache = copy_rows(prefix, rows, pair.first)
    ids = [*prompt[pair.first :], *pair.answer[:-1]]
    tokens = torch.tensor([ids], device=lm.device)
    keep = len(pair.answer)
    # By themselves: for many heads at once, what the last layer then leaves out is worth a pass more.
    fill_cache(lm, tokens[:, :-keep], cache, conditions)
    return run_conditions(lm, tokens[:, -keep:], cache, keep, conditions).float().cpu()


def _metrics(logits: Tensor, answer: Sequence[int], rival: int) -> dict[str, float]:
    """Return both metrics from the logits of the answer's positions, (answer, vocabulary)."""
    logprobs = logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(list(answer))]
    return {
        "logit": float(logits[0, answer[0]] - logits[0, rival]),
        "logprob": float(logprobs.mean()),
    }
