"""Loading a model and its tokenizer, and checking that the method's identities hold for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers import logging as transformers_logging
from transformers.models.auto import AutoModelForCausalLM, AutoModelForImageTextToText

from workflow_scripts.common.architecture import (
    HeadLayer,
    attention_modules,
    refuse_unknown_family,
)
from workflow_scripts.common.attention import (
    INTERFACE,
    AttentionCall,
    attention_weights,
    tapped,
)
from workflow_scripts.common.devices import take_gpu
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.hub import hub_model_config

log = logging.getLogger("locos")

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative error allowed by the self-check, by the dtype of the weights."""


@dataclass(frozen=True)
class Source:
    """Where a model's files are: a local folder, or a hub id with its revision."""

    location: str
    revision: str | None = None
    trust_remote_code: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return what every `from_pretrained` call is given."""
        return {
            "pretrained_model_name_or_path": self.location,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass
class LanguageModel:
    """A loaded model with the geometry of its heads.

    Attributes
    ----------
    model
        The stock transformers module, in evaluation mode, with the project's attention function.
    tokenizer
        Its tokenizer.
    layers
        Its attention layers, in order.
    eos_ids
        Token ids that end a generation.
    lens
        A of each layer's tuned lens, float32, (d_model, d_model); empty without one.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    layers: list[HeadLayer]
    eos_ids: frozenset[int]
    lens: list[Tensor] = field(default_factory=list)
    _pieces: dict[int, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of the embedding: where token ids go."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    @property
    def n_heads(self) -> int:
        """Query heads a layer."""
        return self.layers[0].n_heads

    def unembedding(self) -> Tensor:
        """Return the unembedding, shape (vocabulary, d_model); the embedding where they are tied."""
        return self.model.get_output_embeddings().weight.detach()  # type: ignore[no-any-return]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def piece(self, token: int) -> str:
        """Return the text of one token."""
        if token not in self._pieces:
            self._pieces[token] = self.decode([token])
        return self._pieces[token]


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder or a hub id.

    Raises
    ------
    UserError
        If it cannot be loaded.
    """
    _refuse_absent(source)
    try:
        return AutoTokenizer.from_pretrained(**source.arguments())
    except (OSError, ValueError) as error:
        raise UserError(_cannot_load(source, "tokenizer", error)) from None


def load_config(source: Source) -> Any:
    """Load a model's config and refuse the families that cannot be captured, before any weights."""
    _refuse_absent(source)
    try:
        config = AutoConfig.from_pretrained(**source.arguments())
    except (OSError, ValueError) as error:
        raise UserError(_cannot_load(source, "config", error)) from None
    refuse_unknown_family(config, source.location)
    return config


def most_positions(config: Any) -> int:
    """Return how many positions a model was made for."""
    return int(config.get_text_config(decoder=True).max_position_embeddings)


def _refuse_absent(source: Source) -> None:
    """Refuse a hub model that cannot be had, before transformers tries for it many times over."""
    if source.revision is not None:
        hub_model_config(source.location, source.revision)


def choose_device(device: str) -> str:
    """Return the device to run on: "auto" takes a GPU where there is one.

    Of several GPUs, "auto" and "cuda" take one that no other job holds.

    Raises
    ------
    UserError
        If a GPU is asked for where torch finds none.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {device}: torch finds no GPU here; set device: cpu or auto")
    if device == "cuda" and torch.cuda.device_count() > 1:
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return f"cuda:{take_gpu([str(gpu.uuid) for gpu in gpus])}"
    return device


def load_model(source: Source, *, dtype: str, device: str) -> LanguageModel:
    """Load a model with the project's attention function and check the identities on it.

    Parameters
    ----------
    source
        Local folder or hub id.
    dtype
        "float32", "bfloat16" or "float16".
    device
        "auto", "cpu", "cuda", "cuda:N", or "balanced" to spread layers over all GPUs.

    Raises
    ------
    UserError
        If it cannot be loaded, or the method's identities do not hold for it.
    """
    config = load_config(source)
    transformers_logging.disable_progress_bar()
    loader = (
        AutoModelForImageTextToText
        if config.get_text_config(decoder=True) is not config
        else AutoModelForCausalLM
    )
    device_map = "balanced" if device == "balanced" else choose_device(device)
    try:
        model = loader.from_pretrained(
            **source.arguments(),
            dtype=getattr(torch, dtype),
            attn_implementation=INTERFACE,
            # Never a pickle, which could bring code.
            use_safetensors=True,
            # Only several GPUs need a device map.
            **({"device_map": "balanced"} if device_map == "balanced" else {}),
        )
    except (OSError, ValueError) as error:
        raise UserError(_cannot_load(source, "model", error)) from None
    if device_map != "balanced":
        model = model.to(torch.device(device_map))  # type: ignore[arg-type]
    return wrap_model(model, load_tokenizer(source))


def wrap_model(model: Any, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """Put the project's attention function into a model and check the identities on 8 tokens.

    Raises
    ------
    UserError
        If an identity of the method fails: such a model would be scored wrongly.
    """
    model.eval().requires_grad_(False)
    model.set_attn_implementation(INTERFACE)
    layers = _check_identities(model)
    return LanguageModel(model, tokenizer, layers, _eos_ids(model, tokenizer))


def _eos_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Collect the end-of-sequence ids of tokenizer and generation config (one, a list or none)."""
    ids: set[int] = set()
    for value in (tokenizer.eos_token_id, model.generation_config.eos_token_id):
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
    return frozenset(ids)


@torch.inference_mode()
def _check_identities(model: Any) -> list[HeadLayer]:
    """Return the attention layers after checking, on a few tokens, what the scores rest on.

    Per layer: the attention equals the model's own eager attention on the same input; the weights
    recomputed from query and key, applied to the values, give the attention output; that output reaches
    W_O unchanged; W_O applied to it gives what the layer adds, less a bias. Layer by layer, because
    rounding grows over the layers of a bfloat16 model until the logits of odd tokens say nothing.
    """
    modules = attention_modules(model)
    name = type(model).__name__
    tolerance = TOLERANCE[model.dtype]
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    # A number of tokens that differs from that of the heads tells the two axes apart.
    tokens = 8 if heads != 8 else 9
    ids = torch.arange(1, tokens + 1, device=model.get_input_embeddings().weight.device)[None]

    calls: dict[int, tuple[AttentionCall, Tensor]] = {}
    norms: dict[int, tuple[int, ...]] = {}
    hidden: dict[int, Tensor] = {}

    def tap(call: AttentionCall, output: Tensor) -> None:
        calls[call.layer] = (call, output)

    with ExitStack() as stack:
        inputs, outputs = _kept_projections(modules, stack)
        for index, (block, attention, _) in enumerate(modules):
            keep = _keep_hidden(index, hidden)
            stack.callback(block.register_forward_pre_hook(keep).remove)
            query_norm: Any = getattr(attention, "q_norm", None)
            if query_norm is not None:
                stack.callback(query_norm.register_forward_hook(_keep_shape(index, norms)).remove)
        stack.enter_context(tapped(tap))
        model(ids, use_cache=False)
    with ExitStack() as stack:
        _, eager_outputs = _kept_projections(modules, stack)
        for index, (block, _, _) in enumerate(modules):
            stack.callback(block.register_forward_pre_hook(_put_hidden(hidden[index])).remove)
        model.set_attn_implementation("eager")
        stack.callback(model.set_attn_implementation, INTERFACE)
        model(ids, use_cache=False)

    layers = []
    for index, (block, attention, projection) in enumerate(modules):
        if index not in calls:
            raise UserError(
                f"model {name}: layer {index} does not call the attention interface (linear or "
                "custom attention); this family cannot be captured"
            )
        if _differs(outputs[index], eager_outputs[index], tolerance):
            raise UserError(
                f"model {name}: layer {index}: the attention differs from the model's own eager "
                "attention; cannot capture"
            )
        call, output = calls[index]
        n_heads, n_kv_heads, dim = call.query.shape[1], call.key.shape[1], call.value.shape[-1]
        layer = HeadLayer(index, block, attention, projection, n_heads, n_kv_heads, dim)
        if index in norms:
            layer = replace(layer, query_norm_axis=_heads_axis(norms[index], n_heads))
        alpha = attention_weights(call)
        values = call.value.float().repeat_interleave(n_heads // n_kv_heads, 1)
        if _differs((alpha @ values).transpose(1, 2), output, tolerance):
            raise UserError(f"model {name}: layer {index}: attention weights cannot be recomputed")
        if _differs(inputs[index], output.flatten(2), tolerance):
            raise UserError(
                f"model {name}: layer {index}: the attention output is changed before W_O (gated "
                "attention?); this family cannot be captured"
            )
        bias = getattr(projection, "bias", None)
        written = output.flatten(2).float() @ layer.output_weight().float().T
        if _differs(written, outputs[index] - (0 if bias is None else bias), tolerance):
            raise UserError(f"model {name}: layer {index}: W_O is not a plain projection")
        layers.append(layer)
    return layers


def _kept_projections(
    modules: list[tuple[nn.Module, nn.Module, nn.Module]], stack: ExitStack
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return the input and output of each layer's output projection, filled by the next pass."""
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[index], outputs[index] = args[0], output

        return hook

    for index, (_, _, projection) in enumerate(modules):
        stack.callback(projection.register_forward_hook(keep(index)).remove)
    return inputs, outputs


def _keep_hidden(index: int, hidden: dict[int, Tensor]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        hidden[index] = args[0]

    return hook


def _put_hidden(hidden: Tensor) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (hidden, *args[1:])

    return hook


def _keep_shape(index: int, shapes: dict[int, tuple[int, ...]]) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        shapes[index] = tuple(output.shape)

    return hook


def _heads_axis(shape: tuple[int, ...], n_heads: int) -> int:
    """Return which axis of a query norm's output counts heads; 0 for joined heads."""
    return 0 if len(shape) == 3 else shape.index(n_heads, 1)


def _differs(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether two tensors differ by more than a share of the largest expected value."""
    difference = (found.float() - expected.float().to(found.device)).abs().max()
    return bool(difference > tolerance * expected.float().abs().max() + 1e-6)


def _cannot_load(source: Source, what: str, error: Exception) -> str:
    """Return one line that says why something could not be loaded and what to do."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "custom code" in reason:
        reason = "it brings code of its own; set trust_remote_code: true if you trust its author"
    if Path(source.location).is_dir():
        return f"model {source.location}: cannot load its {what}: {reason}"
    at = f" at revision {source.revision}" if source.revision else ""
    return (
        f"model {source.location}{at}: cannot load its {what} ({reason}); check the id, the network "
        "and, for a gated model, the licence page and HF_TOKEN; or name a local folder"
    )


def model_of_rule(snakemake: Any) -> LanguageModel:
    """Load the model of a rule's `model` wildcard as the config says.

    Device, threads and location are read from the config rather than from the rule's params: they
    decide no number, so changing them reruns nothing.
    """
    torch.set_num_threads(snakemake.threads)
    row = snakemake.config["models"][snakemake.wildcards.model]
    return load_model(source_of_rule(snakemake), dtype=row["dtype"], device=row["device"])


def source_of_rule(snakemake: Any) -> Source:
    """Return where the model of a rule's `model` wildcard is loaded from.

    A converted model lies where the rule's input is: in this store, in a shared one, or in a copy of
    an object store's files.
    Warns of a model that brings code, before any of it can run.
    """
    row = snakemake.config["models"][snakemake.wildcards.model]
    source = row["source"]
    location = (
        source.get("hub") or source.get("folder") or str(Path(snakemake.input.model[0]).parent)
    )
    if row["trust_remote_code"]:
        log.warning("model %s: runs code from its repository (trust_remote_code)", location)
    return Source(location, source.get("revision"), row["trust_remote_code"])
