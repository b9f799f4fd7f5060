"""Answers of a model under many sets of ablated heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from workflow_scripts.ablation.interventions import (
    NEEDLE_MODES,
    Head,
    Intervention,
    first_layer,
    intervening,
)
from workflow_scripts.common.decoding import (
    Conditions,
    Generation,
    Group,
    PrefixRunner,
    decode_greedily,
    halve_on_out_of_memory,
    opens_thought,
    order_conditions,
    plan_batches,
    prefill_batch,
)
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.models import LanguageModel

Result = TypeVar("Result")


@torch.inference_mode()
def generate(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    intervention: Intervention,
    *,
    max_new_tokens: int,
    max_thinking_tokens: int = 0,
    batch_tokens: int,
    progress: Callable[[int], object],
) -> list[list[Generation]]:
    """Answer every prompt greedily under every set of heads.

    Parameters
    ----------
    prompts
        Token ids, ordered so that neighbours share prefixes.
    intervention
        Its `head_sets` are the conditions.
    max_new_tokens, max_thinking_tokens
        Token budgets of an answer, and of a <think> block before it.
    batch_tokens
        Bound on conditions times prompts times tokens that run at once.
    progress
        Called with the number of answers done.

    Returns
    -------
    list of lists of Generation
        By set of heads, then by prompt: the tokens that one-by-one generation gives.

    Raises
    ------
    UserError
        If a prompt does not fit into memory even alone.
    """

    def answer(runner: PrefixRunner, batch: list[Group]) -> dict[tuple[int, int], Generation]:
        return _answer_batch(runner, prompts, batch, max_new_tokens, max_thinking_tokens)

    return under_conditions(
        lm, prompts, intervention, answer, batch_tokens=batch_tokens, progress=progress
    )


def under_conditions(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    intervention: Intervention,
    run_batch: Callable[[PrefixRunner, list[Group]], dict[tuple[int, int], Result]],
    *,
    batch_tokens: int,
    progress: Callable[[int], object],
) -> list[list[Result]]:
    """Run every prompt under every set of heads, in batches that fit.

    Parameters
    ----------
    run_batch
        Runs a batch under the conditions of a runner; its results by (condition, prompt).

    The others, what is returned and what is raised are those of `generate`.
    """
    results: dict[tuple[int, int], Result] = {}
    longest = max(len(prompt) for prompt in prompts)
    for numbers in _condition_batches(intervention.head_sets, max(1, batch_tokens // longest)):
        sets = [intervention.head_sets[number] for number in numbers]
        conditions = Conditions([first_layer(heads) for heads in sets])
        part = replace(intervention, head_sets=sets)
        runner = PrefixRunner(lm, conditions, _shareable(prompts, part))

        def run(
            batch: list[Group], runner: PrefixRunner = runner, numbers: list[int] = numbers
        ) -> None:
            rows = run_batch(runner, batch)
            for (condition, prompt), result in rows.items():
                results[numbers[condition], prompt] = result
            progress(len(rows))

        with intervening(lm, conditions, part):
            for batch in plan_batches(prompts, tokens=batch_tokens, copies=len(numbers)):
                halve_on_out_of_memory(prompts, batch, run, _refuse)
    return [
        [results[condition, prompt] for prompt in range(len(prompts))]
        for condition in range(len(intervention.head_sets))
    ]


def _shareable(prompts: Sequence[Sequence[int]], intervention: Intervention) -> list[int] | None:
    """Return how many leading tokens of each prompt know nothing of its own needle; None for all."""
    if intervention.mode not in NEEDLE_MODES:
        return None
    spans = zip(prompts, intervention.needles, strict=True)
    return [len(prompt) if span is None else span[0] for prompt, span in spans]


def _condition_batches(head_sets: Sequence[Sequence[Head]], size: int) -> list[list[int]]:
    """Split conditions into runs that fit a batch, those that leave the trunk late together."""
    order = sorted(range(len(head_sets)), key=lambda i: first_layer(head_sets[i]))
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    return [
        [part[i] for i in order_conditions([first_layer(head_sets[n]) for n in part])]
        for part in parts
    ]


def _answer_batch(
    runner: PrefixRunner,
    prompts: Sequence[Sequence[int]],
    batch: list[Group],
    max_new_tokens: int,
    max_thinking_tokens: int,
) -> dict[tuple[int, int], Generation]:
    """Return the answers of a batch by (condition, prompt)."""
    conditions = runner.conditions
    cache, logits = prefill_batch(runner, prompts, batch)
    labels = list(zip(conditions.rows.tolist(), conditions.prompts.tolist(), strict=True))
    answers = decode_greedily(
        runner.lm,
        cache,
        logits,
        max_new_tokens,
        thinking=[opens_thought(runner.lm, prompts[prompt]) for _, prompt in labels],
        max_thinking_tokens=max_thinking_tokens,
        conditions=conditions,
        drop_finished=True,
    )
    return dict(zip(labels, answers, strict=True))


def _refuse(prompt: int) -> None:
    raise UserError(
        f"prompt {prompt}: does not fit into memory even alone; use a larger device, a smaller "
        "dtype or shorter contexts"
    )
