"""Weights bring no code with them, and a model that does is announced."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workflow_scripts.common.errors import UserError
from workflow_scripts.common.models import Source, load_config, load_model, source_of_rule

TINY = Path("data/models/tiny")


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


def test_weights_in_a_pickle_are_refused_and_not_opened(tmp_path: Path) -> None:
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(ran)))
    with pytest.raises(UserError, match="cannot load its model: .*safetensors"):
        load_model(Source(str(folder)), dtype="float32", device="cpu")
    assert not ran.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert ran.exists()


def test_code_beside_the_weights_is_not_run_unless_asked_for(tmp_path: Path) -> None:
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "configuration_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    with pytest.raises(UserError, match="trust_remote_code"):
        load_config(Source(str(folder)))
    assert not ran.exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_a_model_that_may_run_its_own_code_is_announced(
    trusted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"source": {"folder": "some/folder"}, "trust_remote_code": trusted}
    rule = SimpleNamespace(config={"models": {"own": row}}, wildcards=SimpleNamespace(model="own"))
    with caplog.at_level(logging.WARNING, logger="locos"):
        source_of_rule(rule)
    assert ("some/folder: runs code" in caplog.text) == trusted
