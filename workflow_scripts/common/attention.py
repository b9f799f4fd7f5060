"""The one hook into a model: a registered attention function that lets taps watch and edit it.

transformers calls the function registered here for every attention layer, with the query after its
norm and RoPE and the keys and values of the cache. The result comes from the stock function; taps see
the call beside it. The mask function is registered as a pair with it: without one the mask would be
None and causality silently lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

INTERFACE = "locos"
"""Name under which the attention function and its mask function are registered."""


@dataclass(frozen=True)
class AttentionCall:
    """What one attention layer is called with.

    Attributes
    ----------
    layer
        Index of the layer.
    query
        After the query norm and RoPE, shape (batch, heads, queries, head_dim).
    key, value
        The whole cache, shape (batch, KV heads, keys, head_dim).
    mask
        True where a query may attend, shape (batch or 1, 1, queries, keys).
    scaling
        Factor on the query-key products.
    softcap
        Soft-capping of the attention logits (Gemma 2), or None.
    sinks
        One learned logit a head that takes attention away (gpt-oss), shape (heads,), or None.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    scaling: float
    softcap: float | None
    sinks: Tensor | None


Tap = Callable[[AttentionCall, Tensor], Tensor | None]
"""Sees a call and its output, (batch, queries, heads, head_dim); may return another output."""

_taps: list[Tap] = []


@contextmanager
def tapped(tap: Tap) -> Iterator[None]:
    """Let `tap` see every attention call inside the block."""
    _taps.append(tap)
    try:
        yield
    finally:
        _taps.remove(tap)


class _Filled(Exception):  # noqa: N818  (no error: it ends a forward)
    """The layer's keys and values are in the cache."""


_ends: list[int] = []


@contextmanager
def ending_at(layer: int) -> Iterator[None]:
    """End the forward inside the block once a layer's keys and values are in the cache.

    For a forward that only fills the cache: the last layer's attention and MLP would be for nothing.
    """
    _ends.append(layer)
    try:
        yield
    except _Filled:
        return
    finally:
        _ends.pop()
    raise AssertionError(f"the forward did not come to layer {layer}")


def attention_weights(call: AttentionCall) -> Tensor:
    """Return softmax attention in float32, whatever the model's dtype.

    Shape (batch, heads, queries, keys). A row sums to 1; with sinks, to less; it is 0 where the mask
    is False. No key is repeated for grouped-query attention: query head h reads KV head
    h // (heads / KV heads).
    """
    batch, heads, queries, dim = call.query.shape
    kv_heads, keys = call.key.shape[1], call.key.shape[2]
    grouped = call.query.float().reshape(batch, kv_heads, heads // kv_heads * queries, dim)
    logits = (grouped @ call.key.float().transpose(2, 3)).view(batch, heads, queries, keys)
    logits = logits * call.scaling
    if call.softcap is not None:
        logits = torch.tanh(logits / call.softcap) * call.softcap
    logits = logits.masked_fill(~call.mask, float("-inf"))
    if call.sinks is None:
        return logits.softmax(-1)
    sink = call.sinks.float().view(1, heads, 1, 1).expand(batch, heads, queries, 1)
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the mask of the last `queries` of `keys` positions, shape (1, 1, queries, keys)."""
    positions = torch.arange(keys, device=device)
    return (positions[None, :] <= positions[keys - queries :, None])[None, None]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run the stock attention of a module and show the call to the taps."""
    if _ends and _ends[-1] == module.layer_idx:
        raise _Filled
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is None and sinks is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    else:
        # SDPA refuses soft-capping and drops sinks without a word: these families keep their eager
        # function, which wants an additive mask.
        visible = _visible(attention_mask, query, key)
        additive = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        additive = additive.masked_fill(~visible, torch.finfo(query.dtype).min)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        output, _ = eager(
            module, query, key, value, additive, scaling=scaling, dropout=dropout, **kwargs
        )
    if _taps:
        call = AttentionCall(
            layer=int(module.layer_idx),  # type: ignore[arg-type]
            query=query,
            key=key,
            value=value,
            mask=_visible(attention_mask, query, key),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            sinks=sinks,
        )
        for tap in _taps:
            replaced = tap(call, output)
            output = output if replaced is None else replaced
    return output, None


def _visible(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Return the boolean mask, built from the positions where the model left it out."""
    if mask is None:
        return causal_mask(query.shape[2], key.shape[2], query.device)
    return mask


AttentionInterface.register(INTERFACE, _attention)
AttentionMaskInterface.register(INTERFACE, sdpa_mask)
