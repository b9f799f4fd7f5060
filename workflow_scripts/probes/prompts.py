"""The tokenizer as prompts are composed with it, and the chat template around the user's text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from workflow_scripts.common.errors import UserError
from workflow_scripts.probes.chat import ChatPrompt

_SENTINEL = "LOCOSUSERTEXT"
_FIXED_DATE = datetime(2024, 7, 26)
"""What templates that print today's date are given, so that the ids are the same every day."""

_DATE_CALL = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")

_SPACE_MARKS = (" ", "\N{LOWER ONE EIGHTH BLOCK}", "Ġ", "\n", "Ċ", "\t", "ĉ", "\r", "č", "<0x0A>")
"""White space at the edge of a piece: as it is, SentencePiece's mark, byte-level's, a byte."""


class Encoder:
    """A tokenizer that encodes pieces of a prompt, without special tokens of its own.

    Parameters
    ----------
    tokenizer
        A tokenizer with character offsets (a fast one).
    name
        The model's name in error messages.

    Raises
    ------
    UserError
        If the tokenizer cannot tell offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"model {name}: its tokenizer tells no character offsets; use a revision that has "
                "a tokenizer.json"
            )
        self.tokenizer: Any = tokenizer
        self.name = name
        self.encode = cache(self._encode)
        """`encode(text)`: token ids as a tuple; each text is tokenised once."""
        self._adds_space = False
        ids = self.encode_with_offsets("a")[0]
        self._adds_space = bool(ids) and self.starts_with_space(ids[0])

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.encode_with_offsets(text)[0])

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return a text's token ids and their half-open character spans in it.

        SentencePiece tokenizers put a space before every text; for them the text's own first space
        is left out, so that there is one.
        """
        skip = int(self._adds_space and text.startswith(" "))
        encoded = self.tokenizer(
            text[skip:], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        offsets = [(start + skip, end + skip) for start, end in encoded["offset_mapping"]]
        return encoded["input_ids"], offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens and spaces as they are."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def starts_with_space(self, token: int) -> bool:
        """Return whether a token's piece begins with white space."""
        return self._piece(token).startswith(_SPACE_MARKS)

    def ends_with_space(self, token: int) -> bool:
        """Return whether a token's piece ends with white space."""
        return self._piece(token).endswith(_SPACE_MARKS)

    def spells(self, ids: Sequence[int], text: str) -> bool:
        """Return whether token ids decode to a text, white space and Unicode composition aside.

        Word-level decoders put spaces between words and punctuation, hence the tolerance; every
        other character must be there.
        """
        return _bare(self.decode(ids)) == _bare(text)

    def _piece(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))


@dataclass(frozen=True)
class Wrapper:
    """What stands around the user's text.

    Attributes
    ----------
    prefix_ids
        Token ids before it, the BOS included.
    suffix_ids
        Token ids after it, up to where the answer begins.
    opens_space
        Whether the text before it ends with a space, which belongs to the user's first token.
    has_bos
        Whether the first id is the BOS.
    """

    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    opens_space: bool
    has_bos: bool


def chat_wrapper(encoder: Encoder, prompt: ChatPrompt | None = None) -> Wrapper:
    """Return the model's own prompt format around one user message, thinking off, the BOS once.

    Without a chat template (base models) nothing stands around the text but the BOS that the
    tokenizer adds. A BOS that neither the template writes nor the tokenizer adds is not wanted.

    Parameters
    ----------
    encoder
        The tokenizer.
    prompt
        System text and examples that come before the message. A template that takes no system
        message gets the system text at the head of the first user message. Without a template each
        example is its message, a newline, its answer and an empty line; the message ends in a newline.

    Raises
    ------
    UserError
        If the template cannot be used for these messages.
    """
    prefix, suffix = "", ""
    if encoder.tokenizer.chat_template is not None:
        prefix, suffix = _around_sentinel(encoder, prompt or ChatPrompt(None, (), _SENTINEL))
    elif prompt is not None:
        system = "" if prompt.system is None else f"{prompt.system}\n\n"
        prefix = system + "".join(f"{user}\n{answer}\n\n" for user, answer in prompt.examples)
        suffix = "\n"
    ids = list(encoder.encode(prefix.removesuffix(" ")))
    bos = encoder.tokenizer.bos_token_id
    if bos is not None:
        if ids[:1] != [bos] and _adds_bos(encoder.tokenizer, bos):
            ids.insert(0, bos)
        while ids[:2] == [bos, bos]:
            del ids[0]
    return Wrapper(
        prefix_ids=tuple(ids),
        suffix_ids=encoder.encode(suffix),
        opens_space=prefix.endswith(" "),
        has_bos=bos is not None and ids[:1] == [bos],
    )


def before_text(encoder: Encoder) -> tuple[int, ...]:
    """Return the ids before a text that is no chat: the BOS where the tokenizer adds one, else none."""
    bos = encoder.tokenizer.bos_token_id
    return (bos,) if bos is not None and _adds_bos(encoder.tokenizer, bos) else ()


def _around_sentinel(encoder: Encoder, prompt: ChatPrompt) -> tuple[str, str]:
    """Render the chat template around a sentinel and return the text before and after it."""
    messages = prompt.messages(_SENTINEL, system_role=_takes_system(encoder, prompt))
    try:
        text = _render(encoder, messages)
    except _TEMPLATE_ERRORS as error:
        reason = str(error).split("\n")[0]
        said = "one user message" if len(messages) == 1 else "the messages of the prompt"
        raise UserError(
            f"model {encoder.name}: its chat template fails on {said} ({reason}); use a "
            "revision whose template takes it"
        ) from None
    parts = text.split(_SENTINEL)
    if len(parts) != 2:
        raise UserError(
            f"model {encoder.name}: its chat template writes the user's message {len(parts) - 1} "
            "times; it must stand there once"
        )
    return parts[0], parts[1]


_TEMPLATE_ERRORS = (jinja2.TemplateError, ValueError, TypeError, KeyError)


def _takes_system(encoder: Encoder, prompt: ChatPrompt) -> bool:
    """Return whether the chat template writes a prompt's system message, and does not refuse it."""
    if prompt.system is None:
        return False
    try:
        text = _render(encoder, prompt.messages(_SENTINEL, system_role=True))
    except _TEMPLATE_ERRORS:
        return False
    return prompt.system.strip() in text


def _render(encoder: Encoder, messages: list[dict[str, str]]) -> str:
    """Return messages in the model's chat template, up to where the answer begins."""
    template = _DATE_CALL.sub(_fixed_date, encoder.tokenizer.get_chat_template())
    text: str = encoder.tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
        **({"enable_thinking": False} if "enable_thinking" in template else {}),
    )
    return text


def _fixed_date(call: re.Match[str]) -> str:
    return f"'{_FIXED_DATE.strftime(call[2])}'"


def _adds_bos(tokenizer: PreTrainedTokenizerBase, bos: int) -> bool:
    """Return whether the tokenizer by itself begins a text with the BOS."""
    ids: list[int] = tokenizer("a")["input_ids"]
    return ids[:1] == [bos]


def _bare(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).split())
