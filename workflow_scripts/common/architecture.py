"""Where the heads of a model are: attention modules, output projections, query sites, norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workflow_scripts.common.errors import UserError

REFUSED = {
    "qwen3_next": "its attention output is gated and most layers are linear attention",
    "qwen3_5": "its attention output is gated and most layers are linear attention",
    "qwen3_5_moe": "its attention output is gated and most layers are linear attention",
    "gemma3n": "its layers share keys and values",
    "gemma4": "its layers share keys and values",
    "deepseek_v2": "its latent attention (MLA) has no per-head value projection",
    "deepseek_v3": "its latent attention (MLA) has no per-head value projection",
    "falcon": "its attention does not run through transformers' attention interface",
    "mamba": "it has no attention heads",
    "mamba2": "it has no attention heads",
}
"""Families that the definitions of alpha and phi do not hold for, by `model_type`, with the reason."""

_OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "dense", "out_proj")
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm")


@dataclass(frozen=True)
class HeadLayer:
    """One attention layer.

    Attributes
    ----------
    index
        Index of the layer.
    block
        The decoder layer.
    attention
        The attention module inside it.
    projection
        Its output projection (o_proj).
    n_heads, n_kv_heads, head_dim
        As seen in a forward pass, not as stated in the config.
    query_norm_axis
        Axis of the heads in the query norm's output: 2 for (batch, tokens, heads, head_dim), 1 for
        (batch, heads, tokens, head_dim), 0 where the norm runs over the joined heads, None without.
    """

    index: int
    block: nn.Module
    attention: nn.Module
    projection: nn.Module
    n_heads: int
    n_kv_heads: int
    head_dim: int
    query_norm_axis: int | None = None

    def output_weight(self) -> Tensor:
        """Return W_O, shape (d_model, heads * head_dim); head h feeds columns h*head_dim onwards."""
        weight: Tensor = self.projection.weight  # type: ignore[assignment]
        # GPT-2's Conv1D keeps its weight the other way round.
        return weight if isinstance(self.projection, nn.Linear) else weight.T

    def write_directions(self, direction: Tensor) -> Tensor:
        """Return w = W_O^T u per head, so that omega = w . v (method: never materialise W_O v).

        Parameters
        ----------
        direction
            u, float32, shape (..., d_model).

        Returns
        -------
        Tensor
            float32, shape (..., heads, head_dim).
        """
        weight = self.output_weight().float()
        written = direction.to(weight.device) @ weight
        return written.view(*written.shape[:-1], self.n_heads, self.head_dim)

    def post_attention_norm(self) -> nn.Module | None:
        """Return the norm between the attention and the residual stream (Gemma, OLMo), or None.

        Pre-norm families use the name `post_attention_layernorm` for the norm before the MLP; the
        two are told apart by the norms that stand before the attention and before the MLP.
        """
        names = dict(self.block.named_children())
        norm = names.get("post_attention_layernorm")
        post = "input_layernorm" not in names or "pre_feedforward_layernorm" in names
        return norm if norm is not None and post else None

    def query_site(self, site: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        """Return the module whose output holds the query, and a view of the query in it.

        Parameters
        ----------
        site
            "q_proj": output of the projection, before any query norm; "query": after the norm.

        Returns
        -------
        module
            Hook its output.
        view
            Maps that output to a view of shape (batch, tokens, heads, head_dim); writing to the view
            writes to the output.
        """
        attention, heads, dim = self.attention, self.n_heads, self.head_dim
        if site == "query" and self.query_norm_axis is not None:
            axis = self.query_norm_axis
            views: dict[int, Callable[[Tensor], Tensor]] = {
                0: lambda out: out.unflatten(-1, (heads, dim)),
                1: lambda out: out.transpose(1, 2),
                2: lambda out: out,
            }
            return attention.q_norm, views[axis]  # type: ignore[return-value]
        if hasattr(attention, "q_proj"):
            return attention.q_proj, lambda out: out.unflatten(-1, (heads, dim))  # type: ignore
        if hasattr(attention, "query_key_value"):  # GPT-NeoX: per head, query then key then value
            return (
                attention.query_key_value,
                (  # type: ignore[return-value]
                    lambda out: out.unflatten(-1, (heads, 3 * dim))[..., :dim]
                ),
            )
        fused = attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.c_attn
        return fused, lambda out: out[..., : heads * dim].unflatten(-1, (heads, dim))  # type: ignore


def final_norm(model: nn.Module) -> nn.Module:
    """Return the norm before the unembedding."""
    decoder = text_decoder(model)
    for name in _FINAL_NORMS:
        if hasattr(decoder, name):
            return getattr(decoder, name)  # type: ignore[no-any-return]
    raise UserError(f"model {type(model).__name__}: no final norm found; this family is not known")


def text_decoder(model: Any) -> nn.Module:
    """Return the stack of decoder layers, inside a multimodal wrapper too."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    return getattr(decoder, "language_model", decoder)  # type: ignore[no-any-return]


def refuse_unknown_family(config: Any, name: str) -> None:
    """Raise UserError, before weights are loaded, for a family the definitions do not hold for."""
    for part in (config, config.get_text_config(decoder=True)):
        kind = part.model_type.removesuffix("_text")
        if kind in REFUSED:
            raise UserError(f"model {name}: family '{kind}' cannot be captured: {REFUSED[kind]}")


def attention_modules(model: nn.Module) -> list[tuple[nn.Module, nn.Module, nn.Module]]:
    """Return (decoder layer, attention module, output projection) of every layer, in order.

    Raises
    ------
    UserError
        If a layer has no attention module with a known output projection.
    """
    decoder = text_decoder(model)
    found = []
    blocks: Any = getattr(decoder, "layers", None) or getattr(decoder, "h", None)
    if blocks is None:
        raise UserError(f"model {type(model).__name__}: no decoder layers found")
    for index, block in enumerate(blocks):
        for module in block.modules():
            name = next((n for n in _OUTPUT_PROJECTIONS if hasattr(module, n)), None)
            if getattr(module, "layer_idx", None) == index and name is not None and module != block:
                found.append((block, module, getattr(module, name)))
                break
        else:
            raise UserError(
                f"model {type(model).__name__}: layer {index} has no attention module with one of "
                f"{', '.join(_OUTPUT_PROJECTIONS)}; this family cannot be captured"
            )
    return found


def before_norm(direction: Tensor, norm: nn.Module | None) -> Tensor:
    """Return the direction before a frozen norm that equals `direction` after it, less 1 / rms.

    The gain is 1 + w for Gemma, else w. LayerNorm also takes the mean out of what it reads, so its
    direction has none. Both are float32, (..., d_model); without a norm nothing changes.
    """
    if norm is None:
        return direction
    gain: Tensor = norm.weight.detach().float().to(direction.device)  # type: ignore[operator]
    if type(norm).__name__.startswith("Gemma"):
        gain = 1.0 + gain
    direction = direction * gain
    if isinstance(norm, nn.LayerNorm):
        direction = direction - direction.mean(-1, keepdim=True)
    return direction


def inverse_rms(values: Tensor, norm: nn.Module | None) -> Tensor:
    """Return 1 / rms over the last axis with the norm's own epsilon, float32; 1 without a norm.

    For LayerNorm, of the values less their mean.
    """
    values = values.float()
    if norm is None:
        return torch.ones_like(values[..., 0])
    if isinstance(norm, nn.LayerNorm):
        values = values - values.mean(-1, keepdim=True)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
    return torch.rsqrt(values.pow(2).mean(-1) + epsilon)
