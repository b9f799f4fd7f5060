"""config/detectors.yaml end to end on the planted model: every detector says what is planted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from snakemake_project import ROOT, Project, Run, copied_project

HEADS = "results/tiny/heads.parquet"
RETRIEVAL, COPY, PRIOR, OFF_NEEDLE = (2, 0), (3, 0), (3, 2), (3, 3)
DECOYS = {(2, 1), (2, 4)}
NOLIMA = {
    "needles": "data/models/tiny/needles.json",
    "haystacks": "data/models/tiny/haystacks",
    "context_lengths": [150],
    "depths": [0, 50, 100],
    "size": 12,
    "max_new_tokens": 6,
}


def write_niah(path: Path) -> None:
    """Write literal needles in the planted model's words."""
    landmarks = "Kiasma Ateneum Prado Retiro Colosseum Scala Zwinger Brera".split()
    names = ["Anna", "Bruno", "Ivan Holm", "Julia Berg", "Clara", "Emma", "Karl Lund", "Hugo"]
    lines = [
        {
            "needle": f"{name} lives next to {landmark} .",
            "question": f"which character lives next to {landmark} ?",
            "real_needle": name,
        }
        for name, landmark in zip(names, landmarks, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def tiny_detectors(scores: list[str] | None = None) -> dict[str, Any]:
    """Return config/detectors.yaml with the files and sizes of tiny; maybe only some scores."""
    overlay = yaml.safe_load((ROOT / "config/detectors.yaml").read_text(encoding="utf-8"))
    overlay["models"] = {"tiny": overlay["models"].pop("smollm2-135m")}
    overlay["models"]["tiny"]["tuned_lens"]["train"]["texts"] = [NOLIMA["haystacks"]]
    overlay["models"]["tiny"]["tuned_lens"]["train"]["steps"] = 10
    overlay["probes"]["nolima_removed"].update(NOLIMA)
    overlay["probes"]["niah"].update(
        NOLIMA, needles="niah.jsonl", template="{haystack} {question} answer :"
    )
    if scores is not None:
        overlay["scores"] = {name: overlay["scores"][name] for name in scores}
    return overlay


@pytest.fixture(scope="module")
def detected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Run, Run]:
    """All detectors on the planted model: the project, what a run adds to that of locos alone, it."""
    project = copied_project(tmp_path_factory.mktemp("detectors") / "a project")
    write_niah(project.folder / "niah.jsonl")
    overlay = project.folder / "overlay.yaml"

    def use(scores: list[str] | None) -> None:
        overlay.write_text(yaml.safe_dump(tiny_detectors(scores)), encoding="utf-8")

    project.edit_config(lambda config: config["scores"].update(dla={"dataset": "nolima", "formula": "needle_phi + off_phi"}))  # fmt: skip
    use([])
    run = project.run(HEADS, "--configfile", "overlay.yaml")
    assert run.code == 0, run.text
    use(None)
    more = project.run("--dry-run", HEADS, "--configfile", "overlay.yaml")
    run = project.run(HEADS, "--configfile", "overlay.yaml")
    assert run.code == 0, run.text
    return project, more, run


@pytest.fixture(scope="module")
def heads(detected: tuple[Project, Run, Run]) -> pl.DataFrame:
    return pl.read_parquet(detected[0].folder / HEADS)


def ranked(heads: pl.DataFrame, score: str) -> list[tuple[int, int]]:
    rows = heads.filter(pl.col("score") == score).sort("rank")
    return rows.select("layer", "head").rows()


def values(heads: pl.DataFrame, score: str) -> dict[tuple[int, int], float]:
    rows = heads.filter(pl.col("score") == score)
    return {(layer, head): v for layer, head, v in rows.select("layer", "head", "value").rows()}


def test_every_score_of_the_overlay_has_a_row_a_head(heads: pl.DataFrame) -> None:
    wanted = {*tiny_detectors()["scores"], "locos", "alpha_spatial", "dla"}
    assert set(heads["score"]) == wanted
    assert heads.height == 32 * len(wanted)


def test_adding_every_detector_of_a_dataset_runs_no_capture_of_it_again(
    detected: tuple[Project, Run, Run],
) -> None:
    _, more, _ = detected
    datasets = more.lines_of("capture", "wildcards")
    assert datasets
    assert all("dataset=nolima," not in line for line in datasets), datasets
    assert "train_lens" not in more.jobs


@pytest.mark.parametrize(
    "score",
    "locos_unit locos_frozen_norm locos_tuned_lens locos_context locos_no_bos locos_official "
    "argmax_ov contrastive_locos contrastive_dla cri cri_logprob cri_character "
    "cri_character_logprob".split(),
)
def test_the_retrieval_head_is_first(heads: pl.DataFrame, score: str) -> None:
    assert ranked(heads, score)[0] == RETRIEVAL


@pytest.mark.parametrize("score", ["wu", "wu_text", "locos_niah"])
def test_the_copy_head_is_first_on_literal_needles(heads: pl.DataFrame, score: str) -> None:
    assert ranked(heads, score)[0] == COPY


@pytest.mark.parametrize("score", ["snapkv_window", "headkv_r2", "contrastive_mass"])
def test_detectors_by_attention_alone_put_both_decoys_before_the_retrieval_head(
    heads: pl.DataFrame, score: str
) -> None:
    order = ranked(heads, score)
    assert all(order.index(decoy) < order.index(RETRIEVAL) for decoy in DECOYS)


def test_copying_finds_nothing_where_nothing_can_be_copied(heads: pl.DataFrame) -> None:
    copied = values(heads, "wu_nolima")
    assert copied[RETRIEVAL] == copied[COPY] == 0


def test_generic_heads_cancel_against_the_prompt_without_the_needle(heads: pl.DataFrame) -> None:
    with_needle, without = values(heads, "dla"), values(heads, "dla_removed")
    left = values(heads, "contrastive_dla")
    for head, size in ((PRIOR, 5.0), (OFF_NEEDLE, 2.5)):
        assert with_needle[head] > size
        assert abs(left[head]) < 0.1 * with_needle[head]
    assert with_needle[PRIOR] > with_needle[RETRIEVAL]
    assert abs(without[RETRIEVAL]) < 0.1 * with_needle[RETRIEVAL]
    assert left[RETRIEVAL] > 0.9 * with_needle[RETRIEVAL]
    contrast = values(heads, "contrastive_locos")
    assert contrast[RETRIEVAL] == pytest.approx(values(heads, "locos")[RETRIEVAL], abs=0.1)


def test_a_difference_can_choose_the_heads_to_ablate(
    detected: tuple[Project, Run, Run], tmp_path: Path
) -> None:
    project, _, _ = detected
    choice = tmp_path / "choice.yaml"
    row = {"selectors": {"contrast": {"score": "contrastive_locos", "ends": ["top"]}}}
    choice.write_text(yaml.safe_dump(row), encoding="utf-8")
    target = "results/tiny/selection.parquet"
    run = project.run(target, "--configfile", "overlay.yaml", str(choice))
    assert run.code == 0, run.text
    selection = pl.read_parquet(project.folder / target)
    chosen = selection.filter(pl.col("selector") == "contrast", pl.col("k") == 1)
    assert chosen["heads"].to_list() == [["2-0"]] * 2
