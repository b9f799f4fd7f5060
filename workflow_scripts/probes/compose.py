"""Prompts in token space: every piece is tokenised once, so every span is exact.

A prompt is chat prefix, template up to the haystack, haystack with the needle in it, template up to
the question, question, rest of the template, chat suffix (method, section 5). The token ids up to
the needle depend on wrapper, template, haystack, context length and depth only: probes share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workflow_scripts.common.errors import UserError
from workflow_scripts.probes.haystacks import CLOSED_ENDERS, Haystack, sentence_ends
from workflow_scripts.probes.needles import HAYSTACK, QUESTION
from workflow_scripts.probes.prompts import Encoder, Wrapper, before_text

Span = tuple[int, int]
"""Half-open token span in the prompt."""

_SEPARATORS = ("", " ", "\n", "\n\n")


@dataclass(frozen=True)
class Frame:
    """The fixed token ids of a prompt template inside its chat wrapper.

    Attributes
    ----------
    head_ids
        Chat prefix and template up to the haystack (or up to the question where there is none).
    middle_ids
        Template between haystack and question; empty without a haystack.
    tail_ids
        Template after the question, and chat suffix.
    haystack_space, question_space
        Whether a space goes before that piece: the one that ended the piece before it, since a
        space belongs to the token of the word that follows.
    has_bos
        Whether the first id is the BOS.
    """

    head_ids: tuple[int, ...]
    middle_ids: tuple[int, ...]
    tail_ids: tuple[int, ...]
    haystack_space: bool
    question_space: bool
    has_bos: bool

    @property
    def length(self) -> int:
        """Tokens of the frame."""
        return len(self.head_ids) + len(self.middle_ids) + len(self.tail_ids)


@dataclass(frozen=True)
class TokenHaystack:
    """A tokenised haystack.

    Attributes
    ----------
    haystack
        Its text and file.
    ids
        Token ids, int32, (tokens,).
    ends
        Token positions at which a sentence ends, ascending, int64, (ends,).
    separators
        The white space after each of these sentences: "", " ", a newline or a blank line.
    """

    haystack: Haystack
    ids: NDArray[np.int32]
    ends: NDArray[np.int64]
    separators: tuple[str, ...]

    def place(self, depth_percent: float, length: int) -> int:
        """Return the token position for a depth in the first `length` tokens.

        It is moved back to the nearest sentence end; 0, the haystack's beginning, is one.
        """
        target = int(depth_percent / 100 * length)
        index = int(np.searchsorted(self.ends, target, side="right"))
        return int(self.ends[index - 1]) if index else 0


@dataclass(frozen=True)
class Prompt:
    """A composed prompt: token ids, int32, and spans, None for what it does not hold."""

    input_ids: NDArray[np.int32]
    question: Span
    needle: Span | None = None
    real_needle: Span | None = None
    haystack: Span | None = None


def make_frame(encoder: Encoder, wrapper: Wrapper, template: str) -> Frame:
    """Tokenise a prompt template (see `needles.check_template`) inside its chat wrapper."""
    before, after = template.split(QUESTION)
    with_haystack = HAYSTACK in before
    before, middle = before.split(HAYSTACK) if with_haystack else (before, "")
    head, haystack_space = _encode_carrying(encoder, before, wrapper.opens_space)
    # A space before an absent haystack is the question's.
    carried = not with_haystack and haystack_space
    between, question_space = _encode_carrying(encoder, middle, carried)
    return Frame(
        head_ids=wrapper.prefix_ids + head,
        middle_ids=between,
        tail_ids=encoder.encode(after) + wrapper.suffix_ids,
        haystack_space=haystack_space,
        question_space=question_space,
        has_bos=wrapper.has_bos,
    )


def tokenize_haystack(encoder: Encoder, haystack: Haystack, *, space_before: bool) -> TokenHaystack:
    """Tokenise a haystack and find the token positions where its sentences end.

    A sentence end is used where a token ends: with the ender, or with white space after it.

    Raises
    ------
    UserError
        If no sentence ends at a token.
    """
    ids, offsets = encoder.encode_with_offsets(" " * space_before + haystack.text)
    spans = np.asarray(offsets, np.int64).reshape(-1, 2) - int(space_before)
    starts = np.append(spans[1:, 0], len(haystack.text))
    ends, separators = [], []
    for end in sentence_ends(haystack.text):
        token = int(np.searchsorted(spans[:, 1], end.start, side="left"))
        # The pieces of one multi-byte character have one span: go on to the last of them.
        while token < len(ids) and starts[token] < end.start <= spans[token, 1] <= end.stop:
            token += 1
        if token < len(ids) and spans[token, 1] <= end.stop and starts[token] >= end.start:
            ends.append(token + 1)
            separators.append(_separator(haystack.text[end.start : end.stop]))
    if not ends:
        raise UserError(
            f"{haystack.path}: the tokenizer of model {encoder.name} joins every sentence end to "
            "what follows, so a needle has no place; put white space after the sentences"
        )
    return TokenHaystack(
        haystack, np.asarray(ids, np.int32), np.asarray(ends, np.int64), tuple(separators)
    )


def longest_needle(encoder: Encoder, sentence: str) -> int:
    """Return the most tokens a needle takes, whatever white space its place asks for around it."""
    return max(
        len(encoder.encode(f"{left}{sentence}{right}"))
        for left in ("", " ")
        for right in _SEPARATORS
    )


def question_ids(encoder: Encoder, frame: Frame, question: str) -> tuple[int, ...]:
    """Return the token ids of a question in its frame."""
    return encoder.encode(" " * frame.question_space + question)


def answer_ids(encoder: Encoder, last: int, answer: str) -> tuple[int, ...]:
    """Return the token ids with which an answer goes on from a prompt, whose last token is given.

    A space parts it from the prompt unless that ends with white space or a special token, as chat
    templates do.
    """
    parted = encoder.ends_with_space(last) or last in encoder.tokenizer.all_special_ids
    return encoder.encode(answer if parted else f" {answer}")


def compose_question(encoder: Encoder, frame: Frame, question: str) -> Prompt:
    """Compose a prompt that has no haystack."""
    asked = question_ids(encoder, frame, question)
    start = len(frame.head_ids) + len(frame.middle_ids)
    ids = frame.head_ids + frame.middle_ids + asked + frame.tail_ids
    return Prompt(np.asarray(ids, np.int32), (start, start + len(asked)))


def cut_text(encoder: Encoder, text: str, length: int) -> list[NDArray[np.int32]]:
    """Cut a text into pieces of `length` tokens, one after the other; each begins with the BOS if any.

    The whole text is tokenised at once. A rest that makes no whole piece is left out.
    """
    start = before_text(encoder)
    ids = encoder.encode(text)
    step = length - len(start)
    return [
        np.asarray(start + ids[at : at + step], np.int32)
        for at in range(0, len(ids) - step + 1, step)
    ]


def compose_document(encoder: Encoder, frame: Frame, document: str, question: str) -> Prompt:
    """Compose a prompt whose haystack is a whole document, as it is."""
    text = encoder.encode(" " * frame.haystack_space + document)
    asked = question_ids(encoder, frame, question)
    start = len(frame.head_ids)
    end = start + len(text)
    asked_at = end + len(frame.middle_ids)
    ids = frame.head_ids + text + frame.middle_ids + asked + frame.tail_ids
    return Prompt(
        np.asarray(ids, np.int32), (asked_at, asked_at + len(asked)), haystack=(start, end)
    )


def compose(
    encoder: Encoder,
    frame: Frame,
    haystack: TokenHaystack,
    question: str,
    context_length: int,
    position: int,
    sentence: str,
    real_needle: str | None = None,
    *,
    removed: bool = False,
) -> Prompt:
    """Compose a prompt of exactly `context_length` tokens with the needle in its haystack.

    Parameters
    ----------
    encoder, frame, haystack, question
        What it is made of.
    context_length
        Tokens of the whole prompt.
    position
        Haystack tokens before the needle (`TokenHaystack.place`), at most those in the prompt.
    sentence
        The needle.
    real_needle
        The part of the sentence whose span is wanted; None means all of it.
    removed
        Leave the needle out and let the haystack run on through its place: the spans are then those
        of as many filler tokens where the needle would stand.

    Raises
    ------
    UserError
        If the haystack is too short, or the tokenizer cannot spell the needle.
    """
    asked = question_ids(encoder, frame, question)
    needle, real = _needle_ids(encoder, haystack, position, sentence, real_needle)
    length = context_length - frame.length - len(asked)  # of the haystack, needle included
    n_haystack = length if removed else length - len(needle)
    if len(haystack.ids) < n_haystack:
        raise UserError(
            f"{haystack.haystack.path}: {len(haystack.ids)} tokens are too few, context length "
            f"{context_length} needs {n_haystack}; lengthen the text or lower context_lengths"
        )
    start = len(frame.head_ids)
    ids = np.concatenate(
        [
            np.asarray(part, np.int32)
            for part in (
                frame.head_ids,
                haystack.ids[:position],
                () if removed else needle,
                haystack.ids[position:n_haystack],
                frame.middle_ids,
                asked,
                frame.tail_ids,
            )
        ]
    )
    question_start = start + length + len(frame.middle_ids)
    at = start + position
    return Prompt(
        input_ids=ids,
        question=(question_start, question_start + len(asked)),
        needle=(at, at + len(needle)),
        real_needle=(at + real[0], at + real[1]),
        haystack=(start, start + length),
    )


def _needle_ids(
    encoder: Encoder,
    haystack: TokenHaystack,
    position: int,
    sentence: str,
    real_needle: str | None,
) -> tuple[tuple[int, ...], Span]:
    """Return a needle's ids, with the white space its place needs, and the real needle's span."""
    left, right = _white_space(encoder, haystack, position, sentence)
    text = left + sentence + right
    ids, offsets = encoder.encode_with_offsets(text)
    if not encoder.spells(ids, sentence):
        raise UserError(
            f"model {encoder.name}: its tokenizer turns the needle '{sentence}' into "
            f"'{encoder.decode(ids).strip()}'; reword the needle"
        )
    if real_needle is None:
        return tuple(ids), (0, len(ids))
    start = text.index(real_needle)
    end = start + len(real_needle)
    inside = [i for i, (low, high) in enumerate(offsets) if low < end and high > start]
    return tuple(ids), (inside[0], inside[-1] + 1)


def _white_space(
    encoder: Encoder, haystack: TokenHaystack, position: int, sentence: str
) -> tuple[str, str]:
    """Return the white space before and after a needle that the haystack's tokens do not bring.

    Most tokenizers give the space between two sentences to the second one's first token: the needle
    then begins with a space like it. A token may also hold ender and newline: then the needle ends
    so.
    """
    spaced = sentence[-1] not in CLOSED_ENDERS
    follows = int(haystack.ids[position]) if position < len(haystack.ids) else None
    space_follows = follows is not None and encoder.starts_with_space(follows)
    if position == 0:
        # The haystack's first token has a space only where the needle's first gets one too.
        return " " * space_follows, "\n" if spaced and not space_follows else ""
    space_ends = encoder.ends_with_space(int(haystack.ids[position - 1]))
    separator = haystack.separators[int(np.searchsorted(haystack.ends, position))]
    # Word-level pieces hold no white space at all; a space before a needle is then nothing to them.
    left = " " if spaced and separator and not space_ends else ""
    return left, separator if space_ends and not space_follows else ""


def _encode_carrying(encoder: Encoder, text: str, space: bool) -> tuple[tuple[int, ...], bool]:
    """Encode a piece without its last space, which is returned for the next piece to begin with."""
    text = " " * space + text
    return encoder.encode(text.removesuffix(" ")), text.endswith(" ")


def _separator(space: str) -> str:
    if "\n" in space:
        return "\n\n" if space.count("\n") > 1 else "\n"
    return " " if space else ""
