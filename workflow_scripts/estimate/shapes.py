"""What of a model's config.json decides its costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workflow_scripts.common.errors import UserError


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder.

    Attributes
    ----------
    layers, width, heads, kv_heads, head_dim, vocabulary
        Layers, d_model, query and KV heads a layer, their dimension, and rows of the unembedding.
    mlp
        Width of the MLP, or of one expert; each is three matrices (gate, up, down).
    experts, active_experts
        Experts a layer, and how many of them a token passes; 1 without a mixture.
    tied
        Whether the unembedding is the embedding.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    mlp: int
    experts: int
    active_experts: int
    tied: bool

    @property
    def attention_weights(self) -> int:
        """Weights of the projections of one layer."""
        return 2 * self.width * self.head_dim * (self.heads + self.kv_heads)

    @property
    def input_weights(self) -> int:
        """Weights of the query, key and value projections of one layer."""
        return self.width * self.head_dim * (self.heads + 2 * self.kv_heads)

    def parameters(self) -> int:
        """Return the number of weights, without norms, biases and routers (below 0.1 %)."""
        mlp = 3 * self.width * self.mlp * self.experts
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        return self.layers * (self.attention_weights + mlp) + embeddings

    def layer_weights_used(self) -> int:
        """Return the weights of one layer that a token is multiplied with."""
        return self.attention_weights + 3 * self.width * self.mlp * self.active_experts


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Read a shape from the content of a config.json.

    Raises
    ------
    UserError
        If a dimension is missing, as in families without a gated MLP (GPT-2, GPT-NeoX).
    """
    text = config.get("text_config") or config
    try:
        heads = text["num_attention_heads"]
        experts = text.get("num_experts") or text.get("num_local_experts") or 1
        mixed = experts > 1
        return Shape(
            layers=text["num_hidden_layers"],
            width=text["hidden_size"],
            heads=heads,
            kv_heads=text["num_key_value_heads"],
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            vocabulary=text["vocab_size"],
            mlp=(mixed and text.get("moe_intermediate_size")) or text["intermediate_size"],
            experts=experts,
            active_experts=text["num_experts_per_tok"] if mixed else 1,
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        )
    except KeyError as error:
        raise UserError(
            f"estimate: a config.json of type {text.get('model_type')} has no {error}; its costs are "
            "not modelled"
        ) from None
