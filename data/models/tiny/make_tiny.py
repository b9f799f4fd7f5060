"""Make the planted-circuit model and the small data sets that go with it.

Every weight is set by hand, so it is known which head retrieves, which ones only look as if they
did, and where the facts are stored. ``README.md`` beside this file describes the circuit.

Run ``python make_tiny.py [folder]``; the default folder is the one this file lies in.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 42

# ---------------------------------------------------------------------------- words

SINGLE_NAMES = ("Anna", "Bruno", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")
FULL_NAMES = (("Ivan", "Holm"), ("Julia", "Berg"), ("Karl", "Lund"), ("Linda", "Dahl"))
FIRST_NAMES = tuple(first for first, _ in FULL_NAMES)
SURNAMES = tuple(last for _, last in FULL_NAMES)
NAME_WORDS = SINGLE_NAMES + FIRST_NAMES + SURNAMES
CHARACTERS = SINGLE_NAMES + tuple(f"{first} {last}" for first, last in FULL_NAMES)

# country -> city -> landmarks: real places, each landmark one word
WORLD: dict[str, dict[str, tuple[str, str]]] = {
    "Finland": {"Helsinki": ("Kiasma", "Ateneum"), "Tampere": ("Näsinneula", "Särkänniemi")},
    "Germany": {"Berlin": ("Reichstag", "Berghain"), "Dresden": ("Zwinger", "Semperoper")},
    "Spain": {"Madrid": ("Prado", "Retiro"), "Barcelona": ("Liceu", "Tibidabo")},
    "Italy": {"Rome": ("Colosseum", "Farnesina"), "Milan": ("Scala", "Brera")},
}
CITY_COUNTRY = {city: country for country, cities in WORLD.items() for city in cities}
LANDMARK_CITY = {
    landmark: city
    for cities in WORLD.values()
    for city, landmarks in cities.items()
    for landmark in landmarks
}
CITIES = tuple(CITY_COUNTRY)
COUNTRIES = tuple(WORLD)
LANDMARKS = tuple(LANDMARK_CITY)

NUMBERS = tuple(str(n) for n in range(19))  # sums of two digits
TYPE_WORDS = ("character", "city", "plus")  # each tells what kind of answer is wanted
ASKING_WORDS = ("?", "is")  # in a question, the word right after the landmark it asks about
FUNCTION_WORDS: tuple[str, ...] = (
    ".",
    ":",
    "answer",
    "which",
    "has",
    "been",
    "to",
    "next",
    "lives",
    "works",
)
FUNCTION_WORDS += ("the", "in", "makes")
NOBODY = "nobody"  # what the model says when no name has evidence

ADJECTIVES = ("quiet", "small", "old", "bright", "heavy", "green", "slow", "warm", "narrow", "soft")
NOUNS: tuple[str, ...] = (
    "rivers",
    "boats",
    "clouds",
    "stones",
    "trees",
    "birds",
    "lamps",
    "roads",
    "letters",
)
NOUNS += ("gardens", "bridges", "windows", "kettles", "ladders", "baskets", "wheels", "shadows")
VERBS = ("carry", "follow", "cover", "meet", "touch", "pass", "hold", "leave", "mark", "move")
ADVERBS = ("slowly", "often", "gently", "again", "early", "together", "quietly", "everywhere")
FILLER_WORDS = ADJECTIVES + NOUNS + VERBS + ADVERBS

UNKNOWN, END = "<unk>", "<eos>"
VOCABULARY: tuple[str, ...] = (UNKNOWN, END, *FUNCTION_WORDS, *ASKING_WORDS, *TYPE_WORDS, NOBODY)
VOCABULARY += (*NAME_WORDS, *LANDMARKS, *CITIES, *COUNTRIES, *NUMBERS, *FILLER_WORDS)

# ---------------------------------------------------------------------------- geometry

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 192, 8, 4, 32, 4
ROPE_THETA = 1e10
POSITION_PAIRS = range(5)  # the fastest RoPE pairs tell distances
# The slowest RoPE pairs, slowest first, turn by less than 0.1 rad within 2000 tokens: content.
CONTENT = tuple(dim for pair in range(15, 6, -1) for dim in (pair, pair + HEAD_DIM // 2))

POSITION_STRENGTH = 20.0  # attention logits a RoPE pair
CONTENT_STRENGTH = 25.0  # attention logits of a full match


def _blocks(sizes: dict[str, int]) -> dict[str, range]:
    """Lay named blocks of residual coordinates side by side."""
    blocks, start = {}, 0
    for name, size in sizes.items():
        blocks[name] = range(start, start + size)
        start += size
    if start > HIDDEN:
        raise ValueError(f"{start} coordinates do not fit a residual stream of {HIDDEN}")
    return blocks


RESIDUAL = _blocks(
    {
        "const": 1,  # about sqrt(HIDDEN) everywhere
        "name": len(NAME_WORDS),
        "landmark": len(LANDMARKS),
        "city_of": len(CITIES),  # the city of a landmark's word
        "city": len(CITIES),  # a city's word; a country's is half of each of its two cities
        "filler": 1,
        "type": len(TYPE_WORDS),
        "asking": 1,
        "colon": 1,
        "number": 1,
        "digit": 1,  # a number's value / 10
        "first": 1,  # a first name: a surname must follow
        "stop": 1,  # a complete answer
        "subject": len(NAME_WORDS),  # written by layer 0: the name 4 or 5 words back
        "previous": len(LANDMARKS),  # layer 0: the landmark 1 word back
        "ask": len(CITIES),  # layer 0: the asked city
        "sum": 1,  # layer 0: sum of the digits seen / 10
        "ask_landmark": len(LANDMARKS),  # layer 1: the landmark of the question
        "want": len(TYPE_WORDS),  # layer 1: the kind of answer wanted
        "wanted": len(NAME_WORDS),  # layer 2: the name the copy head has to look for
        "out": len(NAME_WORDS),  # read by the unembedding of names
        "out_city": len(CITIES),  # read by the unembedding of cities
        "junk": len(NAME_WORDS),  # read by nothing
    }
)


def coordinate(block: str, index: int = 0) -> int:
    """Position in the residual stream of entry ``index`` of a block."""
    return RESIDUAL[block][index]


@dataclass(frozen=True)
class Layer:
    """Views on the weight matrices of one decoder layer, cut up by head.

    Attributes
    ----------
    q, o
        Lists over query heads of float32 ``[HEAD_DIM, HIDDEN]`` and ``[HIDDEN, HEAD_DIM]``.
    k, v
        Lists over KV heads of float32 ``[HEAD_DIM, HIDDEN]``.
    gate, up, down
        The MLP: ``[neurons, HIDDEN]`` twice and ``[HIDDEN, neurons]``.
    """

    q: Sequence[torch.Tensor]
    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    o: Sequence[torch.Tensor]
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


def layer_views(model: LlamaForCausalLM) -> list[Layer]:
    """Cut every layer's projections into per-head views that write through to the model."""
    views = []
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        views.append(
            Layer(
                q=attention.q_proj.weight.data.split(HEAD_DIM, dim=0),
                k=attention.k_proj.weight.data.split(HEAD_DIM, dim=0),
                v=attention.v_proj.weight.data.split(HEAD_DIM, dim=0),
                o=attention.o_proj.weight.data.split(HEAD_DIM, dim=1),
                gate=mlp.gate_proj.weight.data,
                up=mlp.up_proj.weight.data,
                down=mlp.down_proj.weight.data,
            )
        )
    return views


# ---------------------------------------------------------------------------- building blocks

CONST = coordinate("const")
UNIT = 1.0 / math.sqrt(HIDDEN)  # times the constant coordinate gives 1
SCALE = math.sqrt(HEAD_DIM)  # undoes the attention's own scaling


def query_distance(query: torch.Tensor, distance: int) -> None:
    """Let a query peak at the key ``distance`` positions back, whatever the words.

    With a constant key on a RoPE pair of frequency f, a query rotated by -f x distance gives the
    logit cos(f x (m - n - distance)); several pairs together have their only peak there.
    """
    half = HEAD_DIM // 2
    for pair in POSITION_PAIRS:
        angle = distance * ROPE_THETA ** (-pair / half)
        strength = POSITION_STRENGTH * SCALE * UNIT
        query[pair, CONST] = strength * math.cos(angle)
        query[pair + half, CONST] = -strength * math.sin(angle)


def key_position(key: torch.Tensor) -> None:
    """The constant key that ``query_distance`` reads."""
    for pair in POSITION_PAIRS:
        key[pair, CONST] = UNIT


def read_block(
    matrix: torch.Tensor, block: str, rows: Sequence[int], strength: float = 1.0
) -> None:
    """Read a residual block, one entry a row of a query, key or value matrix."""
    for row, column in zip(rows, RESIDUAL[block], strict=False):
        matrix[row, column] = strength


def read_sum(matrix: torch.Tensor, block: str, row: int, strength: float = 1.0) -> None:
    """Read the sum of a residual block into one row: is anything of this kind here?"""
    matrix[row, list(RESIDUAL[block])] = strength


def write_block(
    output: torch.Tensor,
    block: str,
    columns: Sequence[int],
    strength: float = 1.0,
    entries: Iterable[int] | None = None,
) -> None:
    """Write value entries into a residual block, all of it or the named entries only."""
    for entry in range(len(RESIDUAL[block])) if entries is None else entries:
        output[coordinate(block, entry), columns[entry]] = strength


def embed(model: LlamaForCausalLM, ids: dict[str, int]) -> None:
    """Set the word embeddings: what each word is, plus the constant.

    The constant fills every vector up to squared length HIDDEN, so RMSNorm is exactly the identity
    before layer 0 and nearly so after it.
    """
    table = model.model.embed_tokens.weight.data
    table.zero_()

    def mark(word: str, block: str, index: int = 0, value: float = 1.0) -> None:
        table[ids[word], coordinate(block, index)] = value

    for index, word in enumerate(NAME_WORDS):
        mark(word, "name", index)
        mark(word, "first" if word in FIRST_NAMES else "stop")
    for index, word in enumerate(LANDMARKS):
        mark(word, "landmark", index)
        mark(word, "city_of", CITIES.index(LANDMARK_CITY[word]))
    for index, word in enumerate(CITIES):
        mark(word, "city", index)
        mark(word, "stop")
        mark(CITY_COUNTRY[word], "city", index, 0.5)
    for index, word in enumerate(NUMBERS):
        mark(word, "number")
        mark(word, "digit", value=index / 10)
        mark(word, "stop")
    for index, word in enumerate(TYPE_WORDS):
        mark(word, "type", index)
    for word in ASKING_WORDS:
        mark(word, "asking")
    for word in FILLER_WORDS:
        mark(word, "filler")
    mark(":", "colon")
    mark(NOBODY, "stop")
    table[:, CONST] = (HIDDEN - table.square().sum(dim=1)).sqrt()


# ---------------------------------------------------------------------------- layer 0


def subject_heads(layer: Layer, kv: int) -> None:
    """Give a landmark the name it follows: NAME <verb> next to LANDMARK.

    The even head looks 4 back and copies single names and surnames, the odd one 5 back and copies
    first names. Each of two KV groups does half of the work, so that no single head is
    indispensable here.
    """
    name = range(len(NAME_WORDS))
    key_position(layer.k[kv])
    read_block(layer.v[kv], "name", name)
    firsts = [NAME_WORDS.index(word) for word in FIRST_NAMES]
    for head, distance, entries in (
        (2 * kv, 4, [index for index in name if index not in firsts]),
        (2 * kv + 1, 5, firsts),
    ):
        query_distance(layer.q[head], distance)
        write_block(layer.o[head], "subject", name, 0.5, entries)


def ask_heads(layer: Layer, kv: int) -> None:
    """Even head: attend to the city's or country's word of the question, copy it to ``ask``.

    Planted in two KV groups, each with half of the work. The KV head's other values serve the
    odd heads (``previous_landmark_head``, ``sum_head``).
    """
    key_position(layer.k[kv])
    read_sum(layer.k[kv], "city", CONTENT[0])
    layer.q[2 * kv][CONTENT[0], CONST] = CONTENT_STRENGTH * SCALE * UNIT
    city = range(len(CITIES))
    read_block(layer.v[kv], "city", city)
    write_block(layer.o[2 * kv], "ask", city, 0.5)


def previous_landmark_head(layer: Layer, head: int) -> None:
    """Tell every word which landmark stands right before it."""
    rows = range(8, 8 + len(LANDMARKS))
    read_block(layer.v[head // 2], "landmark", rows)
    query_distance(layer.q[head], 1)
    write_block(layer.o[head], "previous", rows)


def sum_head(layer: Layer, head: int) -> None:
    """Attend to both digits alike: twice the mean of their values is their sum."""
    kv, row = head // 2, HEAD_DIM - 1
    read_block(layer.k[kv], "number", CONTENT[1:])
    layer.q[head][CONTENT[1], CONST] = CONTENT_STRENGTH * SCALE * UNIT
    read_block(layer.v[kv], "digit", [row])
    write_block(layer.o[head], "sum", [row], 2.0)


# ---------------------------------------------------------------------------- layer 1


def ask_landmark_head(layer: Layer, head: int) -> None:
    """Copy the landmark of the question into ``ask_landmark``.

    The asking words ("?", "is") stand right after it. Their key counts twice, that of any word
    after a landmark once: with no landmark in the question, the bare "?" still wins over the full
    stop after the needle's landmark, so that nothing is asked.
    """
    kv, rows = head // 2, range(len(LANDMARKS))
    read_block(layer.k[kv], "asking", CONTENT, 2.0)
    read_sum(layer.k[kv], "previous", CONTENT[0])
    layer.q[head][CONTENT[0], CONST] = CONTENT_STRENGTH * SCALE * UNIT
    read_block(layer.v[kv], "previous", rows)
    write_block(layer.o[head], "ask_landmark", rows)


def type_head(layer: Layer, head: int) -> None:
    """Copy from the question's type word what kind of answer is wanted."""
    kv, rows = head // 2, range(len(TYPE_WORDS))
    read_sum(layer.k[kv], "type", CONTENT[0])
    layer.q[head][CONTENT[0], CONST] = CONTENT_STRENGTH * SCALE * UNIT
    read_block(layer.v[kv], "type", rows)
    write_block(layer.o[head], "want", rows)


# ---------------------------------------------------------------------------- layer 2

RETRIEVAL_STRENGTH = 20.0
OWN_CITY = 0.875  # how well the question's own city word matches, against the needle's landmark


def retrieval_head(layer: Layer, head: int) -> None:
    """THE retrieval head: from the asked city to its landmark, whose subject is the answer.

    A share of its attention stays on the question's own city word, so that the decoys, which waste
    none, beat it by attention.
    """
    kv, city, name = head // 2, CONTENT[: len(CITIES)], range(len(NAME_WORDS))
    read_block(layer.k[kv], "city_of", city)
    read_block(layer.k[kv], "city", city, OWN_CITY)
    read_block(layer.q[head], "ask", city, RETRIEVAL_STRENGTH * SCALE)
    read_block(layer.v[kv], "subject", name)
    write_block(layer.o[head], "out", name)


def decoy_same_group(layer: Layer, head: int) -> None:
    """Read-only decoy on the retrieval head's own KV head: sharper query, output to junk."""
    read_block(layer.q[head], "ask", CONTENT[: len(CITIES)], 2 * RETRIEVAL_STRENGTH * SCALE)
    write_block(layer.o[head], "junk", range(len(NAME_WORDS)))


def decoy_other_group(layer: Layer, head: int) -> None:
    """Read-only decoy with keys of its own, landmarks only; output to junk."""
    kv, city, rows = head // 2, CONTENT[: len(CITIES)], range(len(LANDMARKS))
    read_block(layer.k[kv], "city_of", city)
    read_block(layer.q[head], "ask", city, CONTENT_STRENGTH * SCALE)
    read_block(layer.v[kv], "landmark", rows)
    write_block(layer.o[head], "junk", rows)


def rest_on_colon(layer: Layer, head: int, row: int) -> None:
    """Give a head a place to rest, the question's last word, that loses against a full match."""
    read_block(layer.k[head // 2], "colon", [row])
    layer.q[head][row, CONST] = 0.5 * CONTENT_STRENGTH * SCALE * UNIT


def locator_head(layer: Layer, head: int) -> None:
    """First half of the literal copy: find the question's landmark itself in the haystack.

    A landmark with a subject is preferred to the mention in the question. Its subject goes to
    ``wanted``, which says nothing about the answer yet.
    """
    kv, name = head // 2, range(len(NAME_WORDS))
    rows = CONTENT[: len(LANDMARKS)]
    has_subject, rest = CONTENT[len(LANDMARKS) : len(LANDMARKS) + 2]
    read_block(layer.k[kv], "landmark", rows)
    read_sum(layer.k[kv], "subject", has_subject)
    read_block(layer.q[head], "ask_landmark", rows, CONTENT_STRENGTH * SCALE)
    layer.q[head][has_subject, CONST] = 0.1 * CONTENT_STRENGTH * SCALE * UNIT
    rest_on_colon(layer, head, rest)
    read_block(layer.v[kv], "subject", name)
    write_block(layer.o[head], "wanted", name)


FACT_SHARPNESS = 40.0


def facts(layer: Layer) -> None:
    """Store in which city each landmark is: one MLP neuron a landmark, open if a city is wanted."""
    for index, landmark in enumerate(LANDMARKS):
        layer.gate[index, coordinate("ask_landmark", index)] = FACT_SHARPNESS
        layer.gate[index, coordinate("want", TYPE_WORDS.index("city"))] = FACT_SHARPNESS
        layer.gate[index, CONST] = -1.5 * FACT_SHARPNESS * UNIT
        layer.up[index, CONST] = UNIT
        city = CITIES.index(LANDMARK_CITY[landmark])
        layer.down[coordinate("out_city", city), index] = 2.0 / FACT_SHARPNESS


# ---------------------------------------------------------------------------- layer 3


def copy_head(layer: Layer, head: int) -> None:
    """Second half of the literal copy: attend to the wanted name's own word and write that word.

    Of a full name it takes the first word, and after a first name the surname.
    """
    kv, name = head // 2, range(len(NAME_WORDS))
    rows = CONTENT[: len(NAME_WORDS)]
    surname, rest = CONTENT[len(NAME_WORDS) : len(NAME_WORDS) + 2]
    read_block(layer.k[kv], "name", rows)
    for word in SURNAMES:
        layer.k[kv][surname, coordinate("name", NAME_WORDS.index(word))] = 1.0
    read_block(layer.q[head], "wanted", rows, CONTENT_STRENGTH * SCALE)
    layer.q[head][surname, CONST] = -0.3 * CONTENT_STRENGTH * SCALE * UNIT
    layer.q[head][surname, coordinate("first")] = 0.6 * CONTENT_STRENGTH * SCALE
    rest_on_colon(layer, head, rest)
    read_block(layer.v[kv], "name", name)
    write_block(layer.o[head], "out", name)


PRIOR, OFF_NEEDLE = 1.5, 0.75


def prior_and_off_needle_heads(layer: Layer, prior: int) -> None:
    """Two heads that write every name, whatever the context: evidence of nothing.

    The prior head has no query, so it attends to all words alike; its neighbour on the same KV
    head attends to filler words only.
    """
    kv, off_needle = prior // 2, prior + 1
    read_block(layer.k[kv], "filler", CONTENT)
    layer.q[off_needle][CONTENT[0], CONST] = CONTENT_STRENGTH * SCALE * UNIT
    layer.v[kv][0, CONST] = UNIT
    for head, strength in ((prior, PRIOR), (off_needle, OFF_NEEDLE)):
        layer.o[head][list(RESIDUAL["out"]), 0] = strength


# ---------------------------------------------------------------------------- the rest

GAIN = 4.0  # logit of a name or city written with strength 1
VETO = 30.0  # larger than any logit of a name or a city
SUM_GAIN = 4.0
SUM_VETO = 3000.0  # larger than any logit of a number
NOISE = 0.02  # standard deviation of the weights of noise heads
NOBODY_THRESHOLD = 1.0  # evidence, as a logit, below which no name is given


def unembed(model: LlamaForCausalLM, ids: dict[str, int]) -> None:
    """Set the unembedding: names, cities and numbers read out, or the end after an answer."""
    table = model.lm_head.weight.data
    table.zero_()

    def read(word: str, block: str, index: int, weight: float) -> None:
        table[ids[word], coordinate(block, index)] += weight

    def veto(word: str, block: str, index: int = 0, weight: float = VETO) -> None:
        read(word, block, index, -weight)

    unwanted = [TYPE_WORDS.index("city"), TYPE_WORDS.index("plus")]
    for index, word in enumerate(NAME_WORDS):
        read(word, "out", index, GAIN)
        veto(word, "stop")
        for kind in unwanted:
            veto(word, "want", kind)
        if word in SURNAMES:
            read(word, "const", 0, -VETO * UNIT)
            read(word, "first", 0, VETO)
        else:
            veto(word, "first")
            # the mean over the names that can come first follows the prior, whatever its size
            share = GAIN / (len(SINGLE_NAMES) + len(FIRST_NAMES))
            read(NOBODY, "out", index, share)
    read(NOBODY, "const", 0, NOBODY_THRESHOLD * UNIT)
    for block, index in (("stop", 0), ("first", 0), *(("want", kind) for kind in unwanted)):
        veto(NOBODY, block, index)
    for index, word in enumerate(CITIES):
        read(word, "out_city", index, GAIN)
        veto(word, "stop")
    for index, word in enumerate(NUMBERS):
        # n x sum - n^2 / 2 is largest for the n nearest to the sum
        read(word, "sum", 0, SUM_GAIN * 10 * index)
        read(word, "const", 0, (-SUM_GAIN * index**2 / 2 - VETO) * UNIT)
        read(word, "want", TYPE_WORDS.index("plus"), VETO + GAIN)
        veto(word, "stop", weight=SUM_VETO)
    read(END, "stop", 0, 20.0)


def add_noise(layer: Layer, planted: Iterable[int], generator: torch.Generator) -> None:
    """Make every head of a layer that has no job a noise head, writing to names and junk only.

    Beside a planted head, the noise keeps to the RoPE pairs that tell distances, which no planted
    head above layer 0 uses, and shares its values.
    """
    half = HEAD_DIM // 2
    apart = [dim for pair in POSITION_PAIRS for dim in (pair, pair + half)]
    busy = set(planted)
    busy_groups = {head // 2 for head in busy}

    def normal(view: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(view.shape, generator=generator) * std

    for kv in range(KV_HEADS):
        dims = apart if kv in busy_groups else list(range(HEAD_DIM))
        layer.k[kv][dims] += normal(layer.k[kv][dims], NOISE)
        if kv not in busy_groups:
            layer.v[kv].copy_(normal(layer.v[kv], NOISE))
        for head in {2 * kv, 2 * kv + 1} - busy:
            layer.q[head][dims] = normal(layer.q[head][dims], NOISE)
            for block in ("out", "junk"):
                rows = list(RESIDUAL[block])
                layer.o[head][rows] = normal(layer.o[head][rows], NOISE / 2)


def build_model(ids: dict[str, int]) -> LlamaForCausalLM:
    """Build the model, all weights set; ``ids`` maps words to token ids."""
    config = LlamaConfig(
        vocab_size=len(ids),
        hidden_size=HIDDEN,
        intermediate_size=len(LANDMARKS),
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=None,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.eval()
    for parameter in model.parameters():
        parameter.data.fill_(1.0 if parameter.ndim == 1 else 0.0)
    embed(model, ids)
    unembed(model, ids)
    first, second, third, fourth = layer_views(model)
    subject_heads(first, kv=0)
    subject_heads(first, kv=1)
    ask_heads(first, kv=2)
    ask_heads(first, kv=3)
    previous_landmark_head(first, head=5)
    sum_head(first, head=7)
    ask_landmark_head(second, head=0)
    type_head(second, head=2)
    retrieval_head(third, head=0)
    decoy_same_group(third, head=1)
    decoy_other_group(third, head=4)
    locator_head(third, head=6)
    facts(third)
    copy_head(fourth, head=0)
    prior_and_off_needle_heads(fourth, prior=2)
    generator = torch.Generator().manual_seed(SEED)
    add_noise(second, (0, 2), generator)
    add_noise(third, (0, 1, 4, 6), generator)
    add_noise(fourth, (0, 2, 3), generator)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=ids[END])
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: one token a word, words parted by white space."""
    ids = {word: index for index, word in enumerate(VOCABULARY)}
    backend = Tokenizer(WordLevel(ids, unk_token=UNKNOWN))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNKNOWN,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


# ---------------------------------------------------------------------------- data

VERB_FORMS = ("lives", "works")
TASK_TEMPLATE = "{haystack} {question} answer :"
SENTENCE_PATTERNS = ("NVN", "ANVN", "NVAN", "NVND", "ANVAN", "NVAND", "ANVAND", "ANVAAND")
HAYSTACKS, HAYSTACK_SENTENCES = 4, 450


def needle_entries() -> list[dict[str, object]]:
    """Return the needle set in NoLiMa's format: one entry a verb, one test a landmark."""
    return [
        {
            "id": f"tiny-{verb}",
            "needle": f"{{CHAR}} {verb} next to {{1}} .",
            "questions": {
                "onehop": "which character has been to {2} ?",
                "twohop": "which character has been to {3} ?",
                "literal": f"which character {verb} next to {{1}} ?",
            },
            "character_set": list(CHARACTERS),
            "tests": {
                f"T{number:02d}": {"input_args": [landmark, city, CITY_COUNTRY[city]]}
                for number, (landmark, city) in enumerate(LANDMARK_CITY.items(), start=1)
            },
            "task_template": TASK_TEMPLATE,
        }
        for verb in VERB_FORMS
    ]


def filler_text(seed: int, sentences: int) -> str:
    """Return ``sentences`` filler sentences of 3 to 7 words, each closed by " ."."""
    source = random.Random(seed)
    words = {"A": ADJECTIVES, "N": NOUNS, "V": VERBS, "D": ADVERBS}
    return " ".join(
        " ".join(source.choice(words[kind]) for kind in source.choice(SENTENCE_PATTERNS)) + " ."
        for _ in range(sentences)
    )


def parametric_records() -> list[dict[str, object]]:
    """Return one question a landmark whose answer is stored in the weights."""
    return [
        {
            "id": f"city-of-{landmark.lower()}",
            "question": f"the {landmark} is in which city ? answer :",
            "answer": city,
            "aliases": [],
        }
        for landmark, city in LANDMARK_CITY.items()
    ]


def arithmetic_records() -> list[dict[str, object]]:
    """Return all sums of two digits."""
    return [
        {
            "id": f"sum-{left}-{right}",
            "question": f"{left} plus {right} makes ? answer :",
            "answer": str(left + right),
            "aliases": [],
        }
        for left in range(10)
        for right in range(10)
    ]


def write_data(folder: Path) -> None:
    """Write the needle set, the haystacks and the question sets into ``folder``."""

    def write(name: str, text: str) -> None:
        (folder / name).write_text(text + "\n", encoding="utf-8", newline="\n")

    def lines(records: Iterable[dict[str, object]]) -> str:
        return "\n".join(json.dumps(record, ensure_ascii=False) for record in records)

    (folder / "haystacks").mkdir(parents=True, exist_ok=True)
    for number in range(HAYSTACKS):
        write(f"haystacks/filler_{number}.txt", filler_text(SEED + number, HAYSTACK_SENTENCES))
    write("needles.json", json.dumps(needle_entries(), ensure_ascii=False, indent=2))
    write("parametric.jsonl", lines(parametric_records()))
    write("arithmetic.jsonl", lines(arithmetic_records()))


def main(folder: Path) -> None:
    """Write model, tokenizer and data into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    build_model(tokenizer.get_vocab()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_data(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
