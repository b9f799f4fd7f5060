"""Readers of the needle files: whatever the format, a file becomes a list of `Needle` records.

Formats (method, section 5): `nolima`, a JSON list of entries with a needle, questions, characters
and tests; `niah`, JSON lines {needle, question, real_needle}.

Formats of questions that need no needle: `qa`, JSON lines {id, question, answer, aliases}; `popqa`,
TSV or JSON lines with PopQA's columns; `arithmetic`, JSON lines {context, completion} as in
EleutherAI/arithmetic; `musique`, JSON lines with 20 paragraphs; `babilong`, {input, question, target},
a JSON list or JSON lines.

`document`, JSON lines {id, document, question, answer}, asks about a text of the user's; the answer
may be left out.

`text` is no needle file: a plain text, cut into pieces that are read and not asked about.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
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
MUSIQUE_TEMPLATE = (
    "Use the paragraphs to answer the question. Put the answer, and nothing else, between <answer> "
    "and </answer>.\n\n{paragraphs}\n\nQuestion: {question}"
)
BABILONG_TEMPLATE = (
    "Read the story and answer the question about it in one word. Put it between <answer> and "
    "</answer>.\n\n{input}\n\nQuestion: {question}"
)

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_FIELD = re.compile(r"\{(\w+)\}")
_ARITHMETIC = re.compile(r"\s*(?:Q|Question):(.*?)(?:A|Answer):\s*", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """A question about a needle.

    Attributes
    ----------
    kind
        Question type, such as "onehop", "twohop" or "literal"; PopQA's relation; elsewhere, unless
        the file tells a kind, the name of the format.
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
        A key of `_READERS`.
    questions
        Question kinds to ask: for NoLiMa at least one; elsewhere all where it is empty.
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
    return _of_kinds(needles, questions, path)


def _of_kinds(needles: list[Needle], kinds: Sequence[str], path: Path) -> list[Needle]:
    """Return the needles that are asked about in one of some kinds; all where none is named."""
    known = {question.kind for needle in needles for question in needle.questions}
    for kind in kinds:
        if kind not in known:
            raise UserError(
                f"{path}: has no question of kind '{kind}', only {', '.join(sorted(known))}; correct "
                "questions in the config"
            )
    return [n for n in needles if not kinds or any(q.kind in kinds for q in n.questions)]


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
        raise UserError(f"{where}: holds {HAYSTACK}, but its format has none; remove it")


def _read_nolima(path: Path, kinds: Sequence[str], template: str | None) -> list[Needle]:
    if not kinds:
        raise UserError(f"{path}: no question kind asked for; set questions, such as [onehop]")
    entries = _json(path, read_text(path))
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
    return [
        _bare_question(
            item=_string(entry, "id", where),
            question=Question("qa", _string(entry, "question", where)),
            answer=_string(entry, "answer", where),
            aliases=_strings(entry, "aliases", where) if "aliases" in entry else (),
            template=QA_TEMPLATE if template is None else template,
            where=where,
        )
        for where, entry in _unrepeated(_json_lines(path))
    ]


def _read_popqa(path: Path, kinds: Sequence[str], template: str | None) -> list[Needle]:
    needles = []
    for where, entry in _unrepeated(_tsv(path) if path.suffix == ".tsv" else _json_lines(path)):
        possible = _get(entry, "possible_answers", where)
        if isinstance(possible, str):  # the published file holds a list as JSON text
            possible = _json(f"{where}: possible_answers", possible)
        accepted = _aliases(possible, f"{where}: possible_answers")
        answer = _string(entry, "obj", where)
        needles.append(
            _bare_question(
                item=str(_get(entry, "id", where)),
                question=Question(_string(entry, "prop", where), _string(entry, "question", where)),
                answer=answer,
                aliases=[text for text in accepted if text != answer],
                template=QA_TEMPLATE if template is None else template,
                where=where,
            )
        )
    return needles


def _read_arithmetic(path: Path, kinds: Sequence[str], template: str | None) -> list[Needle]:
    needles = []
    for number, where, entry in _json_lines(path):
        context = _string(entry, "context", where)
        framed = _ARITHMETIC.fullmatch(context)
        needles.append(
            _bare_question(
                item=f"A{number:04d}",
                question=Question("arithmetic", (framed[1] if framed else context).strip()),
                answer=_string(entry, "completion", where).strip(),
                template=QA_TEMPLATE if template is None else template,
                where=where,
            )
        )
    return needles


def _read_musique(path: Path, kinds: Sequence[str], template: str | None) -> list[Needle]:
    needles = []
    for where, entry in _unrepeated(_json_lines(path)):
        if entry.get("answerable") is False:  # a supporting paragraph was taken out
            continue
        paragraphs = _get(entry, "paragraphs", where)
        if not isinstance(paragraphs, list) or not paragraphs:
            raise UserError(f"{where}: paragraphs is no list of paragraphs; write at least one")
        texts = []
        for number, paragraph in enumerate(paragraphs, 1):
            here = f"{where}: paragraph {number}"
            if not isinstance(paragraph, dict):
                raise UserError(f"{here}: is a JSON {_json_type(paragraph)}, expected an object")
            texts.append(
                "\n".join(_string(paragraph, f, here) for f in ("title", "paragraph_text"))
            )
        needles.append(
            _bare_question(
                item=_string(entry, "id", where),
                question=Question("musique", _string(entry, "question", where)),
                answer=_string(entry, "answer", where),
                aliases=_aliases(entry.get("answer_aliases", []), f"{where}: answer_aliases"),
                template=MUSIQUE_TEMPLATE if template is None else template,
                fields={"paragraphs": "\n\n".join(texts)},
                where=where,
            )
        )
    return needles


def _read_babilong(path: Path, kinds: Sequence[str], template: str | None) -> list[Needle]:
    text = read_text(path)
    if text.lstrip().startswith("["):
        entries = [(n, f"{path}: entry {n}", e) for n, e in enumerate(_json(path, text), 1)]
    else:
        entries = list(_json_lines(path))
    needles = []
    for number, where, entry in entries:
        if not isinstance(entry, dict):
            raise UserError(f"{where}: is a JSON {_json_type(entry)}, expected an object")
        needles.append(
            _bare_question(
                item=_string(entry, "id", where) if "id" in entry else f"B{number:04d}",
                question=Question(
                    _string(entry, "kind", where) if "kind" in entry else "babilong",
                    _string(entry, "question", where).strip(),
                ),
                answer=_string(entry, "target", where).strip(),
                template=BABILONG_TEMPLATE if template is None else template,
                fields={"input": _string(entry, "input", where).strip()},
                where=where,
            )
        )
    return needles


def _read_documents(path: Path, kinds: Sequence[str], template: str | None) -> list[Needle]:
    return [
        Needle(
            needle_id=_string(entry, "id", where),
            text=None,
            questions=(Question("document", _string(entry, "question", where)),),
            answers=(_string(entry, "answer", where) if "answer" in entry else "",),
            document=_string(entry, "document", where),
            template=DOCUMENT_TEMPLATE if template is None else template,
        )
        for where, entry in _unrepeated(_json_lines(path))
    ]


def _bare_question(
    *,
    item: str,
    question: Question,
    answer: str,
    template: str,
    where: str,
    aliases: Sequence[str] = (),
    fields: Mapping[str, str] = MappingProxyType({}),
) -> Needle:
    """Return a question without a needle; `fields` go into the template, but for {question}.

    Raises
    ------
    UserError
        If the template names a field that the format has not, or does not ask once.
    """
    known = {"question": QUESTION, **fields}

    def value(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise UserError(
                f"{where}: the prompt's wording has {match[0]}; this format has {_known(known)}"
            )
        return known[match[1]]

    # In one pass, so that a value is never filled again.
    worded = _FIELD.sub(value, template)
    check_template(worded, f"{where}: the prompt", needs_haystack=False)
    return Needle(
        needle_id=item,
        text=None,
        questions=(question,),
        answers=(answer,),
        aliases=tuple(aliases),
        template=worded,
    )


def _aliases(values: Any, where: str) -> list[str]:
    """Return the texts of a published list of answers that are not blank, each once."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(f"{where}: is {values!r}, expected a list of strings")
    return list(dict.fromkeys(value for value in values if value.strip()))


_READERS: dict[str, Callable[[Path, Sequence[str], str | None], list[Needle]]] = {
    "nolima": _read_nolima,
    "niah": _read_niah,
    "qa": _read_qa,
    "popqa": _read_popqa,
    "arithmetic": _read_arithmetic,
    "musique": _read_musique,
    "babilong": _read_babilong,
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


def read_text(path: Path) -> str:
    """Return a file's text.

    Raises
    ------
    UserError
        If it is missing or no UTF-8.
    """
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
    lines = enumerate(read_text(path).split("\n"), 1)
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


def _tsv(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield (number, where, entry) for each row of a table with a header."""
    rows = csv.DictReader(io.StringIO(read_text(path), newline=""), delimiter="\t")
    for number, row in enumerate(rows, 1):
        where = f"{path}: line {rows.line_num}"
        if None in row or None in row.values():
            raise UserError(
                f"{where}: has not the {len(rows.fieldnames or ())} columns of the header"
            )
        yield number, where, row


def _unrepeated(
    entries: Iterable[tuple[int, str, dict[str, Any]]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, entry), and refuse an id that stands there twice."""
    seen: set[str] = set()
    for _, where, entry in entries:
        _refuse_duplicate(str(_get(entry, "id", where)), seen, where)
        yield where, entry


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
