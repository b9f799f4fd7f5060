"""The page of a trace: what its template and its script are filled with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from workflow_scripts.common.shards import REGIONS
from workflow_scripts.traces.retrieval import DOCUMENT, KINDS

ALL_NEGATIVES = "failing or removed"


@dataclass(frozen=True)
class Signal:
    """The retrieval signal of one answer against the reference probes.

    Attributes
    ----------
    share
        Of the answer; see `traces.retrieval.document_shares`.
    below
        Share of the reference probes of each kind whose signal is lower, 0 to 1; None for a kind
        without probes.
    threshold
        Signal from which on an answer counts as retrieved; None where the probes cannot tell.
    """

    share: float
    below: Mapping[str, float | None]
    threshold: float | None

    @property
    def verdict(self) -> str:
        """Return what the signal says, in words."""
        if self.threshold is None:
            return "unknown: no passing, or no other, reference probes to compare with"
        if self.share >= self.threshold:
            return (
                "strong: written from the document as in the probes that the model answers from it"
            )
        return "weak: the answer may not come from the document"


def signal_of(share: float, probes: pl.DataFrame, auc: pl.DataFrame) -> Signal:
    """Compare an answer's share with the reference probes."""
    below: dict[str, float | None] = {}
    for kind in KINDS:
        shares = probes.filter(kind=kind)["share"].to_numpy()
        below[kind] = float((shares < share).mean()) if len(shares) else None
    threshold = auc.filter(negative=ALL_NEGATIVES)["threshold"].item()
    return Signal(share, below, threshold)


def reference_rows(signal: Signal, probes: pl.DataFrame) -> list[dict[str, Any]]:
    """Return, for each kind of reference probe there is: kind, n, quartiles of the share, below."""
    rows = []
    for kind in KINDS:
        shares = probes.filter(kind=kind)["share"]
        if len(shares):
            quartiles = [shares.quantile(q, "linear") for q in (0.25, 0.5, 0.75)]
            rows.append(
                {
                    "kind": kind,
                    "n": len(shares),
                    "quartiles": quartiles,
                    "below": signal.below[kind],
                }
            )
    return rows


def trace_data(
    heads: pl.DataFrame, tokens: pl.DataFrame, answer: Sequence[str], top: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return what the page's script shows, as JSON values.

    Parameters
    ----------
    heads, tokens
        The tables of a trace; see `traces.trace`.
    answer
        Text of each traced answer token.
    top
        (layer, head) of the score's best heads.

    Returns
    -------
    dict
        `answer`; `sources`: [text, region] by position; `n_layers`, `n_heads`; `document` and
        `total`: by step, what each head (by layer and head) wrote from the document, and from
        everywhere; `chosen`: [layer, head] of the heads that are known by position; `phi`: by step and
        chosen head, phi by position; `top`, `writers`: indices into `chosen`.
    """
    last = tokens.filter(pl.col("step") == tokens["step"].max())
    chosen = tokens.select("layer", "head").unique().sort("layer", "head").rows()
    sources = last.filter(layer=chosen[0][0], head=chosen[0][1]).sort("position")
    document = pl.sum_horizontal(f"phi_{name}" for name in DOCUMENT).alias("document")
    by_step = heads.sort("step", "layer", "head").with_columns(document)
    steps = by_step.partition_by("step", maintain_order=True)
    known = tokens.sort("step", "layer", "head", "position").partition_by(
        "step", "layer", "head", maintain_order=True
    )
    phi = [_short(part["phi"]) for part in known]
    best = {(layer, head) for layer, head in top}
    return {
        "answer": list(answer),
        "sources": [
            [text, REGIONS.index(region)]
            for text, region in sources.select("source", "region").iter_rows()
        ],
        "regions": REGIONS,
        "n_layers": int(heads["layer"].max()) + 1,  # type: ignore[arg-type]
        "n_heads": int(heads["head"].max()) + 1,  # type: ignore[arg-type]
        "document": [_short(part["document"]) for part in steps],
        "total": [_short(part["phi"]) for part in steps],
        "chosen": [list(pair) for pair in chosen],
        "phi": [phi[i : i + len(chosen)] for i in range(0, len(phi), len(chosen))],
        "top": [i for i, pair in enumerate(chosen) if pair in best],
        "writers": [i for i, pair in enumerate(chosen) if pair not in best],
    }


def _short(values: pl.Series) -> list[float]:
    """Return numbers with four significant digits: what a reader can use."""
    return [float(f"{value:.4g}") for value in values]
