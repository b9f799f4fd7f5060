"""The data sets in the repository: formats, facts that can be recomputed, disjoint vocabularies."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from workflow_scripts.ablation.metrics import normalise

DATA = Path(__file__).resolve().parents[2] / "data"
NEEDLE_FILES = {
    "en": "landmarks.json",
    "zh": "landmarks_zh.json",
    "ja": "landmarks_ja.json",
}
LEAST_ENTRIES = {"en": (12, 4), "zh": (8, 2), "ja": (8, 2)}
LEAST_TEXTS = {"en": (8, 2500), "zh": (4, 3000), "ja": (4, 3000)}
PROMPT_FIELDS = {
    "parametric": {"question"},
    "arithmetic": {"question"},
    "multihop": {"paragraphs", "question"},
    "tracking_qa2": {"input", "question"},
    "tracking_qa3": {"input", "question"},
}
STOP_WORDS = set(
    "about above across after along because been behind from into that them they this through "
    "what when whenever where which while whom with have here there their were will would".split()
)
"""Words without content that are longer than three letters."""


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def json_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


def needle_entries(language: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(
        (DATA / "needles" / NEEDLE_FILES[language]).read_text("utf-8")
    )
    return entries


def filled(template: str, arguments: list[str]) -> str:
    for number, argument in enumerate(arguments, 1):
        template = template.replace(f"{{{number}}}", argument)
    return template


def filled_tests(language: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield (name, needle without the character, questions) of every entry and test."""
    for entry in needle_entries(language):
        for test_id, test in entry["tests"].items():
            arguments = test["input_args"]
            yield (
                f"{entry['id']}_{test_id}",
                filled(entry["needle"], arguments).replace("{CHAR}", ""),
                {kind: filled(q, arguments) for kind, q in entry["questions"].items()},
            )


def stem(word: str) -> str:
    """Cut common endings, so that `lives` and `live`, `paints` and `painted` are one word."""
    return re.sub(r"(ing|ed|es|s|e)$", "", word)


def content_words(text: str) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {stem(w) for w in words if len(w) > 3 and w not in STOP_WORDS}


def script_words(text: str) -> set[str]:
    """Return pairs of neighbouring Han characters and whole runs of katakana."""
    runs = re.findall(r"[\u4e00-\u9fff]+", text)
    pairs = {run[i : i + 2] for run in runs for i in range(len(run) - 1)}
    return pairs | set(re.findall(r"[\u30a1-\u30ff]+", text))


WORDS = {"en": content_words, "zh": script_words, "ja": script_words}


def haystack_texts(language: str) -> list[str]:
    paths = sorted((DATA / "haystacks" / language).glob("*.txt"))
    return [path.read_text("utf-8") for path in paths]


def sentences(text: str) -> list[str]:
    return [s.strip() for s in re.findall(r"[^.?!。？！]+[.?!。？！]?", text) if s.strip()]


@pytest.mark.parametrize("language", NEEDLE_FILES)
def test_needle_entries_and_tests_are_unique_and_enough(language: str) -> None:
    entries = needle_entries(language)
    least_entries, least_tests = LEAST_ENTRIES[language]
    assert len({entry["id"] for entry in entries}) == len(entries) >= least_entries
    for entry in entries:
        arguments = [tuple(test["input_args"]) for test in entry["tests"].values()]
        assert len(set(arguments)) == len(arguments) >= least_tests
        assert len(set(entry["character_set"])) == len(entry["character_set"]) >= 16
        assert set(entry["questions"]) == {"onehop", "twohop", "literal"}
        assert entry["task_template"].count("{haystack}") == 1
        assert entry["task_template"].count("{question}") == 1


@pytest.mark.parametrize("language", NEEDLE_FILES)
def test_needles_name_the_character_once_and_questions_never(language: str) -> None:
    for entry in needle_entries(language):
        assert entry["needle"].count("{CHAR}") == 1
        assert all("{CHAR}" not in question for question in entry["questions"].values())


@pytest.mark.parametrize("language", NEEDLE_FILES)
def test_every_placeholder_is_filled(language: str) -> None:
    for name, needle, questions in filled_tests(language):
        assert "{" not in needle and "}" not in needle, name
        assert all("{" not in question for question in questions.values()), name


@pytest.mark.parametrize("language", NEEDLE_FILES)
def test_nonliteral_questions_share_no_content_word_with_the_needle(language: str) -> None:
    words = WORDS[language]
    for name, needle, questions in filled_tests(language):
        for kind in ("onehop", "twohop"):
            assert not words(needle) & words(questions[kind]), (name, kind)


@pytest.mark.parametrize("language", NEEDLE_FILES)
def test_literal_questions_repeat_what_only_the_needle_names(language: str) -> None:
    for entry in needle_entries(language):
        for test_id, test in entry["tests"].items():
            landmark = test["input_args"][0]
            assert landmark in filled(entry["needle"], test["input_args"])
            assert landmark in filled(entry["questions"]["literal"], test["input_args"]), test_id


@pytest.mark.parametrize("language", NEEDLE_FILES)
def test_character_names_do_not_occur_in_facts(language: str) -> None:
    for entry in needle_entries(language):
        facts = " ".join(a for t in entry["tests"].values() for a in t["input_args"])
        for name in entry["character_set"]:
            assert name.lower() not in facts.lower(), (entry["id"], name)


def test_characters_are_no_prefix_of_each_other() -> None:
    for language in NEEDLE_FILES:
        names = needle_entries(language)[0]["character_set"]
        assert not [(a, b) for a in names for b in names if a != b and b.startswith(a)]


def test_first_entry_has_the_shape_of_the_trial() -> None:
    first = needle_entries("en")[0]
    assert first["needle"] == "Actually, {CHAR} lives next to {1}."
    assert first["questions"] == {
        "onehop": "Which character has been to {2}?",
        "twohop": "Which character has been to {3}?",
        "literal": "Which character lives next to {1}?",
    }


@pytest.mark.parametrize("language", NEEDLE_FILES)
def test_haystacks_are_long_enough_and_end_every_sentence(language: str) -> None:
    texts = haystack_texts(language)
    least_texts, least_size = LEAST_TEXTS[language]
    assert len(texts) >= least_texts
    for text in texts:
        units = text.split() if language == "en" else "".join(text.split())
        assert len(units) >= least_size
        for paragraph in text.strip().split("\n\n"):
            assert paragraph[-1] in (".?!" if language == "en" else "。？！")
        assert not re.search(r"[0-9０-９\[\]{}|_]", text)


@pytest.mark.parametrize("language", NEEDLE_FILES)
def test_haystack_sentences_hardly_repeat(language: str) -> None:
    for text in haystack_texts(language):
        found = sentences(text)
        assert len(set(found)) >= 0.99 * len(found)


@pytest.mark.parametrize("language", NEEDLE_FILES)
def test_haystacks_share_no_content_word_with_needles_or_questions(language: str) -> None:
    words = WORDS[language]
    haystack = words("\n".join(haystack_texts(language)))
    for name, needle, questions in filled_tests(language):
        for text in (needle, *questions.values()):
            assert not words(text) & haystack, name


@pytest.mark.parametrize("language", NEEDLE_FILES)
def test_haystacks_name_no_character_and_no_fact(language: str) -> None:
    text = "\n".join(haystack_texts(language)).lower()
    for entry in needle_entries(language):
        facts = [a for t in entry["tests"].values() for a in t["input_args"]]
        for name in (*entry["character_set"], *facts):
            pattern = re.escape(name.lower())
            assert not re.search(rf"\b{pattern}\b" if language == "en" else pattern, text), name


def test_english_haystacks_have_capitals_at_sentence_starts_only() -> None:
    for text in haystack_texts("en"):
        for sentence in sentences(text):
            assert sentence[0].isupper() and not re.search(r"[A-Z]", sentence[1:]), sentence


def test_niah_answers_lie_in_the_needle_and_their_words_not_in_the_haystacks() -> None:
    items = json_lines("needles/niah.jsonl")
    haystack = content_words("\n".join(haystack_texts("en")))
    assert len({item["needle"] for item in items}) == len(items) >= 20
    for item in items:
        assert set(item) == {"needle", "question", "real_needle"}
        assert item["needle"].count(item["real_needle"]) == 1
        assert 6 <= len(item["real_needle"].split()) <= 20
        assert not content_words(item["needle"]) & haystack
        assert not content_words(item["question"]) & content_words(item["real_needle"])
        # The question repeats the words of the rest of the needle: that is what makes it literal.
        rest = content_words(item["needle"].replace(item["real_needle"], ""))
        assert len(rest & content_words(item["question"])) >= 2


@pytest.mark.parametrize("name", ["haystacks/make_filler.py", "tasks/make_tasks.py"])
def test_generators_reproduce_the_committed_files(name: str) -> None:
    script = load_script(DATA / name)
    if name.startswith("tasks"):
        made = script.make_tasks()
    else:
        made = {
            p: t for language in NEEDLE_FILES for p, t in script.make_language(language).items()
        }
        assert set(made) == set((DATA / "haystacks").glob("*/*.txt"))
    for path, text in made.items():
        assert path.read_bytes() == text.encode("utf-8"), path.name


@pytest.mark.parametrize(("name", "least"), [("parametric", 80), ("arithmetic", 80)])
def test_question_sets_have_unique_ids_questions_and_an_answer(name: str, least: int) -> None:
    items = json_lines(f"tasks/{name}.jsonl")
    assert len({item["id"] for item in items}) == len(items) >= least
    assert len({item["question"] for item in items}) == len(items)
    for item in items:
        assert set(item) == {"id", "question", "answer", "aliases"}
        assert item["answer"] and item["answer"] not in item["aliases"]
        assert item["answer"].lower() not in item["question"].lower() or name == "arithmetic"


def test_arithmetic_answers_are_right() -> None:
    for item in json_lines("tasks/arithmetic.jsonl"):
        match = re.fullmatch(r"What is (\d) (plus|minus) (\d)\?", item["question"])
        assert match is not None
        a, word, b = match.groups()
        value = int(a) + int(b) if word == "plus" else int(a) - int(b)
        assert value >= 0 and item["answer"] == str(value)


def test_parametric_facts_agree_with_the_needles() -> None:
    cities = {
        test["input_args"][0]: test["input_args"][1]
        for entry in needle_entries("en")
        if entry["topic"] == "landmark"
        for test in entry["tests"].values()
    }
    for item in json_lines("tasks/parametric.jsonl"):
        match = re.fullmatch(r"Which city is (.*) in\?", item["question"])
        if match and match[1] in cities:
            assert cities[match[1]] == item["answer"]


def test_multihop_answers_need_both_supporting_paragraphs() -> None:
    items = json_lines("tasks/multihop.jsonl")
    assert len({item["id"] for item in items}) == len(items) >= 60
    for item in items:
        paragraphs = item["paragraphs"]
        assert [p["idx"] for p in paragraphs] == list(range(20))
        support = [p for p in paragraphs if p["is_supporting"]]
        assert len(support) == 2
        named = [p for p in support if p["title"] in item["question"]]
        (bridge,) = (p for p in support if p not in named)
        assert len(named) == 1 and bridge["title"] in named[0]["paragraph_text"]
        assert item["answer"] not in named[0]["paragraph_text"]
        # The answer stands in one paragraph, whose subject the question does not name.
        holders = [p for p in paragraphs if item["answer"] in p["paragraph_text"]]
        assert holders == [bridge]
        assert bridge["title"] not in item["question"] and item["answer"] not in item["question"]
        # Where the fact calls the answer "X College", that is right too.
        kind = re.search(
            rf"(the town of )?{re.escape(item['answer'])}( College| Street| Society)?",
            bridge["paragraph_text"],
        )
        assert kind is not None
        accepted = {normalise(text) for text in (item["answer"], *item["answer_aliases"])}
        assert normalise(kind[0]) in accepted
        # Guessing by the relation alone does not do: others have it too.
        before, after = (
            re.escape(part)
            for part in re.search(  # the sentence that gives the answer, around it
                rf"{re.escape(bridge['title'])} ([^.]*?){re.escape(item['answer'])}([^.]*)\.",
                bridge["paragraph_text"],
            ).groups()  # type: ignore[union-attr]
        )
        same = [p for p in paragraphs if re.search(rf"{before}[^.]+{after}\.", p["paragraph_text"])]
        assert len(same) >= 4


def replay(story: str) -> dict[str, list[str]]:
    """Return object -> places in order, by reading the story sentence by sentence."""
    at: dict[str, str] = {}
    hands: dict[str, set[str]] = {}
    trail: dict[str, list[str]] = {}
    for sentence in story.rstrip(".").split(". "):
        person, *rest = sentence.split()
        words = set(rest)
        if words & {"went", "moved", "walked", "travelled"}:
            at[person] = rest[-1]
        elif words & {"picked", "took", "grabbed"}:
            thing = rest[-1]
            assert all(thing not in held for held in hands.values()), "it is already held"
            if thing in trail:
                assert trail[thing][-1] == at[person], "it lies elsewhere"
            hands.setdefault(person, set()).add(thing)
        else:
            assert words & {"put", "dropped", "left"}
            (thing,) = words & hands[person]
            hands[person].remove(thing)
        for thing in hands.get(person, set()):
            places = trail.setdefault(thing, [])
            if places[-1:] != [at[person]]:
                places.append(at[person])
    return trail


def test_tracking_targets_follow_from_a_replay_of_the_story() -> None:
    items = json_lines("tasks/tracking.jsonl")
    assert len({item["id"] for item in items}) == len(items) >= 60
    assert len({item["input"] for item in items}) == len(items)
    kinds = Counter(item["kind"] for item in items)
    assert kinds.keys() == {"qa2", "qa3"} and min(kinds.values()) >= 60
    for item in items:
        trail = replay(item["input"])
        if item["kind"] == "qa2":
            (thing,) = re.fullmatch(r"Where is the (\w+)\?", item["question"]).groups()  # type: ignore[union-attr]
            assert trail[thing][-1] == item["target"], item["id"]
        else:
            pattern = r"Where was the (\w+) before the (\w+)\?"
            thing, place = re.fullmatch(pattern, item["question"]).groups()  # type: ignore[union-attr]
            assert trail[thing].count(place) == 1
            assert trail[thing][trail[thing].index(place) - 1] == item["target"], item["id"]


@pytest.mark.parametrize("name", PROMPT_FIELDS)
def test_prompts_have_alternating_examples_and_the_fields_of_their_task(name: str) -> None:
    prompt = json.loads((DATA / "tasks" / "prompts" / f"{name}.json").read_text("utf-8"))
    assert set(prompt) == {"system", "examples", "user"}
    assert set(re.findall(r"\{(\w+)\}", prompt["user"])) == PROMPT_FIELDS[name]
    assert prompt["examples"]
    for example in prompt["examples"]:
        assert set(example) == {"user", "assistant"}
        assert example["user"].startswith(prompt["user"].split("{")[0])


def test_prompt_examples_are_no_items_of_their_task() -> None:
    for name in ("parametric", "arithmetic"):
        prompt = json.loads((DATA / "tasks" / "prompts" / f"{name}.json").read_text("utf-8"))
        questions = {item["question"] for item in json_lines(f"tasks/{name}.jsonl")}
        for example in prompt["examples"]:
            assert example["user"].splitlines()[-1] not in questions


def test_prose_for_the_loss_is_long_and_its_paragraphs_differ() -> None:
    text = (DATA / "tasks" / "loss_en.txt").read_text("utf-8")
    found = sentences(text)
    # A word is a token at least: enough for 60 pieces of the 48 tokens of config/full.yaml.
    assert len(text.split()) >= 3000 > 60 * 48
    assert len(set(found)) == len(found)
