"""Prefix, trunk and batch on a real language model: the numbers and tokens of one run at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml

from benchmarks import plain
from benchmarks.measure import NEW_TOKENS, capture, make_probes
from tests.unit.tiny_models import assert_close_captures
from workflow_scripts.ablation.calibration import calibrate, choose_prompts, read_means
from workflow_scripts.ablation.generation import generate
from workflow_scripts.ablation.interventions import Head, Intervention
from workflow_scripts.common.models import LanguageModel, Source, load_model
from workflow_scripts.models.convert_gguf import convert_source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model, as the workflow converts it."""
    config = yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8"))
    source = config["models"]["smollm2-135m"]["source"]
    return str(convert_source(source, tmp_path_factory.mktemp("smollm2")))


@pytest.fixture(scope="module")
def lm(folder: str) -> LanguageModel:
    return load_model(Source(folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def probes(folder: str) -> pl.DataFrame:
    """Three probes at each of two lengths; those of a length share their haystack."""
    return pl.concat(make_probes(folder, length, 3, question="literal") for length in (120, 150))


def test_probes_captured_together_equal_each_alone_and_what_transformers_generates(
    lm: LanguageModel, probes: pl.DataFrame
) -> None:
    together = capture(lm, probes)
    alone = capture(lm, probes, batch_tokens=1)
    for found, expected, prompt in zip(together, alone, probes["input_ids"], strict=True):
        assert (found.status, found.generation) == (expected.status, expected.generation)
        assert found.generation.ids == plain.generate(lm, prompt.to_list(), NEW_TOKENS)
        assert_close_captures(found.capture, expected.capture)
    assert "passed" in {result.status for result in together}


def test_conditions_that_share_trunk_and_prefix_answer_as_each_with_hooks(
    lm: LanguageModel, probes: pl.DataFrame
) -> None:
    prompts = probes["input_ids"].to_list()
    table = calibrate(lm, choose_prompts(probes, count=4, seed=0, max_tokens=5000))
    means = read_means(table, "q_proj")
    drawn = np.random.default_rng(1).permutation(len(lm.layers) * lm.n_heads)
    heads = [divmod(int(index), lm.n_heads) for index in drawn]
    sets: list[list[Head]] = [[], [(23, 2)], [(23, 2), (28, 1)], heads[:5], heads[:40]]
    found = generate(
        lm,
        prompts,
        Intervention("mean_query", "q_proj", sets, means),
        max_new_tokens=NEW_TOKENS,
        batch_tokens=8192,
        progress=lambda _: None,
    )
    answers = [[answer.ids for answer in row] for row in found]
    assert answers == plain.ablate(lm, prompts, sets, means, NEW_TOKENS)
    assert answers[0] != answers[-1]
