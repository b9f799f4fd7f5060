"""Readers of the needle files: whatever the format, a file becomes a list of `Needle` records.

Formats (method, section 5): `nolima`, a JSON list of entries with a needle, questions, characters
and tests; `niah`, JSON lines {needle, question, real_needle}; `qa`, JSON lines {id, question,
answer, aliases} for questions that need no needle; `document`, JSON lines {id, document, question,
answer} for questions about a text of the user's, whose answer may be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow_scripts.common.errors import UserError

CHARACTER = "{CHAR}"
"""Stands in a NoLiMa needle for the name that is the answer."""

HAYSTACK, QUESTION = "{haystack}", "{question}"

NIAH_TEMPLATE = (
    "Read the text below, then answer the question about it in a few words.\n\n{haystack}\n\n"
    "Question: {question}\nAnswer in the words of the text."
)
QA_TEMPLATE = "{question}"
DOCUMENT_TEMPLATE = (
    "Read the document below, then answer the question about it in a few words.\n\n{haystack}\n\n"
    "Question: {question}"
)

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Question:
    """A question about a needle.

    Attributes
    ----------
    kind
        Question type, such as "onehop", "twohop" or "literal"; elsewhere the format's name.
    text
        What the model is asked.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Needle:
    """A fact to be found, or a bare question where `text` is None.

    Attributes
    ----------
    needle_id
        Unique within the file: entry and test for NoLiMa, line for NIAH, id for QA.
    text
        The sentence; in NoLiMa with `{CHAR}` where the answer goes.
    questions
        The questions to ask about it, one of each kind.
    answers
        The possible answers, a prompt has one: the character set in NoLiMa, else one answer; ""
        where the answer to a document is not known.
    real_needle
        NIAH's part of the sentence that answers the question, None elsewhere.
    aliases
        Other texts that count as the answer.
    document
        The text that the question is about, in format document.
    template
        The prompt around it, with `{question}` and, if there is a needle, `{haystack}` before.
    """

    needle_id: str
    text: str | None
    questions: tuple[Question, ...]
    answers: tuple[str, ...]
    template: str
    real_needle: str | None = None
    aliases: tuple[str, ...] = ()
    document: str | None = None

    @property
    def has_characters(self) -> bool:
        """Whether the answer is a name put into the needle, chosen for each probe."""
        return self.text is not None and CHARACTER in self.text

    def sentence(self, answer: str) -> str:
        """Return the needle with an answer in it."""
        return (self.text or "").replace(CHARACTER, answer)


def read_needles(
    path: str | Path,
    data_format: str,
    questions: Sequence[str] = (),
    template: str | None = None,
) -> list[Needle]:
    """Read a needle file.

    Parameters
    ----------
    path
        The file.
    data_format
        "nolima", "niah", "qa" or "document".
    questions
        Question kinds to ask (NoLiMa only, where it must not be empty).
    template
        Prompt to use instead of the file's, or the format's, own.

    Raises
    ------
    UserError
        At the first defect; it names file, entry, defect and mend.
    """
    path = Path(path)
    if data_format not in _READERS:
        raise UserError(
            f"{path}: unknown format '{data_format}'; choose one of {', '.join(sorted(_READERS))}"
        )
    needles = _READERS[data_format](path, questions, template)
    if not needles:
        raise UserError(f"{path}: holds no entry; add at least one")
    return needles


def check_template(template: str, where: str, *, needs_haystack: bool) -> None:
    """Raise UserError unless a prompt template has each placeholder once, the haystack first."""
    wanted = (HAYSTACK, QUESTION) if needs_haystack else (QUESTION,)
    for placeholder in wanted:
        count = template.count(placeholder)
        if count != 1:
            raise UserError(f"{where}: holds {placeholder} {count} times; it must stand there once")
    if needs_haystack and template.index(HAYSTACK) > template.index(QUESTION):
        raise UserError(f"{where}: {QUESTION} stands before {HAYSTACK}; put the haystack first")
    if not needs_haystack and HAYSTACK in template:
        raise UserError(f"{where}: holds {HAYSTACK}, but format qa has none; remove it")


def _read_nolima(path: Path, kinds: Sequence[str], template: str | None) -> list[Needle]:
    if not kinds:
        raise UserError(f"{path}: no question kind asked for; set questions, such as [onehop]")
    entries = _json(path, _text(path))
    if not isinstance(entries, list):
        raise UserError(
            f"{path}: holds a JSON {_json_type(entries)}, expected a list of NoLiMa entries"
        )
    needles: list[Needle] = []
    seen: set[str] = set()
    for number, entry in enumerate(entries, 1):
        where = f"{path}: entry {number}"
        if not isinstance(entry, dict):
            raise UserError(f"{where}: is a JSON {_json_type(entry)}, expected an object")
        entry_id = _string(entry, "id", where)
        where = f"{path}: entry {entry_id}"
        _refuse_duplicate(entry_id, seen, where)
        needles += _nolima_entry(entry, entry_id, where, kinds, template)
    return needles


def _nolima_entry(
    entry: Mapping[str, Any], entry_id: str, where: str, kinds: Sequence[str], template: str | None
) -> Iterator[Needle]:
    text = _string(entry, "needle", where)
    if CHARACTER not in text:
        raise UserError(f"{where}: needle has no {CHARACTER}; put it where the name goes")
    texts = _object(entry, "questions", where)
    missing = [kind for kind in kinds if kind not in texts]
    if missing:
        raise UserError(
            f"{where}: has no question '{missing[0]}', only {', '.join(sorted(texts)) or 'none'}; "
            "add it, or leave it out of questions in the config"
        )
    questions = {kind: _string(texts, kind, f"{where}: questions") for kind in kinds}
    characters = _strings(entry, "character_set", where)
    if not characters:
        raise UserError(f"{where}: character_set is empty; name at least one character")
    repeated = sorted({name for name in characters if characters.count(name) > 1})
    if repeated:
        raise UserError(f"{where}: character_set names '{repeated[0]}' twice; remove one")
    tests = _object(entry, "tests", where)
    if not tests:
        raise UserError(f"{where}: tests is empty; add one, such as T01 with input_args")
    if template is None:
        template = _string(entry, "task_template", where)
        check_template(template, f"{where}: task_template", needs_haystack=True)
    for test_id in tests:
        here = f"{where}: test {test_id}"
        arguments = _strings(_object(tests, test_id, here), "input_args", here)
        values = {str(number): value for number, value in enumerate(arguments, 1)}
        yield Needle(
            needle_id=f"{entry_id}_{test_id}",
            text=_fill(text, {**values, "CHAR": CHARACTER}, f"{here}: needle"),
            questions=tuple(
                Question(kind, _fill(question, values, f"{here}: question '{kind}'"))
                for kind, question in questions.items()
            ),
            answers=tuple(characters),
            template=template,
        )


def _read_niah(path: Path, kinds: Sequence[str], template: str | None) -> list[Needle]:
    needles = []
    for number, where, entry in _json_lines(path):
        text, question, real = (
            _string(entry, name, where).strip() for name in ("needle", "question", "real_needle")
        )
        start = text.casefold().find(real.rstrip(".").casefold())
        if start < 0:
            raise UserError(
                f"{where}: real_needle '{real}' is no part of the needle; copy it from there"
            )
        needles.append(
            Needle(
                needle_id=f"N{number:02d}",
                text=text,
                questions=(Question("niah", question),),
                answers=(real,),
                template=NIAH_TEMPLATE if template is None else template,
                # The published lines differ from their needle in case and in a last full stop.
                real_needle=text[start : start + len(real.rstrip("."))],
            )
        )
    return needles


def _read_qa(path: Path, kinds: Sequence[str], template: str | None) -> list[Needle]:
    needles = []
    seen: set[str] = set()
    for _, where, entry in _json_lines(path):
        item = _string(entry, "id", where)
        _refuse_duplicate(item, seen, where)
        needles.append(
            Needle(
                needle_id=item,
                text=None,
                questions=(Question("qa", _string(entry, "question", where)),),
                answers=(_string(entry, "answer", where),),
                aliases=tuple(_strings(entry, "aliases", where) if "aliases" in entry else ()),
                template=QA_TEMPLATE if template is None else template,
            )
        )
    return needles


def _read_documents(path: Path, kinds: Sequence[str], template: str | None) -> list[Needle]:
    needles = []
    seen: set[str] = set()
    for _, where, entry in _json_lines(path):
        item = _string(entry, "id", where)
        _refuse_duplicate(item, seen, where)
        needles.append(
            Needle(
                needle_id=item,
                text=None,
                questions=(Question("document", _string(entry, "question", where)),),
                answers=(_string(entry, "answer", where) if "answer" in entry else "",),
                document=_string(entry, "document", where),
                template=DOCUMENT_TEMPLATE if template is None else template,
            )
        )
    return needles


_READERS: dict[str, Callable[[Path, Sequence[str], str | None], list[Needle]]] = {
    "nolima": _read_nolima,
    "niah": _read_niah,
    "qa": _read_qa,
    "document": _read_documents,
}


def _fill(text: str, values: Mapping[str, str], where: str) -> str:
    """Replace each `{name}` of a text in one pass, so that a value is never filled again."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UserError(f"{where}: unknown placeholder {match[0]}; use {_known(values)}")
        return values[match[1]]

    return _PLACEHOLDER.sub(value, text)


def _known(names: Collection[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(names)) or "none: input_args is empty"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; correct needles in the config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error}); save it so") from None


def _json(where: str | Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON ({error.msg}, line {error.lineno}, column {error.colno}); mend it "
            "there"
        ) from None


def _json_lines(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield (number among the entries, where, entry) for each line that is not blank."""
    # Not splitlines(): a JSON string may hold U+2028 as it is.
    lines = enumerate(_text(path).split("\n"), 1)
    for number, (line_number, line) in enumerate(((n, s) for n, s in lines if s.strip()), 1):
        where = f"{path}: line {line_number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{where}: not JSON ({error.msg}, column {error.colno}); write one object a line"
            ) from None
        if not isinstance(entry, dict):
            raise UserError(f"{where}: is a JSON {_json_type(entry)}, expected an object")
        yield number, where, entry


def _get(entry: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in entry:
        raise UserError(f"{where}: has no '{name}'; add it")
    return entry[name]


def _string(entry: Mapping[str, Any], name: str, where: str) -> str:
    value = _get(entry, name, where)
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} is a JSON {_json_type(value)}, expected a string")
    if not value.strip():
        raise UserError(f"{where}: {name} is empty; write it")
    return value


def _strings(entry: Mapping[str, Any], name: str, where: str) -> list[str]:
    values = _get(entry, name, where)
    if not isinstance(values, list):
        raise UserError(f"{where}: {name} is a JSON {_json_type(values)}, expected a list")
    for value in values:
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{where}: {name} holds {value!r}, expected strings that are not empty")
    return values


def _object(entry: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    value = _get(entry, name, where)
    if not isinstance(value, dict):
        raise UserError(f"{where}: {name} is a JSON {_json_type(value)}, expected an object")
    return value


def _refuse_duplicate(entry_id: str, seen: set[str], where: str) -> None:
    if entry_id in seen:
        raise UserError(f"{where}: the id '{entry_id}' stands there twice; rename one")
    seen.add(entry_id)


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
