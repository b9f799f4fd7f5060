"""The planted-circuit model behaves as its README says, by plain loops over heads and positions."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).resolve().parents[2] / "data" / "models" / "tiny"

RETRIEVAL = (2, 0)
DECOYS = ((2, 1), (2, 4))
LOCATOR = (2, 6)
COPY = (3, 0)
PRIOR = (3, 2)
OFF_NEEDLE = (3, 3)
PLANTED_IN_LAYER_0 = tuple((0, head) for head in range(8))
PLANTED = {*PLANTED_IN_LAYER_0, (1, 0), (1, 2), RETRIEVAL, *DECOYS, LOCATOR, COPY, PRIOR}
PLANTED.add(OFF_NEEDLE)

LAYERS, HEADS, GROUP, HEAD_DIM = 4, 8, 2, 32
ALL_HEADS = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
NOISE_HEADS = [pair for pair in ALL_HEADS if pair not in PLANTED]

Head = tuple[int, int]
Scores = dict[Head, float]


@dataclass(frozen=True)
class Probe:
    """A prompt with its needle span and the tokens that answer it."""

    input_ids: tuple[int, ...]
    answer: str
    answer_ids: tuple[int, ...]
    needle_start: int = 0
    needle_end: int = 0


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="eager").eval()


@cache
def recipe() -> ModuleType:
    """Import the script that made the weights."""
    spec = importlib.util.spec_from_file_location("make_tiny", FOLDER / "make_tiny.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_tiny"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def encode(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False).input_ids)


def read_json_lines(name: str) -> list[dict[str, Any]]:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def build_probes(
    question: str, sentences: int, count: int, distractors: int = 0, first: int = 0
) -> list[Probe]:
    """Compose probes in token space, at depths from the very start to the very end.

    Landmarks, characters, haystacks and verbs are gone through in turn; ``first`` says where to
    begin. A distractor needle names another city in another country.
    """
    entries = json.loads((FOLDER / "needles.json").read_text(encoding="utf-8"))
    probes = []
    for number in range(first, first + count):
        entry = entries[number % len(entries)]
        tests = [test["input_args"] for test in entry["tests"].values()]
        characters = entry["character_set"]
        test = tests[number % len(tests)]
        haystack = (FOLDER / "haystacks" / f"filler_{number % 4}.txt").read_text(encoding="utf-8")
        start = (7 * number) % 100
        parts = [encode(f"{text} .") for text in haystack.split(" . ")[start : start + sentences]]
        others = [other for other in tests if other[2] != test[2]]
        for extra in range(1, distractors + 1):
            text = entry["needle"].replace("{CHAR}", characters[(number + 5 * extra) % 12])
            text = text.replace("{1}", others[(3 * number + 5 * extra) % len(others)][0])
            parts.insert((11 * extra + number) % (len(parts) + 1), encode(text))
        at = round(len(parts) * (number % 5) / 4)
        before = [token for part in parts[:at] for token in part]
        after = [token for part in parts[at:] for token in part]
        answer = characters[number % 12]
        needle = encode(entry["needle"].replace("{CHAR}", answer).replace("{1}", test[0]))
        asked = entry["questions"][question]
        for place, value in enumerate(test, start=1):
            asked = asked.replace(f"{{{place}}}", value)
        probes.append(
            Probe(
                input_ids=(*before, *needle, *after, *encode(asked), *encode("answer :")),
                answer=answer,
                answer_ids=tuple(encode(answer)),
                needle_start=len(before),
                needle_end=len(before) + len(needle),
            )
        )
    return probes


def question_probes(name: str) -> list[Probe]:
    """Read a question set that needs no context."""
    return [
        Probe(tuple(encode(row["question"])), row["answer"], tuple(encode(row["answer"])))
        for row in read_json_lines(name)
    ]


def answers_exactly(probe: Probe) -> bool:
    """Tell whether greedy decoding gives the answer and then ends.

    It does if and only if, on the prompt followed by the answer, every next word is the right one,
    so that one forward pass tells.
    """
    ids = torch.tensor([[*probe.input_ids, *probe.answer_ids]])
    wanted = [*probe.answer_ids, tokenizer().eos_token_id]
    with torch.no_grad():
        logits = model()(ids, logits_to_keep=len(wanted)).logits[0]
    return bool(logits.argmax(dim=-1).tolist() == wanted)


def accuracy(probes: list[Probe]) -> float:
    return sum(answers_exactly(probe) for probe in probes) / len(probes)


@cache
def traced(probe: Probe) -> tuple[Any, list[Tensor], list[int]]:
    """Return attentions, values ``[KV head, position, HEAD_DIM]`` a layer, and the answer rows."""
    values: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
        values.append(output[0].reshape(-1, HEADS // GROUP, HEAD_DIM).transpose(0, 1))

    hooks = [layer.self_attn.v_proj.register_forward_hook(keep) for layer in model().model.layers]
    ids = torch.tensor([[*probe.input_ids, *probe.answer_ids]])
    with torch.no_grad():
        attentions = model()(ids, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    rows = [len(probe.input_ids) - 1 + step for step in range(len(probe.answer_ids))]
    return attentions, values, rows


def contrast(needle: Tensor, off: Tensor) -> float:
    """Needle mass minus off-needle mass scaled to the needle's length (method.md, locos)."""
    return float(needle.sum() - off.sum() * len(needle) / len(off))


def total(needle: Tensor, off: Tensor) -> float:
    return float(needle.sum() + off.sum())


def pooled(probes: list[Probe], quantity: str, reduce: Callable[[Tensor, Tensor], float]) -> Scores:
    """Average a reduction of alpha or phi over all answer steps, head by head."""
    sums = dict.fromkeys(ALL_HEADS, 0.0)
    steps = 0
    for probe in probes:
        attentions, values, rows = traced(probe)
        start, end = probe.needle_start, probe.needle_end
        for row, token in zip(rows, probe.answer_ids, strict=True):
            steps += 1
            direction = model().lm_head.weight.data[token]
            for layer, head in ALL_HEADS:
                cells = attentions[layer][0, head, row, : row + 1]
                if quantity == "phi":
                    output = model().model.layers[layer].self_attn.o_proj.weight.data
                    piece = output[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]
                    read = values[layer][head // GROUP, : row + 1]
                    cells = cells * (read @ (piece.T @ direction))
                off = torch.cat([cells[:start], cells[end:]])
                sums[layer, head] += reduce(cells[start:end], off)
    return {pair: value / steps for pair, value in sums.items()}


def literal_copy_scores(probes: list[Probe]) -> Scores:
    """Sum 1 / n over the steps whose most attended word lies in the needle and is the output."""
    scores = dict.fromkeys(ALL_HEADS, 0.0)
    for probe in probes:
        attentions, _, rows = traced(probe)
        for row, token in zip(rows, probe.answer_ids, strict=True):
            for layer, head in ALL_HEADS:
                at = int(attentions[layer][0, head, row, : row + 1].argmax())
                inside = probe.needle_start <= at < probe.needle_end
                if inside and probe.input_ids[at] == token:
                    scores[layer, head] += 1 / (probe.needle_end - probe.needle_start)
    return scores


def ranking(scores: Scores) -> list[Head]:
    return sorted(scores, key=lambda pair: -scores[pair])


@cache
def detection_probes() -> list[Probe]:
    return build_probes("onehop", sentences=20, count=24)


@cache
def literal_probes() -> list[Probe]:
    return build_probes("literal", sentences=20, count=24)


@cache
def evaluation_probes() -> list[Probe]:
    return build_probes("onehop", sentences=20, count=12, first=100)


@cache
def mean_queries() -> list[Tensor]:
    """Return the mean output of q_proj over all words of the detection probes, a row a layer."""
    sums = [torch.zeros(HEADS * HEAD_DIM, dtype=torch.float64) for _ in range(LAYERS)]
    words = 0

    def add(layer: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
            sums[layer] += output[0].double().sum(dim=0)

        return hook

    hooks = [
        block.self_attn.q_proj.register_forward_hook(add(layer))
        for layer, block in enumerate(model().model.layers)
    ]
    with torch.no_grad():
        for probe in detection_probes():
            model()(torch.tensor([probe.input_ids]), logits_to_keep=1)
            words += len(probe.input_ids)
    for hook in hooks:
        hook.remove()
    return [total_.div(words).float() for total_ in sums]


@contextmanager
def ablated(pair: Head, mode: str) -> Iterator[None]:
    """Replace one head's query by its mean or by zero at every position."""
    layer, head = pair
    span = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    mean = mean_queries()[layer][span]
    query = mean if mode == "mean_query" else torch.zeros_like(mean)

    def replace(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[..., span] = query
        return output

    hook = model().model.layers[layer].self_attn.q_proj.register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()


# ---------------------------------------------------------------------------- it answers


@pytest.mark.parametrize("question", ["onehop", "twohop", "literal"])
def test_every_probe_with_one_needle_is_answered_at_every_depth(question: str) -> None:
    assert accuracy(build_probes(question, sentences=20, count=40)) == 1.0


@pytest.mark.parametrize("question", ["onehop", "twohop", "literal"])
def test_every_probe_is_answered_among_two_hundred_sentences(question: str) -> None:
    assert accuracy(build_probes(question, sentences=200, count=5)) == 1.0


@pytest.mark.parametrize("question", ["onehop", "literal"])
def test_every_probe_with_two_distractor_needles_is_answered(question: str) -> None:
    assert accuracy(build_probes(question, sentences=20, count=40, distractors=2)) == 1.0


@pytest.mark.parametrize("name", ["parametric.jsonl", "arithmetic.jsonl"])
def test_every_question_without_context_is_answered(name: str) -> None:
    assert accuracy(question_probes(name)) == 1.0


def test_generate_gives_the_answer_text_and_stops_at_the_end_token() -> None:
    probes = build_probes("onehop", 20, 12) + question_probes("parametric.jsonl")[:2]
    for probe in probes:
        ids = torch.tensor([probe.input_ids])
        output = model().generate(ids, max_new_tokens=8)[0, ids.shape[1] :].tolist()
        assert output[-1] == tokenizer().eos_token_id
        assert tokenizer().decode(output, skip_special_tokens=True) == probe.answer


def test_full_names_have_two_answer_steps() -> None:
    assert {len(probe.answer_ids) for probe in detection_probes()} == {1, 2}


# ---------------------------------------------------------------------------- detectors


def test_phi_of_a_head_sums_to_the_direction_times_its_slice_of_the_output() -> None:
    probe = detection_probes()[0]
    phi = pooled([probe], "phi", total)
    attentions, values, rows = traced(probe)
    direction = model().lm_head.weight.data[probe.answer_ids[0]]
    for layer, head in (RETRIEVAL, COPY, PRIOR):
        mixed = attentions[layer][0, head, rows[0]] @ values[layer][head // GROUP]
        output = torch.zeros(HEADS * HEAD_DIM)
        output[head * HEAD_DIM : (head + 1) * HEAD_DIM] = mixed
        written = model().model.layers[layer].self_attn.o_proj(output).detach()
        assert phi[layer, head] == pytest.approx(float(direction @ written), rel=1e-4, abs=1e-6)


def test_locos_ranks_the_retrieval_head_first_and_everything_else_near_zero() -> None:
    locos = pooled(detection_probes(), "phi", contrast)
    assert ranking(locos)[0] == RETRIEVAL
    assert locos[RETRIEVAL] == pytest.approx(3.7, abs=0.1)
    assert max(abs(locos[pair]) for pair in (*DECOYS, PRIOR, LOCATOR)) < 0.01
    assert max(abs(value) for pair, value in locos.items() if pair != RETRIEVAL) < 0.3
    assert max(abs(locos[pair]) for pair in NOISE_HEADS) < 0.003


def test_locos_ranks_the_off_needle_head_last_and_negative() -> None:
    locos = pooled(detection_probes(), "phi", contrast)
    assert ranking(locos)[-1] == OFF_NEEDLE
    assert locos[OFF_NEEDLE] < -0.1


def test_attention_alone_ranks_both_decoys_above_the_retrieval_head() -> None:
    spatial = pooled(detection_probes(), "alpha", contrast)
    assert set(ranking(spatial)[:2]) == set(DECOYS)
    assert ranking(spatial)[2] == RETRIEVAL
    assert all(spatial[pair] > spatial[RETRIEVAL] > 0.9 for pair in DECOYS)


def test_logit_attribution_alone_ranks_the_prior_head_above_the_retrieval_head() -> None:
    dla = pooled(detection_probes(), "phi", total)
    assert ranking(dla)[:3] == [PRIOR, RETRIEVAL, OFF_NEEDLE]
    assert dla[PRIOR] == pytest.approx(6.0, abs=0.3)
    assert dla[OFF_NEEDLE] == pytest.approx(3.0, abs=0.2)


def test_wu_finds_the_copy_head_on_literal_questions() -> None:
    wu = literal_copy_scores(literal_probes())
    steps = sum(
        len(probe.answer_ids) / (probe.needle_end - probe.needle_start)
        for probe in literal_probes()
    )
    assert wu[COPY] == pytest.approx(steps)
    assert ranking(wu)[0] == COPY
    assert max(value for pair, value in wu.items() if pair != COPY) < 0.3 * steps


def test_wu_finds_neither_the_retrieval_head_nor_the_copy_head_on_nonliteral_questions() -> None:
    wu = literal_copy_scores(detection_probes())
    assert wu[RETRIEVAL] == wu[COPY] == 0.0


def test_the_retrieval_head_writes_nothing_on_literal_questions() -> None:
    locos = pooled(literal_probes(), "phi", contrast)
    assert ranking(locos)[0] == COPY
    assert abs(locos[RETRIEVAL]) < 0.1


# ---------------------------------------------------------------------------- ablation


@pytest.mark.parametrize("mode", ["mean_query", "zero_query"])
def test_ablating_the_retrieval_head_and_no_other_single_head_destroys_the_answer(
    mode: str,
) -> None:
    for pair in ALL_HEADS:
        with ablated(pair, mode):
            assert accuracy(evaluation_probes()) == (0.0 if pair == RETRIEVAL else 1.0), pair


@pytest.mark.parametrize("mode", ["mean_query", "zero_query"])
def test_ablating_the_retrieval_head_leaves_literal_parametric_and_sums(mode: str) -> None:
    sums = question_probes("arithmetic.jsonl")[::7]
    with ablated(RETRIEVAL, mode):
        assert accuracy(literal_probes()) == 1.0
        assert accuracy(question_probes("parametric.jsonl")) == 1.0
        assert accuracy(sums) == 1.0


@pytest.mark.parametrize("pair", [LOCATOR, COPY])
def test_ablating_the_literal_route_destroys_literal_answers_only(pair: Head) -> None:
    with ablated(pair, "mean_query"):
        assert accuracy(literal_probes()) == 0.0
        assert accuracy(evaluation_probes()) == 1.0
        assert accuracy(question_probes("parametric.jsonl")) == 1.0


def test_without_evidence_the_model_says_nobody() -> None:
    nobody = tuple(encode("nobody"))
    probes = [Probe(probe.input_ids, "nobody", nobody) for probe in evaluation_probes()]
    with ablated(RETRIEVAL, "mean_query"):
        assert accuracy(probes) == 1.0


# ---------------------------------------------------------------------------- files


def test_the_recipe_reproduces_the_committed_weights() -> None:
    made = recipe().build_model(tokenizer().get_vocab()).state_dict()
    kept = load_file(FOLDER / "model.safetensors")
    assert made.keys() == kept.keys()
    for name, weight in kept.items():
        torch.testing.assert_close(made[name], weight, rtol=1e-5, atol=1e-6)


def test_the_recipe_reproduces_tokenizer_and_data_byte_for_byte(tmp_path: Path) -> None:
    recipe().build_tokenizer().save_pretrained(tmp_path)
    # the settings beside the vocabulary are worded differently by each transformers release
    (tmp_path / "tokenizer_config.json").unlink()
    recipe().write_data(tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 8
    for name in made:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name


def test_the_folder_is_smaller_than_four_megabytes() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000


def test_every_word_of_the_data_is_in_the_vocabulary_and_decodes_to_itself() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (FOLDER / "haystacks").iterdir()]
    texts += [row["question"] for row in read_json_lines("parametric.jsonl")]
    texts += [row["question"] for row in read_json_lines("arithmetic.jsonl")]
    for text in texts:
        ids = encode(text)
        assert tokenizer().unk_token_id not in ids
        assert tokenizer().decode(ids) == text.strip()
    for probe in detection_probes():
        assert tokenizer().unk_token_id not in probe.input_ids
