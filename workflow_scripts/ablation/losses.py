"""Language modelling loss of texts under many sets of ablated heads: a check of general damage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import cross_entropy

from workflow_scripts.ablation.generation import under_conditions
from workflow_scripts.ablation.interventions import Intervention
from workflow_scripts.common.decoding import (
    Group,
    GrowingCache,
    PrefixRunner,
    run_conditions,
)
from workflow_scripts.common.models import LanguageModel

LOGIT_TOKENS = 1024
"""Tokens whose logits are held at once: with a large vocabulary they outweigh all else."""


@torch.inference_mode()
def losses(
    lm: LanguageModel,
    texts: Sequence[Sequence[int]],
    intervention: Intervention,
    *,
    batch_tokens: int,
    progress: Callable[[int], object],
) -> list[list[float]]:
    """Return the loss of every text under every set of heads.

    The mean cross-entropy of each token after the first, given the true tokens before it, in nats.

    Parameters
    ----------
    texts
        Token ids, two at least.
    intervention, batch_tokens, progress
        As for `generate`.

    Returns
    -------
    list of lists of float
        By set of heads, then by text.

    Raises
    ------
    UserError
        If a text does not fit into memory even alone.
    """

    def read(runner: PrefixRunner, batch: list[Group]) -> dict[tuple[int, int], float]:
        return _losses_of_batch(runner, texts, [i for group in batch for i in group.members])

    return under_conditions(
        lm, texts, intervention, read, batch_tokens=batch_tokens, progress=progress
    )


def _losses_of_batch(
    runner: PrefixRunner, texts: Sequence[Sequence[int]], numbers: list[int]
) -> dict[tuple[int, int], float]:
    """Return the losses of texts of equal length by (condition, text), read piece by piece."""
    lm, conditions = runner.lm, runner.conditions
    conditions.lay_out(numbers, lm.device)
    ids = torch.tensor([list(texts[number]) for number in numbers], device=lm.device)
    rows = conditions.count * len(numbers)
    size = max(1, LOGIT_TOKENS // rows)
    cache = GrowingCache()
    total = torch.zeros(rows, dtype=torch.float64)
    for piece, following in zip(ids[:, :-1].split(size, 1), ids[:, 1:].split(size, 1), strict=True):
        logits = run_conditions(lm, piece, cache, piece.shape[1], conditions)
        wanted = following.repeat(conditions.count, 1).to(logits.device)
        nats = cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="none")
        total += nats.view(rows, -1).sum(1).cpu()
    means = total / (ids.shape[1] - 1)
    labels = zip(conditions.rows.tolist(), conditions.prompts.tolist(), strict=True)
    return dict(zip(labels, means.tolist(), strict=True))
