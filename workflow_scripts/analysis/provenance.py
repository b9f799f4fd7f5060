"""Where a head's contribution to the answer comes from, by region and by token.

Only contributions towards the answer count, max(phi, 0), over all answer steps of the probes that
passed. A head is non-literal where what it takes from the needle comes from other tokens than the
answer's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from workflow_scripts.activations.capture_probes import regions_of
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.shards import REGIONS, Shard, open_shard
from workflow_scripts.scores.pooling import Floats

SOURCES = (*REGIONS, "answer")
"""Region of a source position; "answer" is the answer word in the needle, "needle" all else of it."""

_NEEDLE, _ANSWER, _GENERATED = (SOURCES.index(name) for name in ("needle", "answer", "generated"))

Array = NDArray[Any]


def answer_positions(
    needle_ids: list[int],
    spelled_ids: list[int],
    answer: str,
    token_text: Mapping[str, str],
) -> NDArray[np.bool_]:
    """Return which tokens of the needle belong to the answer word, at all its occurrences.

    Parameters
    ----------
    needle_ids
        Tokens of the needle.
    spelled_ids
        The tokens with which the model wrote the answer; the needle may hold them as they are.
    answer
        The gold answer; else found in the needle's text, ignoring case and white space.
    token_text
        Text of each token of the needle, by the id in decimal.

    Returns
    -------
    ndarray
        bool, as long as the needle; all False if the answer is not in it.
    """
    found = np.zeros(len(needle_ids), bool)
    length = len(spelled_ids)
    for start in range(len(needle_ids) - length + 1):
        if length and needle_ids[start : start + length] == spelled_ids:
            found[start : start + length] = True
    # White space is left out: whether a token text starts with it differs between tokenizers.
    pieces = ["".join(token_text[str(token)].split()).casefold() for token in needle_ids]
    owner = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    text, wanted = "".join(pieces), "".join(answer.split()).casefold()
    start = text.find(wanted) if wanted else -1
    while start >= 0:
        found[owner[start : start + len(wanted)]] = True
        start = text.find(wanted, start + 1)
    return found


def source_labels(probe: Mapping[str, Any], token_text: Mapping[str, str]) -> NDArray[np.int64]:
    """Return the source of every prompt and generated position, as indices into `SOURCES`."""
    prompt = regions_of(dict(probe))
    labels = np.full(len(prompt) + len(probe["generated_ids"]), _GENERATED)
    labels[: len(prompt)] = prompt
    start, stop = probe["needle_start"], probe["needle_end"]
    if start is not None:
        spelled = [probe["generated_ids"][step] for step in probe["answer_steps"]]
        needle = probe["input_ids"][start:stop]
        is_answer = answer_positions(needle, spelled, probe["answer"], token_text)
        labels[start:stop][is_answer] = _ANSWER
    return labels


def _cells(shard: Shard) -> tuple[Array, Array, Array]:
    """Return cell, source, and whether its token is y_t, of all cells of passing probes."""
    texts = shard.attributes.get("token_text")
    if texts is None:
        raise UserError(f"{shard.path}: tells no token texts; capture it again")
    columns = ("row_probe", "row_token", "row_offset", "row_length")
    rows = zip(*(shard.read(name) for name in columns), strict=True)
    cells, labels, equal = [], [], []
    for owner, token, offset, length in rows:
        probe = shard.probes[owner]
        if probe["status"] != "passed":
            continue
        ids = np.array([*probe["input_ids"], *probe["generated_ids"]])[:length]
        cells.append(np.arange(offset, offset + length))
        labels.append(source_labels(probe, texts)[:length])
        equal.append(ids == token)
    if not cells:
        return (np.zeros(0, np.int64),) * 3
    return np.concatenate(cells), np.concatenate(labels), np.concatenate(equal)


def positive_sums(shard: Shard, direction: str) -> Floats:
    """Sum max(phi, 0) by source, (layer, head, source, 2): tokens other than y_t, and y_t itself.

    Reads the dense plane one layer at a time.
    """
    sums = np.zeros((shard.n_layers, shard.n_heads, 2 * len(SOURCES)))
    if "row_probe" in shard:
        cells, labels, equal = _cells(shard)
        one_hot = np.eye(2 * len(SOURCES))[2 * labels + equal]
        for layer in range(shard.n_layers):
            phi = shard.read(f"phi_{direction}", layer)[:, cells].astype(np.float64)
            sums[layer] = np.maximum(phi, 0) @ one_hot
    return sums.reshape(shard.n_layers, shard.n_heads, len(SOURCES), 2)


def provenance_table(dataset: str, direction: str, sums: Floats) -> pl.DataFrame:
    """Return a row a head from its `positive_sums`.

    Returns
    -------
    DataFrame
        dataset, direction, layer, head (int32), positive (float64, logits: the sum of max(phi, 0)),
        its shares by source, share_needle (without the answer word), share_answer (the answer word
        in the needle), share_haystack, share_question, share_bos, share_template, share_generated,
        which sum to 1; share_equal, the share from tokens that are y_t itself; and non_literality
        = share_needle / (share_needle + share_answer). Shares are null where nothing is positive,
        non_literality where nothing in the needle is.
    """
    layer, head = np.indices(sums.shape[:2], dtype=np.int32)
    by_source, total = sums.sum(-1), sums.sum((2, 3))
    in_needle = by_source[..., _NEEDLE] + by_source[..., _ANSWER]

    def share(part: Floats, whole: Floats) -> pl.Series:
        ratio = np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)
        return pl.Series(ratio.ravel()).fill_nan(None)

    columns = {
        "layer": layer.ravel(),
        "head": head.ravel(),
        "positive": total.ravel(),
        **{
            f"share_{source}": share(by_source[..., SOURCES.index(source)], total)
            for source in ("needle", "answer", *REGIONS[1:])
        },
        "share_equal": share(sums[..., 1].sum(-1), total),
        "non_literality": share(by_source[..., _NEEDLE], in_needle),
    }
    return pl.DataFrame(columns).select(
        pl.lit(dataset).alias("dataset"), pl.lit(direction).alias("direction"), pl.all()
    )


def provenance_of(dataset: str, shards: Iterable[str | Path], *, spec: Any) -> pl.DataFrame:
    """Return `provenance_table` of a dataset under every captured direction, with n_probes (int32).

    Parameters
    ----------
    dataset
        Its name.
    shards
        All its shards; one is held at a time.
    spec
        What they must have been made for.

    Raises
    ------
    UserError
        If a shard is not the one expected, or no probe passed.
    """
    sums: dict[str, Floats] = {}
    n_probes = 0
    for path in shards:
        with open_shard(path, spec=spec) as shard:
            n_probes += sum(probe["status"] == "passed" for probe in shard.probes)
            for direction in shard.directions():
                sums[direction] = sums.get(direction, 0) + positive_sums(shard, direction)
    if not n_probes:
        raise UserError(f"dataset {dataset}: no probe passed; use more or easier probes")
    tables = [provenance_table(dataset, direction, found) for direction, found in sums.items()]
    return pl.concat(tables).with_columns(pl.lit(n_probes, pl.Int32).alias("n_probes"))
