"""Readers of published question sets, over files with the traps of the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workflow_scripts.common.errors import UserError
from workflow_scripts.probes.needles import Needle, read_needles


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
