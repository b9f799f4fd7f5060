"""Few-shot chat prompts: data files, rendered through chat templates of several kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from workflow_scripts.common.errors import UserError
from workflow_scripts.common.layout import probes_spec
from workflow_scripts.probes.build import build_probes
from workflow_scripts.probes.chat import ChatPrompt, read_chat_prompt
from workflow_scripts.probes.prompts import Encoder, chat_wrapper
from workflow_scripts.probes.sources import check_sources, refuse_long_questions

PROMPT = {
    "system": "Be brief.",
    "examples": [{"user": "Say: 1 and 1?", "assistant": "2"}, {"user": "4?", "assistant": "3"}],
    "user": "Say: {question}",
}
CHAT = ChatPrompt("Be brief.", (("Say: 1 and 1?", "2"), ("4?", "3")), "Say: {question}")

ANY_ROLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
)
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endif %}{% endfor %}<assistant>"
)
FOLDED = (
    "<user>Be brief.\n\nSay: 1 and 1?</user><assistant>2</assistant><user>4?</user>"
    "<assistant>3</assistant><user>Say: 7 and 2?</user><assistant>"
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer, which spells every text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet))
    made = PreTrainedTokenizerFast(tokenizer_object=inner)
    made.chat_template = template
    return made


def written(tmp_path: Path, found: Any) -> Path:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


def row_with(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    needles = tmp_path / "qa.jsonl"
    entry = {"id": "a", "question": "7 and 2?", "answer": "9", "aliases": []}
    needles.write_text(json.dumps(entry) + "\n", encoding="utf-8")
    prompt = str(written(tmp_path, PROMPT))
    return {"format": "qa", "needles": str(needles), "prompt": prompt} | changes


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            ANY_ROLE,
            "<system>Be brief.</system><user>Say: 1 and 1?</user><assistant>2</assistant>"
            "<user>4?</user><assistant>3</assistant><user>Say: 7 and 2?</user><assistant>",
        ),
        (NO_SYSTEM, FOLDED),
        (DROPS_SYSTEM, FOLDED),
        (None, "Be brief.\n\nSay: 1 and 1?\n2\n\n4?\n3\n\nSay: 7 and 2?\n"),
    ],
)
def test_examples_and_system_text_stand_before_the_question(
    tmp_path: Path, template: str | None, expected: str
) -> None:
    row = row_with(tmp_path)
    encoded = tokenizer(template)
    probe = build_probes(encoded, "sums", row, row["needles"], []).row(0, named=True)
    assert encoded.decode(probe["input_ids"]) == expected
    asked = probe["input_ids"][probe["question_start"] : probe["question_end"]]
    assert encoded.decode(asked).strip() == "7 and 2?"


def test_a_prompt_without_examples_and_system_text_is_the_plain_wrapper() -> None:
    encoder = Encoder(tokenizer(ANY_ROLE), "m")
    assert chat_wrapper(encoder, ChatPrompt(None, (), "{question}")) == chat_wrapper(encoder)


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    assert read_chat_prompt(written(tmp_path, PROMPT)) == CHAT


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "is no JSON object"),
        (PROMPT | {"usr": ""}, "unknown key usr"),
        (PROMPT | {"user": None}, "user is missing"),
        (PROMPT | {"system": 3}, "system is missing or no text"),
        (PROMPT | {"examples": {}}, "examples is no list"),
        (PROMPT | {"examples": [{"user": "a"}]}, "example 1: assistant is missing"),
        (PROMPT | {"user": "no field"}, r"user: holds \{question\} 0 times"),
    ],
)
def test_a_defect_of_a_prompt_file_is_named(tmp_path: Path, found: Any, message: str) -> None:
    row = row_with(tmp_path)
    written(tmp_path, found)
    with pytest.raises(UserError, match=message) as raised:
        check_sources(row, row["needles"], [])
    assert "prompt.json" in str(raised.value) and "\n" not in str(raised.value)


def test_template_and_prompt_together_are_refused(tmp_path: Path) -> None:
    row = row_with(tmp_path, template="{question}")
    with pytest.raises(UserError, match=r"probes\.sums\.prompt: stands beside template"):
        check_sources(row, row["needles"], [], "sums")


def test_the_key_holds_the_prompts_content_and_not_its_path(tmp_path: Path) -> None:
    def spec(row: dict[str, Any]) -> dict[str, Any]:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        models = {"m": {"source": {"folder": str(folder)}}}
        return probes_spec({"models": models, "probes": {"sums": row}, "seed": 1}, "m", "sums")

    row = row_with(tmp_path)
    first = spec(row)
    moved = tmp_path / "moved.json"
    moved.write_bytes(Path(row["prompt"]).read_bytes())
    assert spec(row | {"prompt": str(moved)}) == first
    moved.write_text(json.dumps(PROMPT | {"system": None}), encoding="utf-8")
    assert spec(row | {"prompt": str(moved)}) != first
    assert "prompt" not in spec({key: row[key] for key in ("format", "needles")})


def test_a_question_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    row = row_with(tmp_path, max_new_tokens=3, max_thinking_tokens=2)
    probes = build_probes(tokenizer(None), "sums", row, row["needles"], [])
    length = len("Be brief.\n\nSay: 1 and 1?\n2\n\n4?\n3\n\nSay: 7 and 2?\n")
    refuse_long_questions(probes, row, length + 5, "probes.sums", "m")
    with pytest.raises(UserError, match=rf"probes\.sums: the {length} tokens of probe a and the 5"):
        refuse_long_questions(probes, row, length + 4, "probes.sums", "m")
