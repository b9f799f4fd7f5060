"""Directions in the residual stream that a head's output is projected on (method, section 1)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workflow_scripts.common.architecture import HeadLayer, before_norm, final_norm, inverse_rms
from workflow_scripts.common.models import LanguageModel

LayerDirection = Callable[[HeadLayer, Tensor], tuple[Tensor, Tensor | float]]
"""Maps a layer and its attention output to (u, factor).

The output has shape (batch, queries, heads * head_dim); u is float32, (batch, queries, d_model), and
the factor multiplies phi per row, (batch, queries).
"""


def layer_directions(names: list[str], lm: LanguageModel, raw: Tensor) -> dict[str, LayerDirection]:
    """Return how each named direction is made for a layer.

    Parameters
    ----------
    names
        "raw": the unembedding row itself. "frozen_norm": the row seen through the norms between the
        attention and the logit, frozen; its factor lacks 1 / rms(h_L), known only after the last
        layer (`final_factors`). "tuned_lens": u' = (I + A_l)^T u with the model's lens.
    raw
        Unembedding rows, float32, shape (batch, queries, d_model).
    """

    def raw_direction(layer: HeadLayer, output: Tensor) -> tuple[Tensor, float]:
        return raw, 1.0

    def frozen_norm(layer: HeadLayer, output: Tensor) -> tuple[Tensor, Tensor]:
        norm = layer.post_attention_norm()
        direction = before_norm(before_norm(raw, final_norm(lm.model)), norm)
        return direction, inverse_rms(layer.projection(output), norm)

    def tuned_lens(layer: HeadLayer, output: Tensor) -> tuple[Tensor, float]:
        return raw + raw @ lm.lens[layer.index].to(raw.device), 1.0

    known: dict[str, LayerDirection] = {
        "raw": raw_direction,
        "frozen_norm": frozen_norm,
        "tuned_lens": tuned_lens,
    }
    return {name: known[name] for name in names}


def final_factors(lm: LanguageModel, hidden: Tensor) -> Tensor:
    """Return 1 / rms(h_L) per row, (batch, queries), from the final norm's input."""
    return inverse_rms(hidden, final_norm(lm.model))
