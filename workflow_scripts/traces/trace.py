"""One answer taken apart: what each head wrote into each of its tokens, and from which source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from workflow_scripts.activations.capture_probes import regions_of
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.shards import REGIONS, Shard
from workflow_scripts.traces.retrieval import DOCUMENT, Head

Array = NDArray[Any]


def probe_index(shard: Shard, probe_id: str) -> int | None:
    """Return the index of a probe in a shard; None if it is not there.

    Raises
    ------
    UserError
        If it is there without rows that can be traced.
    """
    for index, probe in enumerate(shard.probes):
        if probe["probe_id"] == probe_id:
            if not probe["answer_steps"] or probe["status"] == "mismatch":
                raise UserError(
                    f"probe {probe_id}: cannot be traced, it ended as {probe['status']} and the "
                    "shard keeps positions of answers only; name another probe, or bring the text "
                    "as a dataset of format document, whose answers are always kept"
                )
            return index
    return None


def head_table(shard: Shard, index: int) -> pl.DataFrame:
    """Return what every head wrote into each answer token, by region.

    Returns
    -------
    DataFrame
        step, token_id, layer, head, kv_group, phi (over all sources) and a column phi_{region} for
        each of `REGIONS`; float32, in logits, along the raw direction.
    """
    rows = np.flatnonzero((shard.read("step_probe") == index) & shard.read("step_is_answer"))
    phi = shard.read("phi_raw_by_region")[rows]
    step, layer, head = (part.ravel().astype(np.int32) for part in np.indices(phi.shape[:3]))
    columns = {
        "step": shard.read("step_index")[rows][step],
        "token_id": shard.read("step_token")[rows][step],
        "layer": layer,
        "head": head,
        "kv_group": head // (shard.n_heads // shard.n_kv_heads),
        "phi": phi.sum(-1, dtype=np.float64).astype(np.float32).ravel(),
    }
    by_region = {f"phi_{name}": phi[..., r].ravel() for r, name in enumerate(REGIONS)}
    return pl.DataFrame(columns | by_region)


def writers(heads: pl.DataFrame, k: int) -> list[Head]:
    """Return the k heads that wrote most from the document into this answer, most first."""
    document = pl.sum_horizontal(f"phi_{name}" for name in DOCUMENT)
    written = heads.group_by("layer", "head").agg(document.sum().alias("written"))
    ordered = written.sort(["written", "layer", "head"], descending=[True, False, False])
    return list(ordered.head(k).select("layer", "head").iter_rows())


def token_table(
    shard: Shard, index: int, heads: Sequence[Head], pieces: Sequence[str]
) -> pl.DataFrame:
    """Return what chosen heads wrote into each answer token from each source token.

    `pieces` are the texts of the prompt's and the answer's tokens, see `token_pieces`.

    Returns
    -------
    DataFrame
        step, position, source_id, source (its text), region, layer, head, alpha and phi (float32, in
        logits, along the raw direction). Over all positions of a step, phi sums to the head's phi
        in `head_table`, but for the rounding of the dense planes.
    """
    probe = shard.probes[index]
    rows = np.flatnonzero(shard.read("row_probe") == index)
    steps = shard.read("row_step")[rows]
    offsets, lengths = shard.read("row_offset")[rows], shard.read("row_length")[rows]
    ids = [*probe["input_ids"], *probe["generated_ids"]]
    prompt = [REGIONS[region] for region in regions_of(probe)]
    regions = prompt + ["generated"] * len(probe["generated_ids"])
    cells = np.concatenate([np.arange(o, o + n) for o, n in zip(offsets, lengths, strict=True)])
    position = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    about = pl.DataFrame(
        {
            "step": np.repeat(steps, lengths),
            "position": position,
            "source_id": np.asarray(ids, np.int32)[position],
            "source": pl.Series(pieces).gather(position),
            "region": pl.Series(regions).gather(position),
        }
    )
    parts = []
    for layer, chosen in _by_layer(heads).items():
        alpha, phi = (shard.read(name, layer) for name in ("alpha", "phi_raw"))
        parts += [
            about.with_columns(
                pl.lit(layer, pl.Int32).alias("layer"),
                pl.lit(head, pl.Int32).alias("head"),
                pl.Series("alpha", alpha[head, cells]),
                pl.Series("phi", phi[head, cells]),
            )
            for head in chosen
        ]
    return pl.concat(parts).sort("step", "layer", "head", "position")


def question_of(probe: Mapping[str, Any], pieces: Sequence[str]) -> str:
    """Return the question that a probe asks."""
    return "".join(pieces[probe["question_start"] : probe["question_end"]]).strip()


def answer_of(probe: Mapping[str, Any], pieces: Sequence[str]) -> list[str]:
    """Return the text of each token of the answer."""
    return [pieces[len(probe["input_ids"]) + step] for step in probe["answer_steps"]]


def _by_layer(heads: Sequence[Head]) -> dict[int, list[int]]:
    layers: dict[int, list[int]] = {}
    for layer, head in sorted(set(heads)):
        layers.setdefault(layer, []).append(head)
    return layers


def token_pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, so that joined they read as the whole.

    The pieces of a multi-byte character show nothing until its last one. Each token is decoded
    behind the one before it, since a tokenizer may drop the space of a text's first token.
    """

    def decode(part: Sequence[int]) -> str:
        return str(
            tokenizer.decode(
                list(part), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    pieces: list[str] = []
    start = 0  # first token that is not shown yet
    for end in range(1, len(ids) + 1):
        context = list(ids[max(0, start - 1) : start])
        text = decode([*context, *ids[start:end]])[len(decode(context)) :]
        # An open character shows as the replacement sign; four bytes at most make one.
        if text.endswith("\ufffd") and end - start < 4 and end < len(ids):
            pieces.append("")
            continue
        pieces.append(text)
        start = end
    return pieces
