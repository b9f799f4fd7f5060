"""Bad input is one clear line and exit status 1, before any model library is imported."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from snakemake_project import TARGET, Project, copied_project, environment


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project before any run; bad input leaves nothing behind in it."""
    return copied_project(tmp_path_factory.mktemp("bare"))


def refused(project: Project, *arguments: str, env: dict[str, str]) -> str:
    """Return the one line with which a run is refused."""
    run = project.run(TARGET, *arguments, env=env)
    assert run.code == 1, run.text
    assert "Traceback" not in run.text
    lines = [line for line in run.text.splitlines() if "error" in line.lower()]
    assert len(lines) == 1, run.text
    assert not (project.folder / "results").exists()
    return lines[0]


def overlay(folder: Path, value: dict[str, Any]) -> list[str]:
    path = folder / "overlay.yaml"
    path.write_text(yaml.safe_dump(value), encoding="utf-8")
    return ["--configfile", str(path)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param({"seed": "many"}, ["seed", "'many'", "whole number"], id="wrong type"),
        pytest.param(
            {"probes": {"nolima": {"depths": 50}}},
            ["probes.nolima.depths", "50", "list"],
            id="wrong type of a nested value",
        ),
        pytest.param(
            {"scores": {"locos": {"formul": "needle_phi"}}},
            ["scores.locos", "unknown key 'formul'", "did you mean 'formula'?"],
            id="unknown key",
        ),
        pytest.param({"modles": {}}, ["'modles'", "did you mean 'models'?"], id="unknown top key"),
        pytest.param(
            {"models": {"tiny": {"source": {"folder": "no/such/model"}}}},
            ["models.tiny.source.folder", "no/such/model"],
            id="missing model folder",
        ),
        pytest.param(
            {"probes": {"nolima": {"needles": "no/such.json"}}},
            ["probes.nolima.needles", "no/such.json"],
            id="missing needles",
        ),
        pytest.param(
            {"probes": {"nolima": {"haystacks": "no/such/folder"}}},
            ["probes.nolima.haystacks", "no/such/folder"],
            id="missing haystacks",
        ),
        pytest.param(
            {"probes": {"nolima": {"context_lengths": [10]}}},
            ["probes.nolima.context_lengths", "10", "needle"],
            id="context shorter than needle and question",
        ),
        pytest.param({"ablation": {"k": [0]}}, ["ablation.k", "0"], id="k of zero"),
        pytest.param(
            {"ablation": {"k": [1, 33]}},
            ["ablation.k", "33", "32 heads", "tiny"],
            id="more than all heads",
        ),
        pytest.param(
            {"scores": {"locos": {"dataset": "nolma"}}},
            ["scores.locos.dataset", "'nolma'", "did you mean 'nolima'?"],
            id="unknown dataset",
        ),
        pytest.param(
            {"selectors": {"locos": {"score": "locus"}}},
            ["selectors.locos.score", "'locus'", "did you mean 'locos'?"],
            id="unknown score",
        ),
        pytest.param(
            {"scores": {"locos": {"formula": "needle_phy - off_phi"}}},
            ["scores.locos", "needle_phy"],
            id="unknown column",
        ),
        pytest.param(
            {"scores": {"locos": {"formula": "needle_phi - * off_phi"}}},
            ["scores.locos"],
            id="formula that is no SQL",
        ),
        pytest.param(
            {"scores": {"locos": {"formula": "(SELECT count(*) FROM read_csv('/etc/passwd'))"}}},
            ["scores.locos"],
            id="formula that reads a file",
        ),
        pytest.param(
            {"models": {"../outside": {"source": {"folder": "data/models/tiny"}}}},
            ["models", "'../outside'"],
            id="name that leaves the results",
        ),
    ],
)
def test_a_bad_config_is_one_line_that_names_the_key(bare, tmp_path, no_torch, value, words):
    line = refused(bare, *overlay(tmp_path, value), env=no_torch)
    assert [word for word in words if word not in line] == [], line


def test_a_nested_value_given_on_the_command_line_is_explained(bare, no_torch):
    line = refused(bare, "--config", "ablation={k: 3}", env=no_torch)
    assert "ablation" in line, line
    assert "--configfile" in line, line


def bad_needles(folder: Path, bare: Project, text: str | None) -> tuple[Path, list[str]]:
    """Write a needle file, without {CHAR} if no text is given, and an overlay that names it."""
    path = folder / "bad.json"
    if text is None:
        needles = (bare.folder / "data/models/tiny/needles.json").read_text(encoding="utf-8")
        text = needles.replace("{CHAR} lives", "Somebody lives")
    path.write_text(text, encoding="utf-8")
    return path, overlay(folder, {"probes": {"nolima": {"needles": str(path)}}})


@pytest.mark.parametrize(
    "text", ["needles: [", json.dumps([{"id": "a"}])[:-1], ""], ids=["yaml", "cut off", "empty"]
)
def test_a_needle_file_that_is_not_json_is_named(bare, tmp_path, no_torch, text):
    path, arguments = bad_needles(tmp_path, bare, text)
    line = refused(bare, *arguments, env=no_torch)
    assert str(path) in line and "JSON" in line, line


def test_a_needle_without_a_place_for_the_character_is_named(bare, tmp_path, no_torch):
    path, arguments = bad_needles(tmp_path, bare, None)
    line = refused(bare, *arguments, env=no_torch)
    assert str(path) in line and "tiny-lives" in line and "{CHAR}" in line, line


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "balanced"])
def test_a_gpu_asked_for_where_there_is_none_is_refused(bare, tmp_path, device):
    # A machine without a GPU, wherever the test runs: no driver's tool, no visible device.
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "which"):
        (tools / name).symlink_to(shutil.which(name) or name)
    env = environment() | {"PATH": os.fspath(tools), "CUDA_VISIBLE_DEVICES": ""}
    value = {"models": {"tiny": {"device": device}}}
    line = refused(bare, *overlay(tmp_path, value), env=env)
    assert "models.tiny.device" in line and "no GPU" in line, line
