"""Needle files, haystack files, splits and samples."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from workflow_scripts.common.errors import UserError
from workflow_scripts.common.layout import haystack_paths
from workflow_scripts.probes.haystacks import read_haystacks, sentence_ends
from workflow_scripts.probes.needles import Needle, Question, read_needles
from workflow_scripts.probes.sample import (
    assign_answers,
    sample_cells,
    split_characters,
    split_pairs,
)
from workflow_scripts.probes.sources import check_sources

TEMPLATE = "Read.\n\n{haystack}\n\nQuestion: {question}"


def entry(**changes: Any) -> dict[str, Any]:
    made = {
        "id": "A1",
        "needle": "{CHAR} lives next to {1}.",
        "questions": {"onehop": "Who was in {2}?", "twohop": "Who was in {3}?"},
        "character_set": ["Anna", "Bruno", "Clara", "David"],
        "tests": {"T01": {"input_args": ["the Kiasma", "Helsinki", "Finland"]}},
        "task_template": TEMPLATE,
    }
    return {name: value for name, value in {**made, **changes}.items() if value is not None}


def write(path: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    path.write_text(text, encoding="utf-8")
    return path


def test_nolima_needle_is_filled_with_its_test_and_keeps_the_place_of_the_name(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "n.json", [entry()])
    (needle,) = read_needles(path, "nolima", ["twohop", "onehop"])
    assert needle.needle_id == "A1_T01"
    assert needle.sentence("Bruno") == "Bruno lives next to the Kiasma."
    assert needle.questions == (
        Question("twohop", "Who was in Finland?"),
        Question("onehop", "Who was in Helsinki?"),
    )


@pytest.mark.parametrize(
    ("changes", "defect"),
    [
        ({"needle": "Somebody lives next to {1}."}, "entry A1: needle has no {CHAR}"),
        ({"needle": "{CHAR} lives at {place}."}, "test T01: needle: unknown placeholder {place}"),
        ({"needle": "{CHAR} lives at {4}."}, "test T01: needle: unknown placeholder {4}"),
        ({"questions": {"twohop": "Who?"}}, "entry A1: has no question 'onehop', only twohop"),
        ({"questions": {"onehop": "Is it {CHAR}?"}}, "unknown placeholder {CHAR}"),
        ({"questions": {"onehop": " "}}, "onehop is empty"),
        ({"character_set": []}, "entry A1: character_set is empty"),
        ({"character_set": ["Anna", ""]}, "character_set holds ''"),
        ({"character_set": ["Anna", "Anna"]}, "'Anna' twice"),
        ({"character_set": None}, "entry A1: has no 'character_set'"),
        ({"tests": {}}, "tests is empty"),
        ({"tests": {"T01": {"input_args": "Kiasma"}}}, "input_args is a JSON string"),
        ({"task_template": None}, "has no 'task_template'"),
        ({"task_template": "{question} {haystack}"}, "{question} stands before {haystack}"),
        ({"task_template": "{haystack}"}, "holds {question} 0 times"),
        ({"id": None}, "entry 1: has no 'id'"),
    ],
)
def test_a_defect_of_a_nolima_file_is_one_line_naming_file_entry_and_defect(
    tmp_path: Path, changes: dict[str, Any], defect: str
) -> None:
    path = write(tmp_path / "needles.json", [entry(**changes)])
    with pytest.raises(UserError) as error:
        read_needles(path, "nolima", ["onehop"])
    assert str(error.value).startswith(f"{path}: ")
    assert defect in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("data_format", "content", "defect"),
    [
        ("nolima", "[{", "not JSON"),
        ("nolima", {"id": "A1"}, "a JSON object, expected a list"),
        ("nolima", [], "holds no entry"),
        ("nolima", [entry(), entry()], "the id 'A1' stands there twice"),
        ("niah", '\n{"needle": 1\n', "line 2: not JSON"),
        ("niah", {"needle": "A b.", "question": "What?"}, "line 1: has no 'real_needle'"),
        ("niah", {"needle": "A b.", "question": "What?", "real_needle": "c"}, "no part of"),
        ("niah", "", "holds no entry"),
        ("qa", {"id": "q", "question": "What?", "answer": ""}, "line 1: answer is empty"),
        ("qa", {"id": "q", "question": "What?", "answer": 4}, "answer is a JSON number"),
        ("qa", {"id": "q", "question": "?", "answer": "4", "aliases": "4"}, "aliases is a JSON s"),
        ("csv", "", "unknown format 'csv'"),
    ],
)
def test_a_defect_of_any_needle_file_is_one_line_naming_the_file(
    tmp_path: Path, data_format: str, content: Any, defect: str
) -> None:
    path = write(tmp_path / "needles", content)
    with pytest.raises(UserError) as error:
        read_needles(path, data_format, ["onehop"])
    assert str(error.value).startswith(f"{path}: ")
    assert defect in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_needle_file_and_one_that_is_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_needles(tmp_path / "absent.json", "nolima", ["onehop"])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        read_needles(tmp_path / "binary", "qa")


def test_niah_real_needle_is_found_whatever_its_case_and_last_full_stop(tmp_path: Path) -> None:
    line = {
        "needle": "\nOne hides because it rains.\n",
        "question": "Why?",
        "real_needle": "Because it rains.",
    }
    (needle,) = read_needles(write(tmp_path / "n.jsonl", line), "niah")
    assert needle.sentence(needle.answers[0]) == "One hides because it rains."
    assert needle.real_needle == "because it rains"
    assert needle.answers == ("Because it rains.",)


def test_qa_line_gives_question_answer_and_aliases(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "question": "In which city is it?", "answer": "Köln", "aliases": ["Cologne"]},
        {"id": "b", "question": "2 plus\u2028 2?", "answer": "4"},
    ]
    path = write(
        tmp_path / "q.jsonl", "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    )
    first, second = read_needles(path, "qa")
    assert (first.text, first.answers, first.aliases) == (None, ("Köln",), ("Cologne",))
    assert (second.needle_id, second.aliases) == ("b", ())


def test_haystacks_are_the_files_of_a_folder_and_repeated_names_take_the_folders(
    tmp_path: Path,
) -> None:
    for name in ("part1/p1.txt", "part2/p1.txt", "other.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, f"Text of {name}.\n")
    haystacks = read_haystacks(haystack_paths(tmp_path))
    assert [h.haystack_id for h in haystacks] == ["other", "part1-p1", "part2-p1"]
    assert haystacks[1].text == "Text of part1/p1.txt."
    assert haystack_paths(tmp_path / "other.txt") == [tmp_path / "other.txt"]


@pytest.mark.parametrize(("name", "defect"), [("absent", "no such file"), ("empty", "holds no")])
def test_a_haystack_folder_that_is_missing_or_empty_is_named(
    tmp_path: Path, name: str, defect: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=defect):
        haystack_paths(tmp_path / name)


def test_an_empty_haystack_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="blank.txt: holds no text"):
        read_haystacks([write(tmp_path / "blank.txt", " \n")])


ROWS = {
    "features": [],
    "rows": [{"row_idx": i, "row": {"text": f'Row {i} "é".\nEnds.'}} for i in range(3)],
}


def test_a_rows_file_is_the_texts_of_its_rows(tmp_path: Path) -> None:
    (haystack,) = read_haystacks([write(tmp_path / "p1.txt", ROWS)])
    assert haystack.text == "\n\n".join(f'Row {i} "é".\nEnds.' for i in range(3))


def test_a_rows_file_cut_off_anywhere_keeps_its_whole_rows_and_reports_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = json.dumps(ROWS)
    second_end = source.index(', {"row_idx": 2')
    for cut in range(second_end, len(source)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "locos"):
            (haystack,) = read_haystacks([write(tmp_path / "p1.txt", source[:cut])])
        whole = 3 if source[:cut].count("}}") == 3 else 2
        assert haystack.text == "\n\n".join(f'Row {i} "é".\nEnds.' for i in range(whole))
        assert f"read {whole} whole rows, dropped the last" in caplog.text
        if whole == 2:
            assert f"dropped the last {cut - second_end} of {cut} characters" in caplog.text


def test_a_rows_file_cut_off_in_its_only_text_keeps_its_whole_sentences(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = '{"rows": [{"row": {"text": "One is here. Two is a caf\\u00'
    with caplog.at_level(logging.WARNING, "locos"):
        (haystack,) = read_haystacks([write(tmp_path / "p1.json", source)])
    assert haystack.text == "One is here."
    assert "dropped the last 13" in caplog.text


def test_a_rows_file_without_a_whole_sentence_or_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cut off before"):
        read_haystacks([write(tmp_path / "p1.json", '{"rows": [{"row": {"te')])
    with pytest.raises(UserError, match="row 1 has no text"):
        read_haystacks([write(tmp_path / "p2.json", {"rows": [{"row": {"prompt": "a"}}]})])


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("It is 3.14 m... Yes.", ["It is 3.14 m...", "Yes."]),
        ('"Who?" he said. (He did.) End', ['"Who?"', "he said.", "(He did.)"]),
        ("春が来た。「冬は？」と聞いた。夏", ["春が来た。", "「冬は？」", "と聞いた。"]),
        ("他走了！她说：“好。”天黑了。", ["他走了！", "她说：“好。”", "天黑了。"]),
        ("A heading\n\nA line that\nwraps. End.", ["A heading", "A line that\nwraps.", "End."]),
        ("वह गया। वह आया।", ["वह गया।", "वह आया।"]),
        ("هل ذهب؟ نعم.", ["هل ذهب؟", "نعم."]),
    ],
)
def test_sentences_end_at_the_enders_of_their_script(text: str, sentences: list[str]) -> None:
    found, begin = [], 0
    for end in sentence_ends(text):
        found.append(text[begin : end.start])
        assert text[end.start : end.stop].strip() == ""
        begin = end.stop
    assert found == sentences


def needles(count: int, characters: tuple[str, ...] = tuple("ABCDEFGH")) -> list[Needle]:
    return [
        Needle(f"E{i:02d}", "{CHAR} is.", (Question("onehop", f"Who {i}?"),), characters, TEMPLATE)
        for i in range(count)
    ]


@pytest.mark.parametrize("haystacks", [["h"], ["h", "i", "j"], ["h", "i", "j", "k"]])
def test_detect_and_evaluate_share_no_pair_and_no_character_and_together_are_all(
    haystacks: list[str],
) -> None:
    made = needles(9)
    pairs = {
        split: {(n.needle_id, h) for n, h in split_pairs(made, haystacks, split, one_each=False)}
        for split in ("detect", "evaluate", "all")
    }
    assert not pairs["detect"] & pairs["evaluate"]
    assert pairs["detect"] | pairs["evaluate"] == pairs["all"]
    assert len(pairs["all"]) == 9 * len(haystacks)
    assert abs(len(pairs["detect"]) - len(pairs["evaluate"])) <= len(haystacks)
    names = {split: split_characters(made, split) for split in pairs}
    assert not names["detect"] & names["evaluate"]
    assert names["detect"] | names["evaluate"] == names["all"] == set("ABCDEFGH")
    assert len(names["detect"]) == 4


def test_the_split_does_not_hang_on_the_order_of_files_and_entries() -> None:
    made = needles(9)
    shuffled = random.Random(0).sample(made, len(made))

    def ids(order: list[Needle], haystacks: list[str]) -> set[tuple[str, str | None]]:
        pairs = split_pairs(order, haystacks, "detect", one_each=False)
        return {(needle.needle_id, haystack) for needle, haystack in pairs}

    assert ids(made, ["h", "i"]) == ids(shuffled, ["i", "h"])
    assert split_characters(made, "detect") == split_characters(shuffled, "detect")


def test_needles_with_one_answer_go_to_one_split_whatever_their_haystack() -> None:
    made = [Needle(f"N{i}", "A b.", (Question("niah", "?"),), ("b",), TEMPLATE) for i in range(6)]
    detect = split_pairs(made, ["h", "i", "j"], "detect", one_each=False)
    evaluate = split_pairs(made, ["h", "i", "j"], "evaluate", one_each=False)
    assert not {n.needle_id for n, _ in detect} & {n.needle_id for n, _ in evaluate}
    assert len(detect) == len(evaluate) == 9


def test_one_each_gives_needle_i_haystack_i() -> None:
    made = needles(5)
    pairs = split_pairs(made, ["h", "i", "j"], "all", one_each=True)
    assert [haystack for _, haystack in pairs] == ["h", "i", "j", "h", "i"]


@pytest.mark.parametrize("size", [7, 40, 100, 333, 480, 999])
def test_a_sample_is_balanced_over_every_factor_and_repeats_no_cell_needlessly(size: int) -> None:
    pairs = split_pairs(needles(8), ["h", "i", "j"], "all", one_each=False)
    cells = sample_cells(pairs, [100, 200, 300, 400], [0, 25, 50, 75, 100], size, seed=1)
    assert len(cells) == size
    for factor, levels in (
        ([c.needle.needle_id for c in cells], 8),
        ([c.haystack_id for c in cells], 3),
        ([c.context_length for c in cells], 4),
        ([c.depth_percent for c in cells], 5),
    ):
        counts = [*Counter(factor).values()] + [0] * (levels - len(set(factor)))
        assert len(counts) == levels
        assert max(counts) - min(counts) <= 1
    repeats = Counter(
        (c.needle.needle_id, c.haystack_id, c.context_length, c.depth_percent) for c in cells
    )
    assert max(repeats.values()) == -(-size // 480)


def test_a_sample_hangs_on_its_seed_alone() -> None:
    pairs = split_pairs(needles(8), ["h", "i"], "detect", one_each=False)
    one, two, other = (
        sample_cells(pairs, [100, 200], [0, 50], 12, seed=seed) for seed in (1, 1, 2)
    )
    assert one == two
    assert one != other


def test_without_a_size_the_sample_is_the_whole_grid() -> None:
    pairs = split_pairs(needles(2), ["h"], "all", one_each=False)
    cells = sample_cells(pairs, [100, 200], [0, 50, 100], None, seed=1)
    assert len(cells) == len(set(cells)) == 12


def test_characters_are_used_evenly_and_never_twice_in_one_cell() -> None:
    pairs = split_pairs(needles(1), ["h"], "all", one_each=False)
    cells = sample_cells(pairs, [100], [0, 50], 16, seed=1)
    answers = assign_answers(cells, frozenset("ABCDEFGH"), 1, "probes.x")
    assert set(Counter(answers).values()) == {2}
    assert len(set(zip(cells, answers, strict=True))) == 16
    with pytest.raises(UserError, match=r"probes\.x: size asks for more"):
        assign_answers([*cells, cells[0]], frozenset("ABCDEFGH"), 1, "probes.x")


def test_a_needle_without_a_character_in_the_split_is_named() -> None:
    pairs = split_pairs(needles(1, ("A",)), ["h"], "all", one_each=False)
    cells = sample_cells(pairs, [100], [0], 1, seed=1)
    with pytest.raises(UserError, match="needle E00 has no character left"):
        assign_answers(cells, frozenset(), 1, "probes.x")


@pytest.mark.parametrize(
    ("changes", "defect"),
    [
        ({"split": "test"}, "probes.x.split: 'test' is none of"),
        ({"size": 0}, "probes.x.size: 0 probes"),
        ({"depths": [0, 101]}, "probes.x.depths: 101"),
        ({"depths": []}, "probes.x.depths: names none"),
        ({"context_lengths": [100, 100]}, "probes.x.context_lengths: names a value twice"),
        ({"context_lengths": [0]}, "probes.x.context_lengths: 0"),
        ({"context_lengths": [9]}, "9 tokens cannot hold needle A1_T01"),
        ({"needle": "gone"}, "probes.x.needle: 'gone'"),
        ({"template": "{question}"}, "probes.x.template: holds {haystack} 0 times"),
        ({"questions": []}, "no question kind asked for"),
    ],
)
def test_a_bad_config_row_is_refused_without_a_tokenizer(
    tmp_path: Path, changes: dict[str, Any], defect: str
) -> None:
    row = {
        "format": "nolima",
        "questions": ["onehop"],
        "context_lengths": [100],
        "depths": [0, 100],
    }
    needles_path = write(tmp_path / "n.json", [entry()])
    haystack = write(tmp_path / "h.txt", "One. Two.")
    check_sources(row, needles_path, [haystack], "x")
    with pytest.raises(UserError) as error:
        check_sources({**row, **changes}, needles_path, [haystack], "x")
    assert defect in str(error.value)
    assert "\n" not in str(error.value)


def test_a_haystack_without_a_sentence_end_is_refused_without_a_tokenizer(tmp_path: Path) -> None:
    row = {"format": "nolima", "questions": ["onehop"], "context_lengths": [100], "depths": [0]}
    path = write(tmp_path / "h.txt", "no end in sight")
    with pytest.raises(UserError, match="h.txt: no sentence ends"):
        check_sources(row, write(tmp_path / "n.json", [entry()]), [path], "x")
