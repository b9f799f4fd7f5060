"""Exact shortcuts for many prompts and conditions: shared prefix, shared trunk, batched decoding.

A *condition* is a way of running the model, such as one set of ablated heads. All conditions of a job
run as rows of one batch. Below a condition's first ablated layer its rows equal those of every other
condition, so there only one of them is computed (the trunk) and the batch grows from layer to layer.
Prompts that begin with the same tokens share the keys and values of those tokens. Rows of a batch have
equal length: nothing is padded, so no row can change another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from workflow_scripts.common.attention import ending_at
from workflow_scripts.common.models import LanguageModel

CHUNK_TOKENS = 1024
"""Prompt tokens of a row that run at once: bounds masks and activations for long contexts."""


ROOM_TOKENS = 64
"""Positions that a layer's cache grows by, so that decoding does not copy it at every step."""


class _GrowingLayer(DynamicLayer):
    """Keys and values of one layer in buffers with room to grow.

    The library's own layer joins the whole cache anew for every token.
    """

    _buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held, new = self.get_seq_length(), key_states.shape[-2]
        if self._buffers is None or held + new > self._buffers[0].shape[-2]:
            room = 0 if held == 0 else ROOM_TOKENS
            self._buffers = tuple(
                _with_room(self._held(old, held), states, held + new + room)
                for old, states in ((self.keys, key_states), (self.values, value_states))
            )  # type: ignore[assignment]
        for buffer, states in zip(self._buffers or (), (key_states, value_states), strict=True):
            buffer[..., held : held + new, :] = states
        self.keys, self.values = (b[..., : held + new, :] for b in self._buffers or ())
        return self.keys, self.values

    @staticmethod
    def _held(states: Any, length: int) -> Tensor | None:
        return states[..., :length, :] if length else None

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._buffers = None


def _with_room(held: Tensor | None, like: Tensor, positions: int) -> Tensor:
    """Return a buffer of some positions that begins with what is held."""
    buffer = like.new_empty((*like.shape[:-2], positions, like.shape[-1]))
    if held is not None:
        buffer[..., : held.shape[-2], :] = held
    return buffer


class GrowingCache(DynamicCache):
    """A full cache of every layer, windowed ones too, so that positions stay those of the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_class_to_replicate = _GrowingLayer


@dataclass
class Conditions:
    """The rows of a batch by condition, in the order in which they leave the trunk.

    Attributes
    ----------
    first_layers
        First layer that each condition changes; a value past the last layer for a condition that
        changes none. Entry 0 is the latest of all: its rows serve as the trunk. The others ascend.
    rows
        Condition of each row of the pass that is running, shape (rows,).
    prompts
        Which prompt of the batch each row belongs to, shape (rows,).
    """

    first_layers: list[int]
    rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    prompts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    def __post_init__(self) -> None:
        rest = self.first_layers[1:]
        if rest != sorted(rest) or any(layer > self.first_layers[0] for layer in rest):
            raise ValueError("conditions must be ordered: the latest first, then ascending")

    @classmethod
    def unchanged(cls) -> Conditions:
        """Return the single condition that changes nothing."""
        return cls([1 << 30])

    @property
    def count(self) -> int:
        """How many conditions there are."""
        return len(self.first_layers)

    def active(self, layer: int) -> int:
        """Return how many conditions have rows of their own in a layer."""
        return 1 + sum(first <= layer for first in self.first_layers[1:])

    def lay_out(self, prompts: Sequence[int], device: torch.device) -> None:
        """Set `rows` and `prompts` for a pass over all conditions of some prompts, condition-major."""
        self.rows = torch.arange(self.count, device=device).repeat_interleave(len(prompts))
        self.prompts = torch.tensor(list(prompts), device=device).repeat(self.count)


def order_conditions(first_layers: Sequence[int]) -> list[int]:
    """Return the order that `Conditions` wants: the latest first, then ascending first layers."""
    ascending = sorted(range(len(first_layers)), key=lambda i: first_layers[i])
    return [ascending[-1], *ascending[:-1]]


@contextmanager
def _growing_batch(lm: LanguageModel, conditions: Conditions, prompts: int) -> Iterator[None]:
    """Make every layer compute only the conditions that have left the trunk.

    The model is called with all rows; the first layer drops those that are still on the trunk, and
    each later layer takes in, as copies of the trunk's rows, those that leave it there.
    """

    def enter(index: int) -> Callable[..., Any]:
        rows = conditions.active(index) * prompts

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, *rest = args
            if index == 0 or hidden.shape[0] >= rows:
                hidden = hidden[:rows]
            else:
                missing = rows - hidden.shape[0]
                trunk = hidden[:prompts].repeat(missing // prompts, 1, 1)
                hidden = torch.cat([hidden, trunk])
            cut = (_first_rows(value, rows) for value in rest)
            return (hidden, *cut), {k: _first_rows(v, rows) for k, v in kwargs.items()}

        return hook

    if conditions.count == 1:
        yield
        return
    with ExitStack() as stack:
        for layer in lm.layers:
            handle = layer.block.register_forward_pre_hook(enter(layer.index), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _first_rows(value: Any, rows: int) -> Any:
    """Cut a mask to the rows of a layer; all rows of a pass have the same mask."""
    if isinstance(value, Tensor) and value.dim() == 4 and value.shape[0] > rows:
        return value[:rows]
    return value


def _forward(
    lm: LanguageModel, ids: Tensor, cache: DynamicCache, keep: int, conditions: Conditions
) -> Tensor:
    """Run tokens, (prompts, tokens), under all conditions; return logits of the last `keep`.

    Shape (conditions * prompts, keep, vocabulary).
    """
    prompts = ids.shape[0]
    with _growing_batch(lm, conditions, prompts):
        out = lm.model(
            ids.repeat(conditions.count, 1), cache=cache, use_cache=True, logits_to_keep=keep
        )
    logits: Tensor = out.logits
    assert logits.shape[1] == keep, "the model ignores logits_to_keep"
    return logits


def fill_cache(lm: LanguageModel, ids: Tensor, cache: DynamicCache, conditions: Conditions) -> None:
    """Extend a cache by tokens, (prompts, tokens), under all conditions; as `run_conditions`.

    Nothing else comes of it, so the last layer stops at its keys and values.
    """
    for chunk in ids.split(CHUNK_TOKENS, dim=1) if ids.shape[1] else ():
        with ending_at(lm.layers[-1].index):
            _forward(lm, chunk, cache, 1, conditions)


def run_conditions(
    lm: LanguageModel, ids: Tensor, cache: DynamicCache, keep: int, conditions: Conditions
) -> Tensor:
    """Run tokens under all conditions, in chunks so that masks and activations stay bounded.

    Parameters
    ----------
    ids
        Shape (prompts, tokens).
    cache
        Holds, in each layer, the rows of the conditions that have left the trunk there; extended.
    keep
        Last positions whose logits are wanted.

    Returns
    -------
    Tensor
        Logits, shape (conditions * prompts, keep, vocabulary), condition-major.
    """
    before = ids.shape[1] - keep
    # What is left of the last chunk runs with the tail if both fit into one.
    rest = before % CHUNK_TOKENS
    filled = before - rest if rest + keep <= CHUNK_TOKENS else before
    fill_cache(lm, ids[:, :filled], cache, conditions)
    return _forward(lm, ids[:, filled:], cache, keep, conditions)


def keys_and_values(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Return (keys, values) of every layer, each (batch, KV heads, positions, head_dim)."""
    return [(keys, values) for keys, values, _ in cache]


def copy_rows(cache: DynamicCache, index: Callable[[int], Tensor], length: int) -> GrowingCache:
    """Return a cache with chosen rows and the first `length` positions of another.

    Parameters
    ----------
    cache
        The cache to read; it is left as it was.
    index
        Maps a layer's index to the rows to take, int64.
    length
        Positions to keep.
    """
    copied = GrowingCache()
    for number, (keys, values) in enumerate(keys_and_values(cache)):
        rows = index(number).to(keys.device)
        copied.update(keys[rows, :, :length], values[rows, :, :length], number)
    return copied


def join_rows(caches: Sequence[GrowingCache]) -> GrowingCache:
    """Return one cache with the rows of several of equal length, in order."""
    if len(caches) == 1:
        return caches[0]
    joined = GrowingCache()
    for number, layers in enumerate(zip(*map(keys_and_values, caches), strict=True)):
        keys, values = zip(*layers, strict=True)
        joined.update(torch.cat(keys), torch.cat(values), number)
    return joined


class PrefixRunner:
    """Prefills prompts, computing the tokens they share with the prompts before them only once.

    Prompts should come ordered by haystack, context length and depth: then each haystack is computed
    about once per condition, however many needles lie in it.

    Parameters
    ----------
    lm, conditions
        The model, and the conditions it runs under.
    shareable
        Leading tokens of each prompt, by its number, that the conditions treat as they do in every
        other prompt; all of them where left out.
    """

    def __init__(
        self, lm: LanguageModel, conditions: Conditions, shareable: Sequence[int] | None = None
    ) -> None:
        self.lm = lm
        self.conditions = conditions
        self._shareable = shareable
        self._ids: list[int] = []
        self._cache = GrowingCache()

    def _extend_to(self, prefix: list[int], number: int = 0) -> None:
        """Make the kept cache hold exactly `prefix`, reusing what it shares with the last one.

        `number` is that of a prompt which begins so.
        """
        common = common_prefix([self._ids, prefix])
        if common == 0:
            self._cache = GrowingCache()
        elif common < len(self._ids):
            self._cache.crop(common - len(self._ids))
        rest = prefix[common:]
        # Until the pass has ended the cache holds nothing that may be relied on.
        self._ids = []
        if rest:
            self.conditions.lay_out([number], self.lm.device)
            ids = torch.tensor([rest], device=self.lm.device)
            fill_cache(self.lm, ids, self._cache, self.conditions)
        self._ids = prefix

    def prefix(self, ids: list[int]) -> GrowingCache:
        """Return the cache of a prefix, one row a condition that has left the trunk; read only."""
        self._extend_to(ids)
        return self._cache

    def prefill(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], shared: int
    ) -> tuple[GrowingCache, Tensor]:
        """Prefill prompts of equal length under all conditions.

        Parameters
        ----------
        prompts
            Token ids; all of one length.
        numbers
            Number of each prompt in the batch, seen by interventions as `Conditions.prompts`.
        shared
            Leading tokens that are the same in all prompts, fewer than a prompt has.

        Returns
        -------
        cache
            Rows condition-major: row c * len(prompts) + p.
        logits
            Of the last position, shape (conditions * prompts, vocabulary).
        """
        width, length, conditions = len(prompts), len(prompts[0]), self.conditions
        if self._shareable is not None:
            shared = min(shared, *(self._shareable[number] for number in numbers))
        self._extend_to(list(prompts[0][:shared]), numbers[0])
        cache = GrowingCache()
        if shared:
            cache = copy_rows(
                self._cache,
                lambda n: torch.arange(conditions.active(n)).repeat_interleave(width),
                shared,
            )
        conditions.lay_out(numbers, self.lm.device)
        ids = torch.tensor([list(prompt[shared:]) for prompt in prompts], device=self.lm.device)
        logits = run_conditions(self.lm, ids, cache, 1, conditions)[:, 0]
        if conditions.count > 1:
            cache = copy_rows(cache, lambda n: self._all_rows(n, width), length)
        return cache, logits

    def _all_rows(self, layer: int, width: int) -> Tensor:
        """Return, for a layer's cache, the row that serves each (condition, prompt)."""
        active = self.conditions.active(layer)
        sources = [c if c < active else 0 for c in range(self.conditions.count)]
        return (torch.tensor(sources)[:, None] * width + torch.arange(width)).flatten()


def prefill_batch(
    runner: PrefixRunner, prompts: Sequence[Sequence[int]], batch: Sequence[Group]
) -> tuple[GrowingCache, Tensor]:
    """Prefill the groups of a batch and join their rows for decoding.

    Returns
    -------
    cache
        Of all rows; `runner.conditions.rows` and `.prompts` name them.
    logits
        Of the last prompt position, shape (rows, vocabulary).
    """
    conditions = runner.conditions
    caches, logits, rows, numbers = [], [], [], []
    for group in batch:
        members = [prompts[i] for i in group.members]
        cache, last = runner.prefill(members, group.members, group.shared)
        caches.append(cache)
        logits.append(last)
        rows.append(conditions.rows)
        numbers.append(conditions.prompts)
    conditions.rows, conditions.prompts = torch.cat(rows), torch.cat(numbers)
    return join_rows(caches), torch.cat(logits)


def halve_on_out_of_memory(
    prompts: Sequence[Sequence[int]],
    batch: list[Group],
    run: Callable[[list[Group]], None],
    give_up: Callable[[int], None],
) -> None:
    """Run a batch; where memory does not suffice, run its halves.

    Parameters
    ----------
    prompts
        The prompts that the groups index.
    run
        Runs a batch from scratch; must keep nothing of a batch that failed.
    give_up
        Called with the index of a prompt that does not fit even alone.
    """
    try:
        run(batch)
        return
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    members = [index for group in batch for index in group.members]
    if len(members) == 1:
        give_up(members[0])
        return
    middle = len(members) // 2
    for half in (members[:middle], members[middle:]):
        halve_on_out_of_memory(prompts, _group_neighbours(prompts, half), run, give_up)


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a lack of memory; torch's CPU allocator raises a plain one."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "allocate memory" in str(error)


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Return how many leading tokens all rows share."""
    length = 0
    for tokens in zip(*rows, strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return length


@dataclass(frozen=True)
class Generation:
    """One greedy answer.

    Attributes
    ----------
    ids
        Generated token ids, without the one that ended the answer.
    stopped
        False if a token budget ended it.
    thinking
        Leading tokens that are no answer: a <think> block, its tags, the white space behind it.
    closed
        False if the block was still open at the end.
    """

    ids: list[int]
    stopped: bool
    thinking: int = 0
    closed: bool = True

    @property
    def answer_ids(self) -> list[int]:
        """The ids behind the block."""
        return self.ids[self.thinking :]


_OPENING, _CLOSING = "<think>", "</think>"
_TAG_TOKENS = 8
"""Tokens that a tag may be written with."""


def opens_thought(lm: LanguageModel, prompt: Sequence[int]) -> bool:
    """Return whether a prompt ends inside a <think> block, as those of thinking models do."""
    end = lm.decode(prompt[-2 * _TAG_TOKENS :])
    return end.rfind(_OPENING) > end.rfind(_CLOSING)


@dataclass
class _Writing:
    """An answer while it is written: in a block newlines are text, behind it they end the answer."""

    thinking: bool
    ids: list[int] = field(default_factory=list)
    start: int = 0
    """Of the answer: ids before it belong to a block."""
    leading: bool = False
    """Whether a block has been closed, and nothing but white space written since."""
    stopped: bool = False

    def take(self, lm: LanguageModel, token: int) -> None:
        """Write a token, or stop at it."""
        text = lm.piece(token)
        if token in lm.eos_ids:
            self.stopped = True
            return
        tag = self._tag_ended_by(lm, token) if ">" in text else ""
        if tag:
            self.thinking, self.leading = tag == _OPENING, tag == _CLOSING
        in_block = self.thinking or (self.leading and (bool(tag) or not text.strip()))
        self.leading = self.leading and in_block
        if "\n" in text and not in_block:
            self.stopped = True
            return
        self.ids.append(token)
        if in_block:
            self.start = len(self.ids)

    def _tag_ended_by(self, lm: LanguageModel, token: int) -> str:
        """Return the tag whose last character a token writes, if there is one."""
        before = self.ids[-_TAG_TOKENS:]
        text, written = lm.decode([*before, token]), len(lm.decode(before))
        for tag in (_CLOSING, _OPENING):
            if tag in text and text.rindex(tag) + len(tag) > written:
                return tag
        return ""

    def has_room(self, max_new_tokens: int, max_thinking_tokens: int) -> bool:
        """Return whether the budget of what is being written allows another token."""
        if self.thinking:
            return self.start < max_thinking_tokens
        return len(self.ids) - self.start < max_new_tokens

    def generation(self) -> Generation:
        """Return what was written."""
        return Generation(self.ids, self.stopped, self.start, not self.thinking)


def decode_greedily(
    lm: LanguageModel,
    cache: DynamicCache,
    logits: Tensor,
    max_new_tokens: int,
    *,
    thinking: Sequence[bool],
    max_thinking_tokens: int,
    conditions: Conditions,
    drop_finished: bool,
) -> list[Generation]:
    """Continue every row of a batch greedily until it ends.

    Parameters
    ----------
    cache
        The prompts' keys and values; changed in place.
    logits
        Of the last prompt position, shape (rows, vocabulary).
    max_new_tokens
        Token budget of each row's answer, counted from the end of its <think> block.
    thinking
        Whether each row's prompt ends inside a block.
    max_thinking_tokens
        Token budget of each row's block.
    conditions
        `rows` and `prompts` name each row; cut in step with the batch when rows are dropped.
    drop_finished
        Take ended rows out of the batch and of the cache. Keep them where the cache is needed after.

    Returns
    -------
    list of Generation
        In the order of the rows.
    """
    everything = [_Writing(in_block) for in_block in thinking]
    # Rows of the batch, and whether each goes on; a row of the cache may outlast its answer.
    rows, going = everything, [True] * len(everything)
    while True:
        tokens = logits.argmax(-1).tolist()
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if going[i]:
                row.take(lm, token)
                going[i] = not row.stopped and row.has_room(max_new_tokens, max_thinking_tokens)
        if not any(going):
            return [row.generation() for row in everything]
        # Dropping rows copies the cache, so it waits until a quarter of them has ended.
        if drop_finished and sum(going) <= 0.75 * len(rows):
            kept = [i for i, goes in enumerate(going) if goes]
            keep = torch.tensor(kept, device=conditions.rows.device)
            cache.batch_select_indices(keep)
            conditions.rows = conditions.rows[keep]
            conditions.prompts = conditions.prompts[keep]
            tokens = [tokens[i] for i in kept]
            rows, going = [rows[i] for i in kept], [True] * len(kept)
        step = torch.tensor(tokens, device=lm.device)[:, None]
        logits = lm.model(step, cache=cache, use_cache=True, logits_to_keep=1).logits[:, 0]


@dataclass(frozen=True)
class Group:
    """Prompts that are prefilled together.

    Attributes
    ----------
    members
        Indices of the prompts.
    shared
        Leading tokens they share, with each other and, if alone, with the prompt that comes next.
    """

    members: list[int]
    shared: int


def plan_batches(
    prompts: Sequence[Sequence[int]], *, tokens: int, copies: int = 1
) -> list[list[Group]]:
    """Split prompts into batches of equal length, each a list of groups that share a prefix.

    Parameters
    ----------
    prompts
        Token ids in the order in which prefixes are shared best.
    tokens
        Bound on rows times length of a batch; one prompt always fits.
    copies
        Rows a prompt takes (conditions).
    """
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    plan = []
    for length, members in by_length.items():
        size = max(1, tokens // (length * copies))
        for start in range(0, len(members), size):
            plan.append(_group_neighbours(prompts, members[start : start + size]))
    return plan


def _group_neighbours(prompts: Sequence[Sequence[int]], members: list[int]) -> list[Group]:
    """Join neighbours unless the later one shares more with the prompt after it."""
    shared = []
    for i, j in pairwise(members):
        # Equal prompts leave their last token to run: its logits are wanted.
        common = min(common_prefix([prompts[i], prompts[j]]), len(prompts[i]) - 1)
        shared.append(_worth_sharing(common))
    shared.append(0)
    groups: list[Group] = []
    for position, index in enumerate(members):
        before, after = (shared[position - 1] if position else -1), shared[position]
        last = groups[-1] if groups else None
        if last and (before == last.shared if len(last.members) > 1 else before >= after):
            groups[-1] = Group([*last.members, index], before)
        else:
            groups.append(Group([index], after))
    return groups


def _worth_sharing(length: int) -> int:
    """Return 0 for prefixes so short that an extra pass costs more than it saves."""
    return length if length >= 16 else 0
