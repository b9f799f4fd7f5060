"""What an ablated head does instead of its work (method, section 4).

All conditions of a batch run at once: each row of the batch belongs to one condition, and each
condition has its own set of heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from workflow_scripts.common.architecture import HeadLayer
from workflow_scripts.common.attention import AttentionCall, attention_weights, tapped
from workflow_scripts.common.decoding import Conditions
from workflow_scripts.common.models import LanguageModel

Head = tuple[int, int]
"""(layer, query head)."""

QUERY_MODES = ("mean_query", "zero_query")
OUTPUT_MODES = ("mean_output", "zero_output", "scale")
NEEDLE_MODES = ("knockout", "evict")
MODES = (*QUERY_MODES, *OUTPUT_MODES, *NEEDLE_MODES)


@dataclass(frozen=True)
class Intervention:
    """How the heads of every condition are changed.

    Attributes
    ----------
    mode
        mean_query, zero_query: the query at every position becomes its calibration mean, or zero.
        mean_output, zero_output, scale: so does the head's slice of W_O's input, or it is multiplied
        by `factor`. knockout: the head's attention to the needle is set to zero, the rest rescaled.
        evict: the same for the queries behind the needle only, as if it had been dropped from the
        head's cache once it was read.
    site
        Where the query is replaced: "q_proj", before any query norm, or "query", after it.
    head_sets
        The heads of each condition.
    means
        Calibration mean of each (layer, head), float, shape (head_dim,); for the mean modes.
    factor
        For scale.
    needles
        Half-open needle span of each prompt of the task; for knockout and evict.
    """

    mode: str
    site: str
    head_sets: Sequence[Sequence[Head]]
    means: dict[Head, Tensor] = field(default_factory=dict)
    factor: float = 1.0
    needles: Sequence[tuple[int, int] | None] = ()


def first_layer(heads: Sequence[Head]) -> int:
    """Return the first layer that a set of heads changes; past every layer for the empty set."""
    return min((layer for layer, _ in heads), default=1 << 30)


@contextmanager
def intervening(
    lm: LanguageModel, conditions: Conditions, intervention: Intervention
) -> Iterator[None]:
    """Apply an intervention inside the block; `conditions.rows` names the condition of each row."""
    editors = [
        _LayerEditor(layer, conditions, intervention)
        for layer in lm.layers
        if any(index == layer.index for heads in intervention.head_sets for index, _ in heads)
    ]
    with ExitStack() as stack:
        if intervention.mode in QUERY_MODES:
            for editor in editors:
                module, _ = editor.layer.query_site(intervention.site)
                stack.callback(module.register_forward_hook(editor.replace_query).remove)
        else:
            by_layer = {editor.layer.index: editor for editor in editors}

            def tap(call: AttentionCall, output: Tensor) -> Tensor | None:
                editor = by_layer.get(call.layer)
                return editor.replace_output(call, output) if editor else None

            stack.enter_context(tapped(tap))
        yield


class _LayerEditor:
    """The intervention in one layer."""

    def __init__(
        self, layer: HeadLayer, conditions: Conditions, intervention: Intervention
    ) -> None:
        self.layer, self.conditions, self.intervention = layer, conditions, intervention
        device = layer.output_weight().device
        chosen = torch.zeros(len(intervention.head_sets), layer.n_heads, dtype=torch.bool)
        for condition, heads in enumerate(intervention.head_sets):
            for index, head in heads:
                if index == layer.index:
                    chosen[condition, head] = True
        self.chosen = chosen.to(device)
        mean = torch.zeros(layer.n_heads, layer.head_dim)
        if intervention.mode.startswith("mean_"):
            for head in chosen.any(0).nonzero()[:, 0].tolist():
                mean[head] = intervention.means[layer.index, head]
        self.mean = mean.to(device)

    def _rows(self, batch: int) -> Tensor:
        """Return which heads are changed in each row, bool, (batch, heads)."""
        # A layer below the top may run only the first rows: those that have left the trunk.
        return self.chosen[self.conditions.rows[:batch].to(self.chosen.device)]

    def replace_query(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Write the mean (or zero) over the query of the chosen heads, at every position."""
        _, view = self.layer.query_site(self.intervention.site)
        query = view(output)
        chosen = self._rows(query.shape[0])[:, None, :, None]
        query.copy_(torch.where(chosen, self.mean.to(query.dtype), query))
        return output

    def replace_output(self, call: AttentionCall, output: Tensor) -> Tensor:
        """Return the attention output, (batch, queries, heads, head_dim), with heads changed."""
        chosen = self._rows(output.shape[0])[:, None, :, None]
        if self.intervention.mode in NEEDLE_MODES:
            changed = self._without_needle(call, output)
        elif self.intervention.mode == "scale":
            changed = output * self.intervention.factor
        else:
            changed = self.mean.to(output.dtype).expand_as(output)
        return torch.where(chosen, changed, output)

    def _without_needle(self, call: AttentionCall, output: Tensor) -> Tensor:
        """Return the output of heads that cannot attend to the needle of their prompt."""
        (batch, queries), keys = output.shape[:2], call.key.shape[2]
        spans = [self.intervention.needles[p] for p in self.conditions.prompts[:batch].tolist()]
        if not any(spans):
            return output
        visible = call.mask.expand(batch, 1, queries, keys).clone()
        for row, span in enumerate(spans):
            if span is not None:
                # The first query stands at position keys - queries.
                behind = max(0, span[1] - (keys - queries))
                first = behind if self.intervention.mode == "evict" else 0
                visible[row, :, first:, span[0] : span[1]] = False
        # A query inside the needle that may see nothing else keeps its own position.
        diagonal = torch.arange(queries, device=output.device)
        blind = ~visible.any(-1)
        visible[..., diagonal, diagonal + keys - queries] |= blind
        alpha = attention_weights(
            AttentionCall(
                call.layer,
                call.query,
                call.key,
                call.value,
                visible,
                call.scaling,
                call.softcap,
                call.sinks,
            )
        )
        group = call.query.shape[1] // call.value.shape[1]
        values = call.value.float().repeat_interleave(group, 1)
        return (alpha @ values).transpose(1, 2).to(output.dtype)
