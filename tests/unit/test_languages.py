"""Chinese and Japanese from needle and haystack to scored steps, with pieces that are single bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import transformers as tf
import yaml
from tiny_models import COMMON
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from workflow_scripts.activations.capture_probes import capture_probes, shard_arrays
from workflow_scripts.common.layout import haystack_paths
from workflow_scripts.common.models import LanguageModel, wrap_model
from workflow_scripts.probes.build import build_probes

ROWS = yaml.safe_load(Path("config/languages.yaml").read_text(encoding="utf-8"))["probes"]
SIZE = 6


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    """A model over bytes: every Chinese or Japanese character is three tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    torch.manual_seed(8)
    settings = {"vocab_size": 256, "max_position_embeddings": 4096}
    model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**(COMMON | settings)))
    return wrap_model(model, PreTrainedTokenizerFast(tokenizer_object=bytes_only))


def probes_of(lm: LanguageModel, name: str) -> pl.DataFrame:
    row = {**ROWS[name], "context_lengths": [1500], "size": SIZE}
    return build_probes(
        lm.tokenizer, name, row, row["needles"], haystack_paths(row["haystacks"]), model="bytes"
    )


@pytest.mark.parametrize("name", list(ROWS))
def test_a_needle_stands_behind_a_sentence_end_of_its_script(lm: LanguageModel, name: str) -> None:
    probes = probes_of(lm, name)
    assert probes.height == SIZE
    for probe in probes.iter_rows(named=True):
        ids, start, stop = probe["input_ids"], probe["needle_start"], probe["needle_end"]
        assert len(ids) == 1500
        needle = lm.decode(ids[start:stop])
        assert probe["answer"] in needle
        assert needle.strip().endswith("。")
        before = lm.decode(ids[probe["haystack_start"] : start]).rstrip()
        assert before == "" or before.endswith(("。", "！", "？", "」", "”"))
        assert "\ufffd" not in before + needle


@pytest.mark.parametrize("name", ["nolima", "japanese"])
def test_an_answer_of_several_bytes_is_scored_byte_by_byte(
    lm: LanguageModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = probes_of(lm, name)
    probe = probes.row(0, named=True)
    said = lm.tokenizer.encode(f"是{probe['answer']}。")
    _make_it_say(lm, said, monkeypatch)
    (result,) = capture_probes(
        lm,
        probes[:1].with_columns(max_new_tokens=pl.lit(len(said), pl.Int32)),
        directions=["raw"],
        batch_tokens=4096,
        max_length=4096,
        progress=lambda _: None,
    )
    assert result.text == f"是{probe['answer']}。"
    name_bytes = len(probe["answer"].encode())
    assert list(result.answer_steps) == list(range(3, 3 + name_bytes))
    assert result.recall == 1.0
    arrays = shard_arrays([result])
    rows = arrays["row_length"].tolist()
    assert rows == [1500 + step for step in range(3, 3 + name_bytes)]
    assert arrays["alpha"].shape == (2, lm.n_heads, sum(rows))
    sums = np.add.reduceat(arrays["alpha"], arrays["row_offset"], axis=2)
    np.testing.assert_allclose(sums, 1, atol=1e-5)


def _make_it_say(lm: LanguageModel, said: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the logit of what is to be said next, told by the position that is asked for."""
    stock = lm.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        last = kwargs["cache"].get_seq_length() - 1500
        for row in range(out.logits.shape[1]):
            step = last - (out.logits.shape[1] - 1 - row)
            if 0 <= step < len(said):
                out.logits[:, row, said[step]] += 100
        return out

    monkeypatch.setattr(lm.model, "forward", forward)
