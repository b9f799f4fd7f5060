"""Training a tuned lens: an affine translator a layer, from its residual stream to the last one.

Belrose et al., "Eliciting Latent Predictions from Transformers with the Tuned Lens" (arXiv 2303.08112):
the translator of layer l reads the stream h that enters the layer and minimises, in nats, the KL
divergence of unembed(final_norm(h + A_l h + b_l)) from the model's own next-token distribution. The
model stays as it is. Translators start at zero, as the logit lens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workflow_scripts.common.architecture import final_norm
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.models import TOLERANCE, LanguageModel

WINDOW_TOKENS = 128
"""Tokens of a training sequence."""

LEARNING_RATE = 1e-3
"""AdamW's at the first step; it falls linearly to zero. The paper's SGD needs far more tokens a step."""

HELD_OUT = 16
"""Most sequences that are held out."""


class Translator(nn.Module):
    """h -> h + A h + b with A = up @ down; A and b are zero at the start.

    Parameters
    ----------
    width
        d_model.
    rank
        Of A; from `width` on, A is trained whole (down is the identity).
    generator
        Draws down.
    """

    def __init__(self, width: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(width, min(rank, width)))
        self.bias = nn.Parameter(torch.zeros(width))
        if rank < width:
            drawn = torch.randn(rank, width, generator=generator) / math.sqrt(width)
            self.down: Tensor = nn.Parameter(drawn)
        else:
            self.register_buffer("down", torch.eye(width))

    def weight(self) -> Tensor:
        """Return A, shape (d_model, d_model)."""
        return self.up @ self.down

    def forward(self, hidden: Tensor) -> Tensor:
        """Translate a residual stream, float32, shape (..., d_model)."""
        return hidden + hidden @ self.down.T @ self.up.T + self.bias


@dataclass(frozen=True)
class Streams:
    """What one forward pass gives the lens.

    Attributes
    ----------
    hidden
        Residual stream that enters each layer, float32, each (batch, tokens, d_model).
    logprobs
        The model's log probabilities, float32, (batch, tokens, vocabulary).
    """

    hidden: list[Tensor]
    logprobs: Tensor


def token_windows(lm: LanguageModel, texts: Sequence[str]) -> Tensor:
    """Return texts as sequences of `WINDOW_TOKENS` token ids, int64, (sequences, tokens).

    Each begins with the BOS where the tokenizer adds one; what is left over of a text is dropped.

    Raises
    ------
    UserError
        If there are fewer than two: one to train on and one to hold out.
    """
    whole = lm.tokenizer("a")["input_ids"]
    bos = [whole[0]] if whole[:1] == [lm.tokenizer.bos_token_id] else []
    size = WINDOW_TOKENS - len(bos)
    windows = []
    for text in texts:
        ids = lm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        starts = range(0, len(ids) - size + 1, size)
        windows += [[*bos, *ids[start : start + size]] for start in starts]
    if len(windows) < 2:
        raise UserError(
            f"tuned_lens.train.texts: give {len(windows)} sequences of {WINDOW_TOKENS} tokens; name "
            "longer texts"
        )
    return torch.tensor(windows)


def hold_out(windows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return a seeded tenth of the sequences, 1 to `HELD_OUT`, and the others: (held out, training)."""
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    count = min(HELD_OUT, max(1, len(windows) // 10))
    return windows[order[:count]], windows[order[count:]]


def train_lens(
    lm: LanguageModel,
    windows: Tensor,
    *,
    steps: int,
    tokens: int,
    rank: int,
    seed: int,
    progress: Callable[[int], object],
) -> list[Translator]:
    """Train the translators of all layers at once, each step from one forward pass.

    Parameters
    ----------
    windows
        Sequences to train on, see `token_windows`.
    steps, tokens
        Steps of AdamW, and tokens of each (at least one sequence).
    rank
        Of every A.
    seed
        Of the start and of the sequences drawn.
    progress
        Called with the number of steps done.

    Raises
    ------
    UserError
        If the model's logits are not the unembedding of its normalised last stream.
    """
    generator = torch.Generator().manual_seed(seed)
    width, device = lm.unembedding().shape[1], lm.unembedding().device
    lens = [Translator(width, rank, generator).to(device) for _ in lm.layers]
    optimizer = torch.optim.AdamW(nn.ModuleList(lens).parameters(), lr=LEARNING_RATE)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    rows = max(1, tokens // WINDOW_TOKENS)
    for _ in range(steps):
        drawn = torch.randperm(len(windows), generator=generator)[:rows]
        streams = read_streams(lm, windows[drawn])
        optimizer.zero_grad()
        # A layer at a time, so that only one layer's logits are held.
        for translator, hidden in zip(lens, streams.hidden, strict=True):
            divergence(lm, translator(hidden), streams.logprobs).mean().backward()
        optimizer.step()
        falling.step()
        progress(1)
    return lens


@torch.no_grad()
def mean_divergences(
    lm: LanguageModel, lens: Sequence[Callable[[Tensor], Tensor]], windows: Tensor
) -> list[float]:
    """Return the mean KL divergence, in nats, of each layer's translated stream on some sequences."""
    sums = [0.0] * len(lens)
    for window in windows:
        streams = read_streams(lm, window[None])
        for layer, (translate, hidden) in enumerate(zip(lens, streams.hidden, strict=True)):
            sums[layer] += float(divergence(lm, translate(hidden), streams.logprobs).mean())
    return [total / len(windows) for total in sums]


def divergence(lm: LanguageModel, hidden: Tensor, logprobs: Tensor) -> Tensor:
    """Return KL(model || unembedded stream) of each token, in nats, (batch, tokens)."""
    found = unembed(lm, hidden).log_softmax(-1)
    return functional.kl_div(found, logprobs, reduction="none", log_target=True).sum(-1)


def unembed(lm: LanguageModel, hidden: Tensor) -> Tensor:
    """Return the logits of a residual stream: final norm, unembedding, soft cap; float32."""
    head = lm.model.get_output_embeddings()
    logits: Tensor = head(final_norm(lm.model)(hidden.to(head.weight.dtype))).float()
    cap = getattr(lm.model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@torch.no_grad()
def read_streams(lm: LanguageModel, ids: Tensor) -> Streams:
    """Run sequences, (batch, tokens), and keep the streams that enter the layers.

    Raises
    ------
    UserError
        See `train_lens`.
    """
    device = lm.unembedding().device
    with _entering(lm) as kept:
        logits = lm.model(ids.to(lm.device), use_cache=False).logits.float().to(device)
    *hidden, last = [states.to(device) for states in kept]
    difference = (unembed(lm, last) - logits).abs().max()
    if difference > TOLERANCE[lm.model.dtype] * logits.abs().max():
        raise UserError(
            f"model {type(lm.model).__name__}: its logits are not the unembedding of its last "
            "normalised stream; a tuned lens cannot be trained for it"
        )
    return Streams([states.float() for states in hidden], logits.log_softmax(-1))


@contextmanager
def _entering(lm: LanguageModel) -> Iterator[list[Tensor]]:
    """Keep what enters each layer and the final norm, in order, of the pass inside the block."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        kept.append(args[0])

    modules = [*(layer.block for layer in lm.layers), final_norm(lm.model)]
    handles = [module.register_forward_pre_hook(keep) for module in modules]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()
