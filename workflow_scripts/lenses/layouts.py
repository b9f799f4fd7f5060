"""Files of tuned lenses: one affine translator a layer, h + A h + b.

Of a lens the direction u' = (I + A)^T u is made (method, section 1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from workflow_scripts.common.artifacts import METADATA_KEY, atomic_path
from workflow_scripts.common.digests import canonical_json
from workflow_scripts.common.errors import UserError

_FLAT = re.compile(r"(?:layer_translators\.)?(\d+)\.weight")


def read_lens(path: str | Path, n_layers: int, width: int) -> list[Tensor]:
    """Return A of each layer, float32, (d_model, d_model), of a lens in either public layout.

    {layer: {"A": I + A, "b": b}}, possibly under "translators", holds the identity, which is taken
    off; the flat "{i}.weight" or "layer_translators.{i}.weight" does not. The bias is one constant
    per step, not per head and position, and is left out.

    Parameters
    ----------
    path
        A .safetensors file, or one that torch.load reads with weights_only=True: no code is run.
    n_layers, width
        What the model has.

    Raises
    ------
    UserError
        If the file is no lens, or one of another model.
    """
    try:
        content = (
            load_file(path)
            if Path(path).suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"tuned lens {path}: cannot be read ({reason})") from None
    found = _translators(content)
    missing = [layer for layer in range(n_layers) if layer not in found]
    if missing:
        raise UserError(
            f"tuned lens {path}: has no translator of layer {missing[0]}; expected "
            "{layer: {A, b}} or {layer}.weight of every layer"
        )
    for layer in range(n_layers):
        if tuple(found[layer].shape) != (width, width):
            raise UserError(
                f"tuned lens {path}: layer {layer} has shape {tuple(found[layer].shape)}, the model "
                f"needs ({width}, {width}); this lens belongs to another model"
            )
    return [found[layer] for layer in range(n_layers)]


def write_lens(
    path: str | Path, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), *, spec: Any
) -> None:
    """Write a lens in the flat layout, "{i}.weight" and "{i}.bias", as .safetensors.

    Parameters
    ----------
    path
        The file; replaced atomically.
    weights, biases
        A and b of each layer, float32, (d_model, d_model) and (d_model,); b may be left out.
    spec
        What the lens was made from, kept in the file's metadata.
    """
    tensors = {f"{layer}.weight": matrix.contiguous() for layer, matrix in enumerate(weights)}
    tensors |= {f"{layer}.bias": vector.contiguous() for layer, vector in enumerate(biases)}
    about = canonical_json({"kind": "tuned lens", "spec": spec})
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={METADATA_KEY.decode(): about})


def _translators(content: Any) -> dict[int, Tensor]:
    """Return A by layer from the content of either layout; empty where neither fits."""
    if not isinstance(content, Mapping):
        return {}
    full = content.get("translators", content)
    found = {}
    for key, value in full.items():
        if isinstance(value, Mapping) and "A" in value:
            matrix = value["A"].float()
            found[int(key)] = matrix - torch.eye(*matrix.shape)
        elif isinstance(value, Tensor) and (match := _FLAT.fullmatch(str(key))):
            found[int(match[1])] = value.float()
    return found
