"""Prompts in token space, over the kinds of tokenizer and chat template that models come with."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, PreTrainedTokenizerFast

from workflow_scripts.common.artifacts import read_table
from workflow_scripts.common.errors import UserError
from workflow_scripts.patching.patch import choose_pairs
from workflow_scripts.probes import tokenize_probes
from workflow_scripts.probes.build import SCHEMA, build_probes
from workflow_scripts.probes.prompts import Encoder, chat_wrapper
from workflow_scripts.probes.sources import check_sources, refuse_too_long

SENTENCES = (
    "A slow cart crossed the bridge. Who left the gate open? The miller said nothing, as usual. "
    "Rain fell on the roof all day! Two ducks swam past 3.5 boats. Nobody came.\n\n"
    "Later the baker lit his oven. Bread smells best at dawn.\nThe street woke slowly. "
)
HAYSTACKS = {
    "river": SENTENCES * 9,
    "street": "The lamps were lit early. Dogs barked. " + SENTENCES * 9,
}
CHINESE = (
    "雨下了一整天。谁没有关门？磨坊主什么也没说。鸭子游过小船！\n\n后来面包师点燃了炉子。没有人来。"
)
NAMES = ["Anna", "Bruno", "Clara Berg", "David"]
ENTRIES = [
    {
        "id": entry_id,
        "needle": needle,
        "questions": {"onehop": "Which person was in {2}?", "literal": "Who is near {1}?"},
        "character_set": NAMES,
        "tests": {
            "T01": {"input_args": ["the Kiasma", "Helsinki"]},
            "T02": {"input_args": ["the long wall by the northern Zwinger", "Dresden"]},
        },
        "task_template": "Read this.\n\n{haystack}\n\nAnswer in a word.\nQuestion: {question}\nSo:",
    }
    for entry_id, needle in (("L", "Actually, {CHAR} lives next to {1}."), ("W", "{CHAR} saw {1}."))
]
CHINESE_ENTRY = {
    "id": "Z",
    "needle": "其实，{CHAR}就住在{1}旁边。",
    "questions": {"onehop": "谁去过{2}？"},
    "character_set": ["林涛", "陈静"],
    "tests": {"T01": {"input_args": ["博物馆", "赫尔辛基"]}},
    "task_template": "请读。\n\n{haystack}\n\n问题：{question}",
}

SPECIAL = [
    *("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "<think>"),
]
CORPUS = [*HAYSTACKS.values(), CHINESE * 3, *(json.dumps(e, ensure_ascii=False) for e in ENTRIES)]


def wrap(backend: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", **options
    )


def add_bos(backend: Tokenizer) -> None:
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[bos]
    )


@cache
def byte_level(bos: bool = False, trim: bool = False) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    # Without a pattern between them, ".", newlines and words may merge as in Qwen's vocabulary.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_pattern(), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if trim:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    if bos:
        add_bos(backend)
    return wrap(backend, bos_token="<s>") if bos else wrap(backend)


def _pattern() -> Any:
    return Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@cache
def sentencepiece(scheme: str, bos: bool = False) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme == "legacy":
        # Llama 2: the normalizer puts the mark before each text.
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split("▁", "merged_with_next"),
                pre_tokenizers.Punctuation("contiguous"),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(prepend_scheme=scheme),
                pre_tokenizers.Punctuation("contiguous"),
            ]
        )
    strip = scheme != "never"
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if strip else []),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if bos:
        add_bos(backend)
    return wrap(backend, bos_token="<s>") if bos else wrap(backend)


@cache
def word_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    words = [*HAYSTACKS.values(), *(str(value) for entry in ENTRIES for value in _values(entry))]
    backend.train_from_iterator([*words, "law feed old that"], trainer)
    return wrap(backend)


def _values(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    children = node.values() if isinstance(node, dict) else node
    return [text for child in children for text in _values(child)]


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "byte-level, BOS": lambda: byte_level(bos=True),
    "byte-level, trimmed offsets": lambda: byte_level(trim=True),
    "sentencepiece, first": lambda: sentencepiece("first", bos=True),
    "sentencepiece, always": lambda: sentencepiece("always"),
    "sentencepiece, never": lambda: sentencepiece("never", bos=True),
    "sentencepiece, legacy": lambda: sentencepiece("legacy", bos=True),
    "word-level": word_level,
}

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\n"
    "You help.<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n{{ date_string }}<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN_3 = CHATML + (
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}"
)
TWICE = "{{ bos_token }}{{ bos_token }}{{ messages[0]['content'] }}"
TEMPLATES = {"ChatML": CHATML, "Llama 3": LLAMA_3, "Gemma": GEMMA, "Qwen 3": QWEN_3, "none": None}
TEMPLATES["Llama 2"] = LLAMA_2


@pytest.fixture
def with_template() -> Any:
    """Set a chat template on a shared tokenizer for the length of a test."""
    changed: list[PreTrainedTokenizerFast] = []

    def use(tokenizer: PreTrainedTokenizerFast, template: str | None) -> PreTrainedTokenizerFast:
        tokenizer.chat_template = template
        changed.append(tokenizer)
        return tokenizer

    yield use
    for tokenizer in changed:
        tokenizer.chat_template = None


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, list[Path]]:
    needles = tmp_path / "needles.json"
    needles.write_text(json.dumps(ENTRIES), encoding="utf-8")
    paths = [tmp_path / f"{name}.txt" for name in HAYSTACKS]
    for path in paths:
        path.write_text(HAYSTACKS[path.stem], encoding="utf-8")
    return needles, paths


ROW = {
    "format": "nolima",
    "questions": ["onehop", "literal"],
    "split": "all",
    "context_lengths": [300, 321],
    "depths": [0, 30, 65, 100],
    "max_new_tokens": 7,
    "seed": 5,
}


def squeeze(text: str) -> str:
    return "".join(text.split())


def part(tokenizer: Any, row: dict[str, Any], name: str) -> str:
    return str(tokenizer.decode(row["input_ids"][row[f"{name}_start"] : row[f"{name}_end"]]))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_probe_has_the_length_asked_for_and_spans_that_decode_to_their_texts(
    kind: str, template: str, files: Any, with_template: Any
) -> None:
    tokenizer = with_template(TOKENIZERS[kind](), TEMPLATES[template])
    if TEMPLATES[template] and "bos_token" in TEMPLATES[template] and tokenizer.bos_token is None:
        tokenizer.chat_template = TEMPLATES[template].replace("bos_token", "''")
    probes = build_probes(tokenizer, "x", ROW, *files)
    assert len(probes) == 4 * 2 * 2 * 2 * 4
    assert dict(probes.schema) == SCHEMA
    entries = {entry["id"]: entry for entry in ENTRIES}
    for row in probes.to_dicts():
        entry_id, test = row["needle_id"].split("_")
        arguments = entries[entry_id]["tests"][test]["input_args"]
        sentence = entries[entry_id]["needle"].replace("{CHAR}", row["answer"])
        sentence = sentence.replace("{1}", arguments[0])
        assert len(row["input_ids"]) == row["context_length"]
        assert squeeze(part(tokenizer, row, "needle")) == squeeze(sentence)
        assert squeeze(part(tokenizer, row, "question")) == squeeze(row["question"])
        assert (row["real_needle_start"], row["real_needle_end"]) == (
            row["needle_start"],
            row["needle_end"],
        )
        text = HAYSTACKS[row["haystack_id"]]
        before = row["input_ids"][row["haystack_start"] : row["needle_start"]]
        after = row["input_ids"][row["needle_end"] : row["haystack_end"]]
        without = squeeze(tokenizer.decode(before)) + squeeze(tokenizer.decode(after))
        assert squeeze(text).startswith(without)
        assert (before == []) or squeeze(tokenizer.decode(before))[-1] in ".?!"
        whole = squeeze(tokenizer.decode(row["input_ids"]))
        assert (
            "Readthis." in whole and "Answerinaword.Question:" + squeeze(row["question"]) in whole
        )
        assert set(row["other_answers"]) == set(NAMES) - {row["answer"]}
        assert (row["max_new_tokens"], row["seed"]) == (7, 5)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_probes_of_equal_haystack_length_and_depth_share_all_ids_up_to_the_needle(
    kind: str, files: Any
) -> None:
    probes = build_probes(TOKENIZERS[kind](), "x", ROW, *files)
    groups = probes.group_by("haystack_id", "context_length", "depth_percent").agg(
        pl.col("input_ids"), pl.col("needle_start"), pl.col("needle_end")
    )
    assert len(groups) == 2 * 2 * 4
    for group in groups.to_dicts():
        assert len(group["input_ids"]) == 8
        assert len(set(group["needle_start"])) == 1
        start = group["needle_start"][0]
        assert len({tuple(ids[:start]) for ids in group["input_ids"]}) == 1
    # The haystack is used from its beginning: a deeper prefix begins with every shallower one.
    for name in HAYSTACKS:
        prefixes = [
            row["input_ids"][: row["needle_start"]]
            for row in probes.filter(haystack_id=name).sort("needle_start").to_dicts()
        ]
        assert all(longest[: len(p)] == p for p in prefixes for longest in prefixes[-1:])


def test_a_needle_stands_at_the_last_sentence_end_before_its_depth(files: Any) -> None:
    tokenizer = byte_level()
    probes = build_probes(tokenizer, "x", {**ROW, "depths": list(range(0, 101, 4))}, *files)
    fixed = [
        300
        - (row["haystack_end"] - row["haystack_start"])
        + row["needle_end"]
        - row["needle_start"]
        for row in probes.filter(context_length=300).to_dicts()
    ]
    # The room a depth is a share of: what the longest needle and question leave. White space that
    # no sampled place asked for may take up to two tokens more.
    room = 300 - max(fixed)
    for row in probes.filter(context_length=300).to_dicts():
        target = int(row["depth_percent"] / 100 * room)
        ids = tokenizer(HAYSTACKS[row["haystack_id"]].strip(), add_special_tokens=False)[
            "input_ids"
        ]
        pieces = [tokenizer.decode([token]) for token in ids]
        ends = [
            i + 1
            for i, piece in enumerate(pieces)
            if piece.strip()[-1:] in set(".?!") and not "".join(pieces[i + 1 : i + 2])[:1].isdigit()
        ]
        expected = max([0, *(end for end in ends if end <= target)])
        slack = max([0, *(end for end in ends if end <= target - 2)])
        assert row["needle_start"] - row["haystack_start"] in (expected, slack)


def test_white_space_around_a_needle_is_that_between_two_sentences(files: Any) -> None:
    for kind in ("byte-level", "byte-level, trimmed offsets", "sentencepiece, never"):
        tokenizer = TOKENIZERS[kind]()
        row = {**ROW, "depths": list(range(0, 101, 4)), "questions": ["onehop"]}
        for probe in build_probes(tokenizer, "x", row, *files).to_dicts():
            text = part(tokenizer, probe, "haystack")
            needle = part(tokenizer, probe, "needle").strip()
            before, after = text.split(needle)
            assert before == "" or before.endswith((". ", "? ", "! ", ".\n", ".\n\n"))
            assert after == "" or after.startswith((" ", "\n"))
            assert "  " not in text


def test_chinese_needles_stand_between_sentences_without_a_space(tmp_path: Path) -> None:
    needles, haystack = tmp_path / "z.json", tmp_path / "z.txt"
    needles.write_text(json.dumps([CHINESE_ENTRY]), encoding="utf-8")
    haystack.write_text(CHINESE * 30, encoding="utf-8")
    row = {**ROW, "questions": ["onehop"], "depths": list(range(0, 101, 5))}
    for tokenizer in (byte_level(), sentencepiece("never")):
        for probe in build_probes(tokenizer, "z", row, needles, [haystack]).to_dicts():
            needle = f"其实，{probe['answer']}就住在博物馆旁边。"
            assert part(tokenizer, probe, "needle").strip() == needle
            text = part(tokenizer, probe, "haystack")
            before, after = text.split(needle)
            assert before == "" or before[-1] in "。？！\n"
            assert not after.startswith(" ")


def test_a_removed_needle_leaves_a_row_of_the_same_name_length_question_and_spans(
    files: Any,
) -> None:
    tokenizer = byte_level()
    present = build_probes(tokenizer, "x", ROW, *files)
    removed = build_probes(tokenizer, "y", {**ROW, "needle": "removed"}, *files)
    paired = present.join(removed, on="probe_id", validate="1:1", suffix="_removed")
    assert len(paired) == len(present) == len(removed)
    spans = ("needle", "real_needle", "haystack", "question")
    columns = [f"{span}_{end}" for span in spans for end in ("start", "end")]
    for row in paired.to_dicts():
        assert len(row["input_ids_removed"]) == row["context_length"]
        for name in ("answer", *columns):
            assert row[f"{name}_removed"] == row[name]
        needle = slice(row["needle_start"], row["needle_end"])
        assert row["input_ids_removed"][needle] != row["input_ids"][needle]
        assert row["input_ids_removed"][: needle.start] == row["input_ids"][: needle.start]
        text = tokenizer.decode(
            row["input_ids_removed"][row["haystack_start_removed"] : row["haystack_end_removed"]]
        )
        assert HAYSTACKS[row["haystack_id"]].startswith(text)


def test_gold_answers_are_forced_and_patched_as_the_tokens_that_go_on_from_the_prompt(
    files: Any, with_template: Any
) -> None:
    tokenizer = byte_level()
    assert build_probes(tokenizer, "x", ROW, *files)["forced_ids"].is_null().all()
    for template, space in ((None, " "), (CHATML, "")):
        with_template(tokenizer, template)
        probes = build_probes(tokenizer, "x", {**ROW, "answer": "gold"}, *files)
        for probe in probes.to_dicts():
            wanted = tokenizer.encode(space + probe["answer"], add_special_tokens=False)
            assert probe["forced_ids"] == wanted
            assert probe["max_new_tokens"] == len(wanted)
        pairs = dict(choose_pairs(Encoder(tokenizer, "x"), probes, "filler", 2, 0))
        assert len(pairs) == 2
        forced = dict(probes.select("probe_id", "forced_ids").iter_rows())
        assert {name: pair.answer for name, pair in pairs.items()} == {n: forced[n] for n in pairs}


def test_niah_real_needle_span_decodes_to_its_part_of_the_needle(
    tmp_path: Path, files: Any
) -> None:
    lines = [
        {"needle": "The law is: feed the old ducks.", "question": "What is the law?"},
        {"needle": "The baker said that dawn is best.", "question": "What is best?"},
    ]
    reals = ["feed the old ducks", "dawn"]
    path = tmp_path / "n.jsonl"
    path.write_text(
        "\n".join(json.dumps({**x, "real_needle": r}) for x, r in zip(lines, reals, strict=True))
    )
    row = {"format": "niah", "context_lengths": [300], "depths": [0, 50]}
    for kind in (
        "byte-level",
        "byte-level, trimmed offsets",
        "sentencepiece, legacy",
        "word-level",
    ):
        tokenizer = TOKENIZERS[kind]()
        for probe in build_probes(tokenizer, "n", row, path, files[1]).to_dicts():
            assert part(tokenizer, probe, "real_needle").strip() == probe["answer"]
            assert probe["needle_start"] < probe["real_needle_start"]
            assert probe["real_needle_end"] < probe["needle_end"]
            assert probe["haystack_id"] == {"N01": "river", "N02": "street"}[probe["needle_id"]]


def test_qa_probes_are_the_wrapped_question_alone(tmp_path: Path, with_template: Any) -> None:
    tokenizer = with_template(byte_level(), CHATML)
    path = tmp_path / "q.jsonl"
    line = {
        "id": "koeln",
        "question": "The gate is where?",
        "answer": "Köln",
        "aliases": ["Cologne"],
    }
    path.write_text(json.dumps(line), encoding="utf-8")
    row = {"format": "qa", "template": "In a word: {question} Answer:", "max_new_tokens": 9}
    (probe,) = build_probes(tokenizer, "q", row, path, []).to_dicts()
    assert tokenizer.decode(probe["input_ids"]) == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nIn a word: The gate is where? "
        "Answer:<|im_end|>\n<|im_start|>assistant\n"
    )
    assert part(tokenizer, probe, "question") == " The gate is where?"
    assert (probe["answer"], probe["aliases"], probe["other_answers"]) == ("Köln", ["Cologne"], [])
    for name in ("needle_start", "haystack_start", "haystack_id", "depth_percent"):
        assert probe[name] is None
    assert probe["context_length"] == len(probe["input_ids"])


@pytest.mark.parametrize("template", [CHATML, GEMMA, LLAMA_3, QWEN_3])
def test_prefix_and_suffix_are_the_chat_template_rendered_around_the_text(
    template: str, with_template: Any
) -> None:
    tokenizer = with_template(byte_level(bos=True), template)
    wrapper = chat_wrapper(Encoder(tokenizer, "m"))
    message = [{"role": "user", "content": "Rain fell."}]
    dated = template.replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
    expected = tokenizer.apply_chat_template(
        message,
        chat_template=dated,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    inner = tokenizer("Rain fell.", add_special_tokens=False)["input_ids"]
    text = tokenizer.decode([*wrapper.prefix_ids, *inner, *wrapper.suffix_ids])
    assert text.removeprefix("<s>") == expected.removeprefix("<s>")
    assert ("<think>\n\n</think>" in text) == (template == QWEN_3)


@pytest.mark.parametrize(
    ("adds", "template", "has_bos"),
    [
        (True, None, True),
        (True, CHATML, True),
        (True, GEMMA, True),
        (True, LLAMA_3, True),
        (True, TWICE, True),
        (False, None, False),
        (False, CHATML, False),
    ],
)
def test_the_bos_is_there_exactly_once_where_tokenizer_or_template_want_one(
    adds: bool, template: str | None, has_bos: bool, with_template: Any
) -> None:
    tokenizer = with_template(byte_level(bos=adds), template)
    wrapper = chat_wrapper(Encoder(tokenizer, "m"))
    bos = tokenizer.convert_tokens_to_ids("<s>")
    assert wrapper.has_bos == has_bos
    assert wrapper.prefix_ids[:1] == ((bos,) if has_bos else wrapper.prefix_ids[:1])
    assert [*wrapper.prefix_ids, *wrapper.suffix_ids].count(bos) == int(has_bos)


def test_a_bos_that_only_the_template_writes_is_kept(with_template: Any) -> None:
    tokenizer = with_template(byte_level(), GEMMA)
    tokenizer.bos_token = "<s>"
    wrapper = chat_wrapper(Encoder(tokenizer, "m"))
    tokenizer.bos_token = None
    assert wrapper.has_bos
    assert wrapper.prefix_ids.count(tokenizer.convert_tokens_to_ids("<s>")) == 1


def test_a_template_that_writes_the_date_gives_the_same_ids_every_day(with_template: Any) -> None:
    template = "{{ strftime_now('%Y-%m-%d') }} {{ messages[0]['content'] }}"
    tokenizer = with_template(byte_level(), template)
    wrapper = chat_wrapper(Encoder(tokenizer, "m"))
    assert tokenizer.decode(wrapper.prefix_ids) == "2024-07-26"
    assert wrapper.opens_space


@pytest.mark.parametrize(
    ("template", "defect"),
    [
        ("{{ raise_exception('no users') }}", r"fails on one user message \(no users\)"),
        ("{{ messages[0]['content'] }}{{ messages[0]['content'] }}", "2 times"),
        ("Hello", "0 times"),
    ],
)
def test_a_template_that_cannot_hold_a_user_message_is_refused(
    template: str, defect: str, with_template: Any
) -> None:
    with pytest.raises(UserError, match=f"model m: .*{defect}"):
        chat_wrapper(Encoder(with_template(byte_level(), template), "m"))


def test_a_context_too_short_names_the_dataset_and_the_length_needed(files: Any) -> None:
    row = {**ROW, "context_lengths": [45]}
    with pytest.raises(UserError, match=r"probes\.x\.context_lengths: 45 tokens") as error:
        build_probes(byte_level(), "x", row, *files)
    needed = int(str(error.value).split("at least ")[1].split()[0])
    assert needed > 45
    longest = {**ROW, "context_lengths": [needed + 40], "depths": [100]}
    assert len(build_probes(byte_level(), "x", longest, *files)) == 16


def test_a_haystack_too_short_names_the_file_and_both_lengths(files: Any) -> None:
    tokenizer = byte_level()
    row = {**ROW, "context_lengths": [5000]}
    with pytest.raises(UserError) as error:
        build_probes(tokenizer, "x", row, *files)
    name = str(error.value).split(":")[0]
    tokens = len(tokenizer(HAYSTACKS[Path(name).stem].strip())["input_ids"])
    assert Path(name) in files[1]
    assert f"{tokens} tokens are too few, context length 5000 needs " in str(error.value)


def test_a_needle_that_the_tokenizer_cannot_spell_is_refused(tmp_path: Path, files: Any) -> None:
    path = tmp_path / "n.json"
    path.write_text(json.dumps([{**ENTRIES[0], "needle": "Actually, {CHAR} zigzags to {1}."}]))
    with pytest.raises(UserError, match="turns the needle .* into '.*<unk>"):
        build_probes(word_level(), "x", ROW, path, files[1])


def test_two_question_kinds_of_one_grid_get_the_same_places_and_names(files: Any) -> None:
    columns = ["needle_id", "haystack_id", "context_length", "depth_percent", "answer"]
    row = {**ROW, "split": "evaluate", "size": 11}
    one, other = (
        build_probes(byte_level(), kind, {**row, "questions": [kind]}, *files).select(columns)
        for kind in ("onehop", "literal")
    )
    assert one.sort(columns).equals(other.sort(columns))


def test_detect_and_evaluate_datasets_share_no_name_and_no_pair_whatever_their_seeds(
    files: Any,
) -> None:
    detect, evaluate = (
        build_probes(byte_level(), split, {**ROW, "split": split, "seed": seed}, *files)
        for split, seed in (("detect", 1), ("evaluate", 2))
    )
    assert not set(detect["answer"]) & set(evaluate["answer"])
    pair = ["needle_id", "haystack_id"]
    assert not set(detect.select(pair).rows()) & set(evaluate.select(pair).rows())


def test_the_table_is_sorted_as_it_runs_named_uniquely_and_the_same_each_time(files: Any) -> None:
    row = {**ROW, "size": 50}
    one, two = (build_probes(byte_level(), "x", row, *files) for _ in range(2))
    assert one.equals(two)
    assert one["probe_id"].is_unique().all()
    order = ["haystack_id", "context_length", "depth_percent", "needle_id"]
    assert one.select(order).rows() == sorted(one.select(order).rows())


def test_the_script_writes_the_table_with_the_spec_it_was_made_for(
    tmp_path: Path, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_probes, "load_tokenizer", lambda source: byte_level())
    monkeypatch.setattr(tokenize_probes, "load_config", lambda source: LlamaConfig())
    row = {name: value for name, value in ROW.items() if name != "seed"}
    row |= {"max_thinking_tokens": 0}
    spec = {"model": {"folder": "m"}, "dataset": "x", "probes": row, "seed": 11}
    output = tmp_path / "out" / "x.parquet"
    tokenize_probes.main(
        SimpleNamespace(
            params=SimpleNamespace(spec=json.dumps(spec)),
            config={
                "models": {"tiny": {"source": {"folder": "m"}, "trust_remote_code": False}},
                "probes": {"x": row},
            },
            input=SimpleNamespace(needles=str(files[0]), haystacks=[str(p) for p in files[1]]),
            wildcards=SimpleNamespace(model="tiny"),
            output=[str(output)],
        )
    )
    table = read_table(output, kind="probes", spec=spec)
    assert dict(table.schema) == SCHEMA
    assert table["seed"].unique().to_list() == [11]


TEXT_ROW = {"format": "text", "context_lengths": [9], "seed": 3}


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text(f"\n{SENTENCES * 4}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_of_a_text_follow_each_other_each_behind_the_bos(kind: str, text_file: Path) -> None:
    tokenizer = TOKENIZERS[kind]()
    probes = build_probes(tokenizer, "x", TEXT_ROW, text_file, [])
    assert dict(probes.schema) == SCHEMA
    whole = tokenizer((SENTENCES * 4).strip())["input_ids"]
    bos = whole[:1] if whole[0] == tokenizer.bos_token_id else []
    pieces = probes["input_ids"].to_list()
    assert {len(piece) for piece in pieces} == {9}
    assert all(piece[: len(bos)] == bos for piece in pieces)
    joined = [token for piece in pieces for token in piece[len(bos) :]]
    assert joined == whole[len(bos) :][: len(joined)]
    assert 0 <= len(whole) - len(bos) - len(joined) < 9
    assert set(probes["has_bos"]) == {bool(bos)}


def test_a_text_has_no_chat_around_it(text_file: Path, with_template: Any) -> None:
    plain = build_probes(byte_level(), "x", TEXT_ROW, text_file, [])
    chat = build_probes(with_template(byte_level(), CHATML), "x", TEXT_ROW, text_file, [])
    assert chat.equals(plain)


def test_a_size_samples_pieces_of_a_text_by_its_seed(text_file: Path) -> None:
    def ids(**changes: Any) -> list[str]:
        return build_probes(byte_level(), "x", TEXT_ROW | changes, text_file, [])[
            "probe_id"
        ].to_list()

    every = ids()
    assert len(every) == len(set(every)) > 12
    assert len(ids(size=12)) == 12 and set(ids(size=12)) < set(every)
    assert ids(size=12) == ids(size=12) != ids(size=12, seed=4)
    with pytest.raises(UserError, match=rf"x.size: 999 pieces asked for, but .* {len(every)};"):
        ids(size=999)


@pytest.mark.parametrize(
    ("changes", "defect"),
    [
        ({"context_lengths": []}, "probes.x.context_lengths: names none"),
        ({"context_lengths": [1]}, "probes.x.context_lengths: 1 tokens are too few; use 2"),
        ({"depths": [0]}, "probes.x.depths: means nothing to format text"),
        ({"haystacks": "data"}, "probes.x.haystacks: means nothing"),
        ({"prompt": "p.json"}, "probes.x.prompt: means nothing"),
        ({"split": "detect"}, "probes.x.split: means nothing"),
        ({"needle": "removed"}, "probes.x.needle: means nothing"),
    ],
)
def test_a_text_row_that_cannot_be_meant_is_refused(
    text_file: Path, changes: dict[str, Any], defect: str
) -> None:
    with pytest.raises(UserError) as error:
        check_sources(TEXT_ROW | changes, text_file, [], "x")
    assert str(error.value).startswith(defect)


def test_an_empty_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(" \n", encoding="utf-8")
    with pytest.raises(UserError, match="empty.txt: holds no text"):
        check_sources(TEXT_ROW, path, [], "x")


def test_a_text_needs_positions_for_itself_alone(text_file: Path) -> None:
    row = TEXT_ROW | {"max_new_tokens": 50, "max_thinking_tokens": 0}
    refuse_too_long(row, 9, "probes.x", "m")
    with pytest.raises(UserError, match="9 and the 0 tokens of an answer exceed the 8"):
        refuse_too_long(row, 8, "probes.x", "m")
