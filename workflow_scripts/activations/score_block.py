"""The one forward pass over the answer's rows in which every detector's quantities are read."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from workflow_scripts.activations.directions import final_factors, layer_directions
from workflow_scripts.common.architecture import final_norm
from workflow_scripts.common.attention import AttentionCall, attention_weights, tapped
from workflow_scripts.common.models import LanguageModel
from workflow_scripts.common.shards import REGIONS

WINDOW = 8
"""Last prompt tokens whose rows are read beside the answer's (the SnapKV window)."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Answer:
    """A probe with its generated answer.

    Attributes
    ----------
    prompt_ids, generated_ids
        Token ids.
    answer_steps
        Generated steps that spell the gold answer; their rows are kept per position.
    regions
        Index into `REGIONS` of each prompt position, int64, shape (prompt,).
    needle
        Half-open span of the needle, or None.
    thinking
        Leading generated tokens that belong to a <think> block: their rows are not kept.
    """

    prompt_ids: list[int]
    generated_ids: list[int]
    answer_steps: list[int]
    regions: Array
    needle: tuple[int, int] | None
    thinking: int = 0


@dataclass
class Capture:
    """What one probe leaves behind; L layers, H heads, S rows, R regions.

    A row is a step: -7 to 0 are the queries of the last 8 prompt tokens, t >= 0 predicts generated
    token t.

    Attributes
    ----------
    step, token, logprob, length, u_norm
        Per row, shape (S,): the step, the token it produced (-1 for none), its log probability, N_t
        (key positions up to the query) and the norm of its unembedding row.
    by_region
        "alpha" and "phi_{direction}": float32, shape (S, L, H, R); phi is NaN where no token follows.
    argmax, top10_in_needle, topn_needle_alpha
        Shape (S, L, H); see the shard's contract in `common/shards.py`.
    peak
        "phi_{direction}" at the needle position with most attention: float32, shape (S, L, H); NaN
        where no token follows, or without a needle.
    dense
        "alpha" and "phi_{direction}": float32, shape (L, H, cells), rows of the answer steps in order.
    reproduced
        Whether this pass predicts the generated ids.
    """

    step: Array
    token: Array
    logprob: Array
    length: Array
    u_norm: Array
    reproduced: bool
    by_region: dict[str, Array]
    argmax: Array
    top10_in_needle: Array
    topn_needle_alpha: Array
    peak: dict[str, Array]
    dense: dict[str, Array]


@torch.inference_mode()
def score_block(
    lm: LanguageModel, cache: DynamicCache, answers: list[Answer], directions: list[str]
) -> list[Capture]:
    """Run the answer's rows and the last prompt rows once more, with the answer known.

    Parameters
    ----------
    lm
        The model.
    cache
        Holds, for each answer's prompt, all but its last `WINDOW` tokens; extended in place.
    answers
        One a row of the cache; prompts of equal length.
    directions
        Names understood by `layer_directions`.
    """
    reader = _BlockReader(lm, answers, directions)
    with ExitStack() as stack:
        stack.enter_context(tapped(reader.read_layer))
        norm = final_norm(lm.model)
        stack.callback(norm.register_forward_pre_hook(reader.read_final_hidden).remove)
        logits = lm.model(
            reader.ids, cache=cache, use_cache=True, logits_to_keep=reader.scored_rows
        ).logits
    return reader.finish(logits.float())


class _BlockReader:
    """Collects the captures of a batch while the layers run."""

    def __init__(self, lm: LanguageModel, answers: list[Answer], directions: list[str]) -> None:
        self.lm, self.answers = lm, answers
        prompt = len(answers[0].prompt_ids)
        self.window = min(WINDOW, prompt)
        steps = max(1, *(len(a.generated_ids) for a in answers), 1)
        self.scored_rows = steps
        self.rows = self.window - 1 + steps
        self.keys = prompt + steps - 1
        self.first = prompt - self.window  # position of the first row
        # Rows past a shorter answer come after all its own rows, so causality keeps them harmless.
        self.ids = torch.zeros(len(answers), self.rows, dtype=torch.long)
        self.targets = torch.full((len(answers), self.rows), -1)
        for b, answer in enumerate(answers):
            known = answer.prompt_ids[self.first :] + answer.generated_ids[:-1]
            self.ids[b, : len(known)] = torch.tensor(known)
            count = len(answer.generated_ids)
            first = self.window - 1 + answer.thinking
            self.targets[b, first : self.window - 1 + count] = torch.tensor(
                answer.generated_ids[answer.thinking :], dtype=torch.long
            )
        self.ids = self.ids.to(lm.device)
        table = lm.unembedding()
        self.raw = table[self.targets.clamp(min=0).to(table.device)].float()
        self.directions = layer_directions(directions, lm, self.raw)
        self.one_hot = self._one_hot_regions()
        self.in_needle = self._needle_mask()
        # What is read of each answer, by name: one array a layer.
        self.read: list[dict[str, list[Array]]] = [{} for _ in answers]
        self.final_hidden = torch.empty(0)

    def _own_rows(self, b: int) -> int:
        """Return how many rows belong to an answer: its prompt rows and its generated steps."""
        return self.window - 1 + max(1, len(self.answers[b].generated_ids))

    def _one_hot_regions(self) -> Tensor:
        """Return each key position's region, float32, (batch, keys, regions)."""
        regions = torch.full((len(self.answers), self.keys), REGIONS.index("generated"))
        for b, answer in enumerate(self.answers):
            regions[b, : len(answer.prompt_ids)] = torch.from_numpy(answer.regions)
        return torch.nn.functional.one_hot(regions, len(REGIONS)).float()

    def _needle_mask(self) -> Tensor:
        """Return which key positions lie in the needle, bool, (batch, 1, 1, keys)."""
        mask = torch.zeros(len(self.answers), 1, 1, self.keys, dtype=torch.bool)
        for b, answer in enumerate(self.answers):
            if answer.needle is not None:
                mask[b, ..., answer.needle[0] : answer.needle[1]] = True
        return mask

    def _keep(self, b: int, name: str, values: Array) -> None:
        self.read[b].setdefault(name, []).append(values)

    def _steps(self, b: int) -> Array:
        """Return the step of each of an answer's own rows, int32."""
        return np.arange(self._own_rows(b), dtype=np.int32) - (self.window - 1)

    def _lengths(self, b: int) -> Array:
        """Return N_t of each of an answer's own rows, int32."""
        return self._steps(b) + np.int32(len(self.answers[b].prompt_ids))

    def read_layer(self, call: AttentionCall, output: Tensor) -> None:
        """Read one layer: alpha and phi of every row, reduced and, for answer rows, whole."""
        layer = self.lm.layers[call.layer]
        alpha = attention_weights(call)
        planes = {"alpha": alpha}
        for name, direction in self.directions.items():
            u, factor = direction(layer, output.flatten(2))
            planes[f"phi_{name}"] = alpha * _contribution(layer.write_directions(u), call.value)
            if isinstance(factor, Tensor):
                planes[f"phi_{name}"] *= factor[:, None, :, None]
        self._reduce(planes)
        self._keep_answer_rows(planes)

    def _reduce(self, planes: dict[str, Tensor]) -> None:
        alpha = planes["alpha"]
        one_hot = self.one_hot.to(alpha.device)[:, None]
        sums = {name: (plane @ one_hot).cpu().numpy() for name, plane in planes.items()}
        in_needle = self.in_needle.to(alpha.device)
        top10, topn = (part.cpu().numpy() for part in _top_in_needle(alpha, in_needle))
        argmax = alpha.argmax(-1).cpu().numpy()  # the first of equals
        at = alpha.masked_fill(~in_needle, -1.0).argmax(-1, keepdim=True)
        phis = [name for name in planes if name != "alpha"]
        peaks = {name: planes[name].gather(-1, at)[..., 0].cpu().numpy() for name in phis}
        counts = {"argmax": argmax.astype(np.int32), "top10_in_needle": top10.astype(np.int32)}
        for b in range(len(self.answers)):
            own = self._own_rows(b)
            known = (self.targets[b, :own] >= 0).numpy()
            for name, values in sums.items():
                rows = values[b, :, :own].transpose(1, 0, 2)
                if name != "alpha":
                    rows = np.where(known[:, None, None], rows, np.nan).astype(np.float32)
                self._keep(b, f"{name}_by_region", rows)
            known &= self.answers[b].needle is not None
            for name, values in peaks.items():
                rows = np.where(known[:, None], values[b, :, :own].T, np.nan)
                self._keep(b, f"peak_{name}", rows.astype(np.float32))
            for name, values in (counts | {"topn_needle_alpha": topn}).items():
                self._keep(b, name, values[b, :, :own].T)

    def _keep_answer_rows(self, planes: dict[str, Tensor]) -> None:
        for b, answer in enumerate(self.answers):
            rows = torch.tensor(answer.answer_steps, dtype=torch.long) + self.window - 1
            lengths = torch.from_numpy(self._lengths(b))[rows]
            cells = torch.arange(self.keys)[None] < lengths[:, None]
            for name, plane in planes.items():
                kept = plane[b][:, rows.to(plane.device)][:, cells.to(plane.device)]
                self._keep(b, f"{name}_dense", kept.cpu().numpy())

    def read_final_hidden(self, module: Any, args: tuple[Tensor, ...]) -> None:
        """Keep h_L: the residual stream before the final norm."""
        self.final_hidden = args[0]

    def finish(self, logits: Tensor) -> list[Capture]:
        """Stack the layers, apply what only the end of the pass knows, and check the tokens.

        Parameters
        ----------
        logits
            Of the rows that predict generated tokens, float32, (batch, steps, vocabulary).
        """
        factors = final_factors(self.lm, self.final_hidden).cpu().numpy()
        logprobs = logits.log_softmax(-1).cpu()
        predicted = logits.argmax(-1).cpu()
        return [
            self._capture(b, logprobs[b], predicted[b], factors[b])
            for b in range(len(self.answers))
        ]

    def _capture(self, b: int, logprobs: Tensor, predicted: Tensor, factors: Array) -> Capture:
        answer, read, own = self.answers[b], self.read[b], self._own_rows(b)
        ids = torch.tensor(answer.generated_ids, dtype=torch.long)
        targets = self.targets[b, :own].numpy().astype(np.int32)
        norms = self.raw[b, :own].norm(dim=-1).cpu().numpy()
        logprob = np.full(own, np.nan, np.float32)
        logprob[self.window - 1 : self.window - 1 + len(ids)] = (
            logprobs[: len(ids)].gather(-1, ids[:, None])[:, 0].numpy()
        )
        logprob[targets < 0] = np.nan
        capture = Capture(
            step=self._steps(b),
            token=targets,
            logprob=logprob,
            length=self._lengths(b),
            u_norm=np.where(targets >= 0, norms, np.nan).astype(np.float32),
            reproduced=bool((predicted[: len(ids)] == ids).all()),
            by_region={
                name: np.stack(read[f"{name}_by_region"], 1) for name in self._plane_names()
            },
            argmax=np.stack(read["argmax"], 1),
            top10_in_needle=np.stack(read["top10_in_needle"], 1),
            topn_needle_alpha=np.stack(read["topn_needle_alpha"], 1),
            peak={
                name: np.stack(read[f"peak_{name}"], 1)
                for name in self._plane_names()
                if name != "alpha"
            },
            dense={name: np.stack(read[f"{name}_dense"]) for name in self._plane_names()},
        )
        if "frozen_norm" in self.directions:
            self._scale_frozen_norm(capture, factors, answer.answer_steps)
        return _without_thinking(capture, answer.thinking) if answer.thinking else capture

    def _plane_names(self) -> list[str]:
        return ["alpha", *(f"phi_{name}" for name in self.directions)]

    def _scale_frozen_norm(self, capture: Capture, factors: Array, steps: list[int]) -> None:
        """Multiply the frozen-norm planes by 1 / rms(h_L) of their rows."""
        name, own = "phi_frozen_norm", len(capture.step)
        capture.by_region[name] = capture.by_region[name] * factors[:own, None, None, None]
        capture.peak[name] = capture.peak[name] * factors[:own, None, None]
        rows = np.asarray(steps, dtype=np.int64) + self.window - 1
        per_cell = np.repeat(factors[rows], capture.length[rows])
        capture.dense[name] = capture.dense[name] * per_cell


def _without_thinking(capture: Capture, thinking: int) -> Capture:
    """Return a capture without the rows that predict the tokens of a block, but for the prompt's."""
    kept = (capture.step <= 0) | (capture.step >= thinking)
    return replace(
        capture,
        **{
            name: getattr(capture, name)[kept]
            for name in (
                "step token logprob length u_norm argmax top10_in_needle topn_needle_alpha"
            ).split()
        },
        by_region={name: values[kept] for name, values in capture.by_region.items()},
        peak={name: values[kept] for name, values in capture.peak.items()},
    )


def _top_in_needle(alpha: Tensor, in_needle: Tensor) -> tuple[Tensor, Tensor]:
    """Return what of each row's largest weights lies in the needle.

    Parameters
    ----------
    alpha
        Attention, float32, shape (batch, heads, queries, keys).
    in_needle
        Bool, shape (batch, 1, 1, keys).

    Returns
    -------
    top10
        How many of the 10 largest weights, int64, shape (batch, heads, queries); a weight of 0 is none.
    topn
        The sum of those among the n largest, n being the needle's length; float32, the same shape.
    """
    n = in_needle.sum(-1, keepdim=True)
    keys = alpha.shape[-1]
    # Of equal weights the first are taken, which topk alone does not say, and a head that attends
    # evenly has nothing else: the bits of a weight order as the weight does, and the position comes
    # below them.
    backwards = torch.arange(keys - 1, -1, -1, device=alpha.device)
    order = (alpha.contiguous().view(torch.int32).long() << 32) | backwards
    largest = order.topk(min(keys, max(10, int(n.max()))), dim=-1).values
    at = keys - 1 - (largest & 0xFFFFFFFF)
    weight = alpha.gather(-1, at)
    inside = in_needle.expand(alpha.shape).gather(-1, at) & (weight > 0)
    rank = torch.arange(at.shape[-1], device=alpha.device)
    return inside[..., :10].sum(-1), (weight * (inside & (rank < n))).sum(-1)


def _contribution(write: Tensor, value: Tensor) -> Tensor:
    """Return omega = w . v, (batch, heads, queries, keys), query head h reading KV head h // group.

    `write` is (batch, queries, heads, head_dim); `value` is (batch, KV heads, keys, head_dim).
    """
    batch, queries, heads, dim = write.shape
    kv_heads, keys = value.shape[1], value.shape[2]
    grouped = write.transpose(1, 2).reshape(batch, kv_heads, heads // kv_heads * queries, dim)
    omega = grouped @ value.float().transpose(2, 3)
    return omega.view(batch, heads, queries, keys)
