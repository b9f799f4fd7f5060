"""What a model caches of a context, told by its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CacheShape:
    """The cache of a KV group.

    Attributes
    ----------
    head_dim
        Numbers in a key, and in a value.
    windows
        By layer, the tokens that its attention looks back at; None for all.
    """

    head_dim: int
    windows: tuple[int | None, ...]

    def tokens(self, layer: int, context_length: int) -> int:
        """Return how many tokens of a context a layer caches."""
        window = self.windows[layer]
        return context_length if window is None else min(window, context_length)


def cache_shape(config: Any) -> CacheShape:
    """Read the shape of a cache from a transformers config, as transformers' own caches do.

    A layer is windowed where `layer_types` says so; without it all layers are, if there is a window.
    """
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    layers = text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * layers
    return CacheShape(
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        windows=tuple(None if kind == "full_attention" else window for kind in kinds),
    )
