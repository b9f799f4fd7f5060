"""Weights, code and packs of others do nothing by themselves."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from snakemake_project import Project, copied_project, environment

from tests.unit.test_security import Touch

LOCOS = "results/tiny/scores/locos.parquet"
PROBES = "results/tiny/probes/nolima.parquet"


@pytest.fixture
def mine(tmp_path: Path) -> Project:
    """A project whose model lies in the folder `mine`, ready to be changed."""
    project = copied_project(tmp_path / "project")
    shutil.copytree(project.folder / "data/models/tiny", project.folder / "mine")
    use(project, {"folder": "mine"})
    return project


def use(project: Project, source: dict[str, Any], **more: Any) -> None:
    row = {"source": source, **more}
    project.edit_config(lambda config: config["models"]["tiny"].update(row))


def refused(project: Project) -> str:
    """Return the line with which a capture is refused; nothing is captured."""
    run = project.run(LOCOS)
    assert run.code == 1 and "Traceback" not in run.text, run.text
    assert not list((project.folder / "results").rglob("*.zarr.zip"))
    return next(line for line in run.text.splitlines() if "error: " in line)


def test_weights_in_a_pickle_run_nothing(mine, tmp_path):
    (mine.folder / "mine/model.safetensors").unlink()
    pickled = pickle.dumps(Touch(tmp_path / "ran"))
    (mine.folder / "mine/pytorch_model.bin").write_bytes(pickled)
    assert "safetensors" in refused(mine)
    assert not (tmp_path / "ran").exists()


def test_code_beside_the_weights_runs_only_if_the_config_says_so(mine, tmp_path):
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (mine.folder / "mine/config.json").write_text(json.dumps(own), encoding="utf-8")
    ran = tmp_path / "ran"
    code = f"from pathlib import Path\nPath({str(ran)!r}).touch()\n"
    (mine.folder / "mine/configuration_own.py").write_text(code, encoding="utf-8")
    assert "trust_remote_code" in refused(mine)
    assert not ran.exists()
    use(mine, {"folder": "mine"}, trust_remote_code=True)
    assert "runs code from its repository (trust_remote_code)" in mine.run(LOCOS).text
    assert ran.exists()


def test_a_pack_whose_paths_leave_its_folders_places_nothing(finished, clone, tmp_path):
    clone.make("results/tiny/pack.zip")
    pack = clone.folder / "results/tiny/pack.zip"
    with zipfile.ZipFile(pack, "a") as archive:
        archive.writestr("inputs/../../outside.txt", "x")
    other = copied_project(tmp_path / "other" / "project")
    command = [sys.executable, "-m", "workflow_scripts.sharing.place", str(pack), "results/store"]
    done = subprocess.run(
        command, cwd=other.folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "inputs/../../outside.txt" in done.stderr
    assert not [path for path in (other.folder / "results").rglob("*") if path.is_file()]
    assert not list(tmp_path.rglob("outside.txt"))
