"""Models and data of the hub: known to the workflow without a network, refused in one line by a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from snakemake_project import ROOT, Project, copied_project, environment

MODELS = "qwen3-8b qwen3-14b qwen3-32b gemma-3-12b gemma-3-27b olmo-3.1-32b".split()
PAPER = ("--configfile", "config/paper.yaml")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project with its own config, before any run."""
    project = copied_project(tmp_path_factory.mktemp("bare"))
    (project.folder / "config.yaml").write_bytes((ROOT / "config.yaml").read_bytes())
    return project


def offline(folder: Path, env: dict[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which the hub does not answer and nothing is in its cache."""
    env = (env or environment()) | {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_CACHE": str(folder),
    }
    return {name: value for name, value in env.items() if name != "HF_HUB_OFFLINE"}


def test_a_dry_run_of_the_paper_lists_every_job(bare, tmp_path):
    run = bare.run("--dry-run", *PAPER, env=offline(tmp_path))
    assert run.code == 0, run.text
    # What is selected is known only once heads are scored, and with it the generations.
    expected = {
        "fetch_file": 10,
        "fetch_config": 6,
        "tokenize_probes": 5 * 6,
        "capture": 2 * 16 * 6,
        "score": 4 * 6,
        "select_heads": 6,
        "ablation": 6,
        "summary": 6,
    }
    assert {rule: run.jobs[rule] for rule in expected} == expected
    made = {line.split("/")[1] for line in run.lines_of("summary", "output")}
    assert made == set(MODELS)
    assert not (bare.folder / "results").exists()


def test_what_the_paper_s_models_cost_is_stated_without_a_network(tmp_path):
    project = copied_project(tmp_path / "project")
    (project.folder / "config.yaml").write_bytes((ROOT / "config.yaml").read_bytes())
    run = project.run("estimate", *PAPER, env=offline(tmp_path))
    assert run.code == 0, run.text
    assert run.jobs == {"estimate": 1}
    page = (project.folder / "results/estimate.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    totals = {row[0]: row[4] for row in rows if len(row) > 1 and row[1] == "all"}
    assert set(totals) == set(MODELS)
    # By hand, 36 layers: 2 * 36 * (2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 12288) + 4 * 151936 * 4096.
    assert totals["qwen3-8b"].endswith("weights 16.4")
    assert page in run.text


def test_the_paper_s_settings_are_those_of_its_public_code():
    paper = yaml.safe_load((ROOT / "config/paper.yaml").read_text(encoding="utf-8"))
    assert set(paper["models"]) == {*MODELS, "smollm2-135m"}
    probes = paper["probes"]
    assert len(probes["nolima"]["context_lengths"]) == len(probes["nolima"]["depths"]) == 10
    assert probes["nolima"]["context_lengths"] == [round(1000 + i * 4000 / 9) for i in range(10)]
    assert probes["nolima"]["depths"] == [round(100 * i / 9, 1) for i in range(10)]
    # 32 pairs of an entry and a test, 5 lengths, 5 depths.
    evaluation = probes["nonliteral"]
    assert evaluation["size"] == 32 * len(evaluation["context_lengths"]) * len(evaluation["depths"])
    assert paper["ablation"]["k"] == [1, 5, 10, 20, 50, 100]
    assert paper["ablation"]["calibration"] == {
        "dataset": "nolima",
        "probes": 50,
        "max_tokens": 5000,
    }


@pytest.mark.parametrize(
    "target", ["results/qwen3-8b/ablation.parquet", "results/qwen3-8b/probes/nolima.parquet"]
)
def test_a_hub_model_without_a_network_is_one_line_and_torch_is_not_imported(
    bare, no_torch, tmp_path, target
):
    value = {"models": {"qwen3-8b": {"source": {"hub": "Qwen/Qwen3-8B", "revision": "b" * 40}}}}
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(yaml.safe_dump(value), encoding="utf-8")
    run = bare.run(target, "--configfile", str(overlay), env=offline(tmp_path, no_torch))
    assert run.code == 1, run.text
    assert "Traceback" not in run.text
    (line,) = [line for line in run.text.splitlines() if "error" in line.lower()]
    assert line.startswith(f"error: model Qwen/Qwen3-8B at revision {'b' * 40}: cannot be fetched")
    assert "check the network, or name a local folder" in line
    assert not (bare.folder / "results").exists()


def test_data_without_a_network_is_one_line_of_its_job(project, tmp_path):
    """A local model on needles of the hub: the rule that fetches them says what to do."""
    remote = {"hub": "amodaresi/NoLiMa", "revision": "c" * 40, "file": "needlesets/needle_set.json"}
    project.edit_config(lambda config: config["probes"]["nolima"].update(needles=remote))
    run = project.run("results/tiny/probes/nolima.parquet", env=offline(tmp_path))
    assert run.code == 1, run.text
    assert "Traceback" not in run.text
    lines = {line.split("error: ")[1] for line in run.text.splitlines() if "error: " in line}
    (line,) = lines
    assert line.startswith(f"dataset amodaresi/NoLiMa at revision {'c' * 40}: cannot be fetched")
    assert line.endswith("fetch the file elsewhere and name its path in the config")


def test_a_context_beyond_the_model_is_refused_before_the_model_is_loaded(project):
    most = json.loads((project.folder / "data/models/tiny/config.json").read_text())
    positions = most["max_position_embeddings"]
    project.edit_config(
        lambda config: config["probes"]["nolima"].update(context_lengths=[150, positions - 5])
    )
    run = project.run("results/tiny/heads.parquet")
    assert run.code == 1, run.text
    assert "rule capture" not in run.text.split("Execute")[1]
    assert (
        f"probes.nolima.context_lengths: {positions - 5} and the 6 tokens of an answer exceed the "
        f"{positions} positions of model tiny; lower them" in run.text
    )
