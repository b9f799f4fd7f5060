"""Answers in generated tokens: the steps that spell them, thinking, and ROUGE in any script."""

from __future__ import annotations

from collections import Counter

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from workflow_scripts.common.answers import (
    Thinking,
    find_answer_steps,
    rouge1_recall,
    rouge_l_f1,
    skip_thinking,
    token_spans,
    without_thinking,
)


def in_bytes(text: str) -> str:
    """Return a text in the alphabet of byte-level BPE, a character a byte."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in pre.pre_tokenize_str(text))


def byte_tokenizer(*merged: str) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: single bytes, and pieces in its alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate(alphabet)}
    merges = []
    for piece in merged:
        for end in range(2, len(piece) + 1):
            if piece[:end] not in vocabulary:
                vocabulary[piece[:end]] = len(vocabulary)
                merges.append((piece[: end - 1], piece[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, each with the space before it (SentencePiece's way)."""
    vocabulary = {word: index for index, word in enumerate(("<unk>", *words))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


BYTES = byte_tokenizer()
WORDS = byte_tokenizer(*(in_bytes(w) for w in (" Yuki", "Yuki", " is", " The", "The", " lives")))


# --- answer steps


def test_the_answers_own_tokens_are_found_as_a_run() -> None:
    ids = [*encode(WORDS, "The"), *encode(WORDS, "Yuki"), *encode(WORDS, " lives")]
    assert [WORDS.decode([i]) for i in ids] == ["The", "Yuki", " lives"]
    assert find_answer_steps(WORDS, ids, "Yuki") == [1]


def test_the_answer_with_a_space_before_it_is_found_as_a_run() -> None:
    ids = [*encode(WORDS, "The"), *encode(WORDS, " Yuki"), *encode(WORDS, " lives")]
    assert WORDS.decode([ids[1]]) == " Yuki"
    assert find_answer_steps(WORDS, ids, "Yuki") == [1]


def test_the_earliest_occurrence_counts_whichever_way_it_is_spelt() -> None:
    spaced, bare = encode(WORDS, " Yuki"), encode(WORDS, "Yuki")
    assert spaced != bare
    gap = encode(WORDS, " is")
    assert find_answer_steps(WORDS, [*gap, *spaced, *gap, *bare], "Yuki") == [1]
    assert find_answer_steps(WORDS, [*gap, *bare, *gap, *spaced], "Yuki") == [1]


def test_an_absent_answer_has_no_steps() -> None:
    assert find_answer_steps(WORDS, encode(WORDS, "The Yuki"), "Mary") == []


def test_an_empty_answer_has_no_steps() -> None:
    assert find_answer_steps(WORDS, encode(WORDS, "The Yuki"), "") == []


def test_no_tokens_have_no_steps() -> None:
    assert find_answer_steps(WORDS, [], "Yuki") == []


def test_the_text_is_searched_without_regard_to_case() -> None:
    ids = encode(BYTES, "it is YUKI!")
    assert find_answer_steps(BYTES, ids, "Yuki") == [6, 7, 8, 9]


def test_signs_of_regular_expressions_in_an_answer_are_plain_text() -> None:
    ids = encode(BYTES, "so A+ (B).")
    assert find_answer_steps(BYTES, ids, "a+ (b)") == list(range(3, 9))


def test_a_token_that_only_partly_belongs_to_the_answer_is_a_step() -> None:
    # "Yuki's" in two pieces that straddle both ends of the name.
    tokenizer = byte_tokenizer(in_bytes("(Yu"), in_bytes("ki)"))
    ids = encode(tokenizer, "x(Yuki)y")
    assert [tokenizer.decode([i]) for i in ids] == ["x", "(Yu", "ki)", "y"]
    assert find_answer_steps(tokenizer, ids, "Yuki") == [1, 2]


def test_a_space_alone_before_the_answer_is_not_a_step() -> None:
    for text in ("is YUKI", "is Yuki"):
        assert find_answer_steps(BYTES, encode(BYTES, text), "Yuki") == [3, 4, 5, 6]


def test_all_bytes_of_a_chinese_character_are_steps() -> None:
    ids = encode(BYTES, "是林涛。")
    assert len(ids) == 4 * 3
    assert find_answer_steps(BYTES, ids, "林涛") == list(range(3, 9))


def test_a_piece_of_two_chinese_characters_is_a_step_of_each() -> None:
    # The last byte of the first character and the first of the second are one token.
    first, second = in_bytes("林"), in_bytes("涛")
    tokenizer = byte_tokenizer(first[-1] + second[0])
    ids = encode(tokenizer, "林涛")
    assert len(ids) == 5
    assert find_answer_steps(tokenizer, ids, "涛") == [2, 3, 4]
    # As text, since the piece belongs to neither name alone.
    assert find_answer_steps(tokenizer, ids, "林") == [0, 1, 2]


def test_an_answer_cut_off_inside_a_character_has_no_steps() -> None:
    ids = encode(BYTES, "是林涛")[:-1]
    assert find_answer_steps(BYTES, ids, "林涛") == []


def test_the_space_that_sentencepiece_drops_shifts_no_step() -> None:
    tokenizer = word_tokenizer("▁it", "▁is", "▁YUKI", "▁now")
    ids = encode(tokenizer, "it is YUKI now")
    assert tokenizer.decode(ids) == "it is YUKI now"
    assert find_answer_steps(tokenizer, ids, "Yuki") == [2]


@pytest.mark.parametrize("text", ["plain words, and more", "Zoë 林涛が 🙂 é!", "a  b \n c ."])
def test_spans_of_single_bytes_are_the_characters_they_belong_to(text: str) -> None:
    expected = [
        (place, place + 1) for place, character in enumerate(text) for _ in character.encode()
    ]
    assert token_spans(BYTES, encode(BYTES, text)) == expected


def test_spaces_before_punctuation_are_not_cleaned_away() -> None:
    tokenizer = word_tokenizer("▁a", "▁.", "▁b")
    tokenizer.clean_up_tokenization_spaces = True
    assert token_spans(tokenizer, encode(tokenizer, "a . b")) == [(0, 1), (1, 3), (3, 5)]


# --- thinking

THOUGHT = "<think>Yuki?</think>\n\nIt is Yuki."


def test_an_answer_inside_a_think_block_is_none() -> None:
    steps = find_answer_steps(BYTES, encode(BYTES, THOUGHT), "Yuki")
    assert "".join(THOUGHT[step] for step in steps) == "Yuki"
    assert steps[0] == THOUGHT.rindex("Yuki")


def test_an_answer_found_by_text_behind_a_block_is_counted_from_the_first_token() -> None:
    ids = encode(BYTES, "<think>yuki</think>YUKI")
    assert find_answer_steps(BYTES, ids, "Yuki") == [19, 20, 21, 22]


def test_the_answer_begins_behind_the_closed_block() -> None:
    found = skip_thinking(BYTES, encode(BYTES, THOUGHT))
    assert found == Thinking(THOUGHT.index("\n\nIt"), True)


def test_a_block_that_the_prompt_opened_is_skipped_too() -> None:
    text = "Yuki?</think>Yuki"
    assert find_answer_steps(BYTES, encode(BYTES, text), "Yuki") == [13, 14, 15, 16]


def test_an_open_block_has_no_answer_and_says_so() -> None:
    ids = encode(BYTES, "<think>Yuki, Yuki")
    assert skip_thinking(BYTES, ids) == Thinking(len(ids), False)
    assert find_answer_steps(BYTES, ids, "Yuki") == []


def test_a_second_block_left_open_says_so() -> None:
    ids = encode(BYTES, "<think>a</think>b<think>c")
    assert skip_thinking(BYTES, ids) == Thinking(len(ids), False)


def test_without_thought_the_answer_begins_at_once() -> None:
    assert skip_thinking(BYTES, encode(BYTES, " Yuki")) == Thinking(0, True)
    assert skip_thinking(BYTES, []) == Thinking(0, True)


def test_text_loses_its_thoughts_and_keeps_the_rest() -> None:
    assert without_thinking(THOUGHT) == "It is Yuki."
    assert without_thinking(" Yuki\n") == " Yuki\n"
    assert without_thinking("<think>Yuki") == ""


# --- ROUGE


def test_recall_is_the_share_of_the_golds_words_that_are_named() -> None:
    # Four words, counted with repetition: "the", "old", "the" are there once, once, once.
    gold, text = "the old the mill", "old the river"
    shared = sum((Counter(gold.split()) & Counter(text.split())).values())
    assert rouge1_recall(gold, text) == pytest.approx(shared / 4)


def test_rouge_l_f1_of_a_hand_worked_pair() -> None:
    # Longest common subsequence "police the gunman" of 4 and 4 words: P = R = 3 / 4.
    assert rouge_l_f1("police kill the gunman", "police ended the gunman") == pytest.approx(0.75)
    # "Yuki" among the 5 words i, think, it, s, yuki: P = 1 / 5, R = 1, F1 = 1 / 3.
    assert rouge_l_f1("Yuki", "I think it's Yuki") == pytest.approx(1 / 3)


def test_words_are_stemmed() -> None:
    assert rouge1_recall("jumping horses", "the horse jumped") == 1.0


def test_case_and_punctuation_do_not_matter() -> None:
    assert rouge1_recall("Yuki", "(YUKI).") == 1.0


@pytest.mark.parametrize("gold", ["林涛", "サクラ", "박지민"])
def test_a_gold_without_ascii_words_passes_inside_a_sentence(gold: str) -> None:
    assert rouge1_recall(gold, f"是{gold}です。") == 1.0
    assert rouge1_recall(gold, "Yuki") == 0.0


def test_chinese_is_compared_by_characters() -> None:
    # Gold of 2, text of 4 characters, one shared: R = 1 / 2; P = 1 / 4, F1 = 1 / 3.
    assert rouge1_recall("林涛", "林在这里") == pytest.approx(0.5)
    assert rouge_l_f1("林涛", "林在这里") == pytest.approx(1 / 3)


def test_scripts_with_spaces_are_compared_by_words() -> None:
    # By letters, nearly any Russian sentence would hold the letters of a name.
    assert rouge1_recall("Анна Орлова", "это анна.") == pytest.approx(0.5)
    assert rouge1_recall("Анна", "она на нас") == 0.0


def test_an_empty_text_scores_nothing() -> None:
    for gold in ("Yuki", "林涛", ""):
        assert rouge1_recall(gold, "") == 0.0
        assert rouge_l_f1(gold, "") == 0.0
