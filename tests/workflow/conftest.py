"""A finished run of the whole workflow, and copies of it for the tests to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from snakemake_project import Project, Run, copied_project, environment, with_fewer_answers


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Run]:
    """The main target made once; never changed by a test."""
    project = copied_project(tmp_path_factory.mktemp("finished") / "a project")
    return project, project.make()


@pytest.fixture(scope="session")
def fewer_answers(
    finished: tuple[Project, Run], tmp_path_factory: pytest.TempPathFactory
) -> Project:
    """The finished run gone on with fewer answers; what it needs no longer stays in its store."""
    project = Project(tmp_path_factory.mktemp("fewer-answers") / "project")
    shutil.copytree(finished[0].folder, project.folder)
    project.edit_config(with_fewer_answers)
    project.make()
    return project


@pytest.fixture
def project(finished: tuple[Project, Run], tmp_path: Path) -> Project:
    """A copy of the finished run, Snakemake's records included, to be changed at will."""
    folder = tmp_path / "a copy"
    shutil.copytree(finished[0].folder, folder)
    return Project(folder)


@pytest.fixture
def clone(finished: tuple[Project, Run], tmp_path: Path) -> Project:
    """A fresh copy of the project, newer than the store that was copied into it."""
    folder = tmp_path / "a clone"
    # As cp -r does: the copied files are new, in no particular order.
    shutil.copytree(
        finished[0].folder / "results/store",
        folder / "results/store",
        copy_function=shutil.copyfile,
    )
    project = copied_project(folder)
    for path in folder.rglob("*"):
        if "results" not in path.parts:
            path.touch()
    return project


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing torch ends in a traceback."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('torch was imported')\n")
    return environment() | {"PYTHONPATH": str(tmp_path)}
