"""Few-shot chat prompts: what is said before a question, from a data file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow_scripts.common.errors import UserError


@dataclass(frozen=True)
class ChatPrompt:
    """A few-shot prompt.

    Attributes
    ----------
    system
        Text of the system message; None for none.
    examples
        Pairs of a user's message and the answer to it, in order.
    user
        The template of the user's last message, with the fields of its format, such as {question}.
    """

    system: str | None
    examples: tuple[tuple[str, str], ...]
    user: str

    def messages(self, last: str, *, system_role: bool) -> list[dict[str, str]]:
        """Return the conversation up to the user's last message.

        Parameters
        ----------
        last
            That message.
        system_role
            Whether the system text is a message of its own; else it opens the first user message.
        """
        texts = [text for pair in self.examples for text in pair] + [last]
        if self.system is not None and not system_role:
            texts[0] = f"{self.system}\n\n{texts[0]}"
        roles = ("user", "assistant")
        said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        if self.system is not None and system_role:
            said.insert(0, {"role": "system", "content": self.system})
        return said


def read_chat_prompt(path: str | Path) -> ChatPrompt:
    """Read a few-shot prompt: a JSON file {system, examples: [{user, assistant}], user}.

    Raises
    ------
    UserError
        If it is no such file.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); correct it") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: is no JSON object; write {{system, examples, user}}")
    unknown = ", ".join(sorted(found.keys() - {"system", "examples", "user"}))
    if unknown:
        raise UserError(f"{path}: unknown key {unknown}; known are system, examples, user")
    examples = found.get("examples", [])
    if not isinstance(examples, list):
        raise UserError(f"{path}: examples is no list; write [{{user, assistant}}, ...]")
    system = found.get("system")
    return ChatPrompt(
        system=None if system is None else _text(found, "system", f"{path}"),
        examples=tuple(
            (_text(example, "user", where), _text(example, "assistant", where))
            for where, example in (
                (f"{path}: example {number}", example) for number, example in enumerate(examples, 1)
            )
        ),
        user=_text(found, "user", f"{path}"),
    )


def _text(entry: Any, key: str, where: str) -> str:
    text = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: {key} is missing or no text; write a text")
    return text
