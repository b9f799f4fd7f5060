"""Readers of published question sets, over files with the traps of the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tokenizer

from workflow_scripts.common.errors import UserError
from workflow_scripts.probes.build import build_probes
from workflow_scripts.probes.needles import Needle, read_needles
from workflow_scripts.probes.sources import refuse_long_questions


def write(folder: Path, name: str, *entries: dict[str, Any]) -> Path:
    path = folder / name
    path.write_text("\n".join(map(json.dumps, entries)) + "\n", encoding="utf-8")
    return path


def read_one(path: Path, data_format: str, **options: Any) -> Needle:
    (needle,) = read_needles(path, data_format, **options)
    assert needle.text is None
    return needle


def test_popqa_rows_hold_their_answers_as_json_text_in_a_quoted_cell(tmp_path: Path) -> None:
    path = tmp_path / "test.tsv"
    path.write_text(
        "id\tsubj\tprop\tobj\tquestion\tpossible_answers\n"
        '7\tLimoges\tcapital of\tHaute-Vienne\tWhat is "Limoges" the capital of?\t'
        '"[""Haute-Vienne"", ""Haut\\u00e9"", """"]"\n'
        '8\tUlm\tcountry\tGermany\tWhere is Ulm?\t"[""Germany""]"\n',
        encoding="utf-8",
    )
    needle = read_one(path, "popqa", questions=["capital of"])
    assert needle.needle_id == "7"
    assert needle.questions[0].text == 'What is "Limoges" the capital of?'
    assert (needle.answers, needle.aliases) == (("Haute-Vienne",), ("Haut\u00e9",))
    with pytest.raises(UserError, match="no question of kind 'capital', only capital of, country"):
        read_needles(path, "popqa", questions=["capital"])


@pytest.mark.parametrize(
    "context",
    ["Question: What is 12 plus 7?\nAnswer:", "Q: What is 12 plus 7?\n\nA:", "What is 12 plus 7?"],
)
def test_arithmetic_loses_the_frame_around_its_question(tmp_path: Path, context: str) -> None:
    needle = read_one(
        write(tmp_path, "a.jsonl", {"context": context, "completion": " -19"}), "arithmetic"
    )
    assert needle.questions[0].text == "What is 12 plus 7?"
    assert needle.answers == ("-19",)


def musique(**changes: Any) -> dict[str, Any]:
    paragraphs = [
        {"idx": 0, "title": "Łódź", "paragraph_text": "A {braced} city.", "is_supporting": True},
        {"idx": 1, "title": "Ulm", "paragraph_text": "Another.", "is_supporting": False},
    ]
    return {
        "id": "2hop__1",
        "paragraphs": paragraphs,
        "question": "Which?",
        "answer": "Łódź",
        "answer_aliases": ["Lodz", ""],
        "answerable": True,
    } | changes


def test_musique_paragraphs_stand_in_the_prompt_with_their_titles(tmp_path: Path) -> None:
    path = write(tmp_path, "m.jsonl", musique(), musique(id="2hop__2", answerable=False))
    needle = read_one(path, "musique", template="{paragraphs}\n\n{question}")
    assert needle.template == "Łódź\nA {braced} city.\n\nUlm\nAnother.\n\n{question}"
    assert needle.aliases == ("Lodz",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": " "}, "line 1: answer is empty"),
        ({"paragraphs": []}, "line 1: paragraphs is no list"),
        ({"paragraphs": [{"title": "a"}]}, "line 1: paragraph 1: has no 'paragraph_text'"),
        ({"answer_aliases": "Lodz"}, "line 1: answer_aliases: is 'Lodz', expected a list"),
    ],
)
def test_a_defect_of_a_musique_line_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_needles(write(tmp_path, "m.jsonl", musique(**changes)), "musique")


def test_babilong_is_read_as_a_list_and_as_lines(tmp_path: Path) -> None:
    entry = {"input": "Mary left. ", "question": "Where is Mary? ", "target": "garden"}
    (tmp_path / "0k.json").write_text(json.dumps([entry]), encoding="utf-8")
    lines = write(tmp_path, "0k.jsonl", entry)
    template = "{input}|{question}"
    needles = [
        read_one(path, "babilong", template=template) for path in (tmp_path / "0k.json", lines)
    ]
    assert needles[0] == needles[1]
    assert needles[0].template == "Mary left.|{question}"
    assert needles[0].questions[0].text == "Where is Mary?"


def test_kinds_of_a_file_are_chosen_by_name(tmp_path: Path) -> None:
    entry = {"input": "Mary left.", "question": "Where?", "target": "garden"}
    path = write(
        tmp_path, "t.jsonl", entry | {"id": "a", "kind": "qa2"}, entry | {"id": "b", "kind": "qa3"}
    )
    assert read_one(path, "babilong", questions=["qa3"]).needle_id == "b"


def test_a_field_that_the_format_has_not_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "q.jsonl", {"id": "a", "question": "Why?", "answer": "b"})
    with pytest.raises(UserError, match=r"has \{input\}; this format has \{question\}"):
        read_needles(path, "qa", template="{input} {question}")


WHOLE: dict[str, dict[str, Any]] = {
    "qa": {"id": "a", "question": "Gdzie jest Łódź?", "answer": "Polska", "aliases": []},
    "popqa": {
        "id": 7,
        "prop": "country",
        "obj": "Österreich",
        "question": "Where is Wien?",
        "possible_answers": ["Austria"],
    },
    "arithmetic": {"context": "Question: What is 3 minus 5?\nAnswer:", "completion": " \u22122"},
    "babilong": {"input": "Zoë\u2028left.", "question": "Where is Zoë?", "target": "café"},
    "musique": musique(),
}
"""A whole entry of each format, not in ASCII."""
REQUIRED = [
    ("qa", ("id", "question", "answer")),
    ("popqa", ("id", "prop", "obj", "question", "possible_answers")),
    ("arithmetic", ("context", "completion")),
    ("babilong", ("input", "question", "target")),
    ("musique", ("id", "question", "answer", "paragraphs")),
]
ANSWERS = {"qa": "answer", "popqa": "obj", "arithmetic": "completion", "babilong": "target"}


@pytest.mark.parametrize("data_format", WHOLE)
@pytest.mark.parametrize("escaped", [True, False])
def test_text_of_any_script_is_read_as_it_is(
    tmp_path: Path, data_format: str, escaped: bool
) -> None:
    entry = WHOLE[data_format]
    path = tmp_path / "u.jsonl"
    # With the byte order mark that some editors write; U+2028 ends no line.
    path.write_text(json.dumps(entry, ensure_ascii=escaped) + "\n", encoding="utf-8-sig")
    needle = read_one(path, data_format)
    assert needle.answers == (entry[ANSWERS.get(data_format, "answer")].strip(),)
    asked = entry["context" if data_format == "arithmetic" else "question"]
    assert needle.questions[0].text in asked
    if data_format == "babilong":
        assert entry["input"] in needle.template


@pytest.mark.parametrize(
    ("data_format", "field"), [(name, field) for name, fields in REQUIRED for field in fields]
)
def test_a_missing_field_of_any_format_is_named(
    tmp_path: Path, data_format: str, field: str
) -> None:
    entry = {name: value for name, value in WHOLE[data_format].items() if name != field}
    with pytest.raises(UserError, match=rf"m.jsonl: line 1: has no '{field}'; add it"):
        read_needles(write(tmp_path, "m.jsonl", entry), data_format)


@pytest.mark.parametrize("data_format", ANSWERS)
def test_an_empty_answer_of_any_format_is_named(tmp_path: Path, data_format: str) -> None:
    field = ANSWERS[data_format]
    entry = WHOLE[data_format] | {field: " "}
    with pytest.raises(UserError, match=rf"m.jsonl: line 1: {field} is empty; write it"):
        read_needles(write(tmp_path, "m.jsonl", entry), data_format)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("[broken", "line 2: possible_answers: not JSON"),
        ('"Rome"', "line 2: possible_answers: is 'Rome', expected a list of strings"),
        ("[3]", r"line 2: possible_answers: is \[3\], expected a list of strings"),
    ],
)
def test_a_defect_of_popqas_answers_is_named(tmp_path: Path, cell: str, message: str) -> None:
    path = tmp_path / "p.tsv"
    quoted = cell.replace('"', '""')
    path.write_text(
        f'id\tprop\tobj\tquestion\tpossible_answers\n1\tcity\tRome\tWhere?\t"{quoted}"\n',
        encoding="utf-8",
    )
    with pytest.raises(UserError, match=message):
        read_needles(path, "popqa")


def test_a_row_of_popqa_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.tsv"
    path.write_text("id\tprop\tobj\tquestion\tpossible_answers\n1\tcity\tRome\n", encoding="utf-8")
    with pytest.raises(UserError, match="p.tsv: line 2: has not the 5 columns of the header"):
        read_needles(path, "popqa")


def test_a_paragraph_longer_than_the_models_positions_is_refused_by_its_item(
    tmp_path: Path,
) -> None:
    long = [*musique()["paragraphs"], {"title": "Ulm", "paragraph_text": "word " * 400}]
    path = write(tmp_path, "m.jsonl", musique(), musique(id="2hop__2", paragraphs=long))
    row = {"format": "musique", "max_new_tokens": 5, "max_thinking_tokens": 0}
    probes = build_probes(tokenizer(), "multihop", row, path, [])
    lengths = dict(probes.select("probe_id", "context_length").iter_rows())
    assert lengths["2hop__2"] > 400 > lengths["2hop__1"]
    refuse_long_questions(probes, row, lengths["2hop__2"] + 5, "probes.multihop", "m")
    with pytest.raises(UserError, match=r"probes\.multihop: the \d+ tokens of probe 2hop__2 and"):
        refuse_long_questions(probes, row, 400, "probes.multihop", "m")
