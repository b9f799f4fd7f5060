"""Calibration means: what each head's query and output are on average (method, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from workflow_scripts.common.architecture import HeadLayer
from workflow_scripts.common.attention import AttentionCall, tapped
from workflow_scripts.common.models import LanguageModel

SITES = ("q_proj", "query", "output")
"""Where means are taken: before the query norm, after it, and at W_O's input."""


@torch.inference_mode()
def calibrate(lm: LanguageModel, prompts: Sequence[Sequence[int]]) -> pl.DataFrame:
    """Return the mean of every head at every site over all tokens of some prompts.

    Summed in float64, so that neither length nor order matters.

    Returns
    -------
    polars.DataFrame
        site, layer (int32), head (int32), mean (list of float64, head_dim long).
    """
    sums: dict[tuple[str, int], Tensor] = {}

    def add(site: str, layer: int, values: Tensor) -> None:
        """Add values of shape (batch, tokens, heads, head_dim)."""
        total = values.double().sum((0, 1)).cpu()
        sums[site, layer] = sums.get((site, layer), torch.zeros_like(total)) + total

    def watch(site: str, layer: HeadLayer) -> Any:
        module, view = layer.query_site(site)

        def hook(_: nn.Module, args: Any, output: Tensor) -> None:
            add(site, layer.index, view(output))

        return module.register_forward_hook(hook)

    def tap(call: AttentionCall, output: Tensor) -> None:
        add("output", call.layer, output)

    with ExitStack() as stack:
        stack.enter_context(tapped(tap))
        for layer in lm.layers:
            stack.callback(watch("q_proj", layer).remove)
            stack.callback(watch("query", layer).remove)
        for prompt in prompts:
            lm.model(
                torch.tensor([list(prompt)], device=lm.device), use_cache=False, logits_to_keep=1
            )
    tokens = sum(len(prompt) for prompt in prompts)
    rows = [
        (site, layer, head, (mean / tokens).tolist())
        for (site, layer), heads in sums.items()
        for head, mean in enumerate(heads)
    ]
    schema: dict[str, Any] = {
        "site": pl.String,
        "layer": pl.Int32,
        "head": pl.Int32,
        "mean": pl.List(pl.Float64),
    }
    return pl.DataFrame(rows, schema=schema, orient="row").sort("site", "layer", "head")


def choose_prompts(
    probes: pl.DataFrame, *, count: int, seed: int, max_tokens: int
) -> list[list[int]]:
    """Return the prompts to calibrate on: a seeded sample, each capped in length."""
    order = np.random.default_rng(seed).permutation(probes.height)[:count]
    chosen = probes["input_ids"].gather(sorted(order.tolist()))
    return [ids[:max_tokens] for ids in chosen.to_list()]


def read_means(table: pl.DataFrame, site: str) -> dict[tuple[int, int], Tensor]:
    """Return the means of a calibration table at a site, by (layer, head), float32."""
    rows = table.filter(pl.col("site") == site).select("layer", "head", "mean").iter_rows()
    return {(layer, head): torch.tensor(mean) for layer, head, mean in rows}
