"""The conda environments, the lock and pyproject.toml name the same versions."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from transformers.utils import is_accelerate_available, is_gguf_available


def lock() -> dict[str, str]:
    lines = Path("requirements.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pins}


def runtime() -> list[Requirement]:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in project["dependencies"]]


def test_the_lock_satisfies_every_dependency() -> None:
    pins = lock()
    for requirement in runtime():
        assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement


def test_the_environment_has_what_transformers_needs_to_read_gguf() -> None:
    assert is_gguf_available()
    assert is_accelerate_available()


def test_no_pin_names_a_build_that_only_one_index_has() -> None:
    assert not [name for name, version in lock().items() if "+" in version]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_conda_environment_pins_the_dependencies_as_the_lock_does(name: str) -> None:
    dependencies = yaml.safe_load(Path(f"envs/{name}.yaml").read_text())["dependencies"]
    (pip,) = (entry["pip"] for entry in dependencies if isinstance(entry, dict))
    pins = dict(line.split("==") for line in pip if "==" in line)
    found = {key.lower().replace("_", "-"): version for key, version in pins.items()}
    assert found == {r.name.lower(): lock()[r.name.lower()] for r in runtime()}


def test_the_image_has_the_python_of_the_environments_and_the_lock_s_packages() -> None:
    lines = Path("Dockerfile").read_text().splitlines()
    (base,) = (line.split()[1] for line in lines if line.startswith("FROM "))
    for name in ("cpu", "cuda"):
        python = yaml.safe_load(Path(f"envs/{name}.yaml").read_text())["dependencies"][0]
        assert base == f"python:{python.removeprefix('python=')}-slim"
    installed = [line.split(" install ")[1] for line in lines if "pip install" in line]
    assert installed == ["--no-cache-dir -r requirements.lock"]
