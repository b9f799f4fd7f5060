"""A finished run, its pages, and a headless Chromium to open them in."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import add_trace, compare_page, hostile_trace, report_page, use_converted_model
from selenium import webdriver

from tests.workflow.snakemake_project import Project, copied_project


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run of the planted model up to its pages; its spaces are in every path."""
    project = copied_project(tmp_path_factory.mktemp("pages") / "a project")
    use_converted_model(project)
    add_trace(project)
    project.make("results/tiny/report.html")
    project.make("results/compare.html")
    return project


@pytest.fixture(scope="session")
def page(project: Project) -> Path:
    return project.folder / "results/tiny/report.html"


@pytest.fixture(scope="session")
def hostile_page(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report page of a run whose questions and answers are HTML."""
    return report_page(project.folder, tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="session")
def comparison(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page that shows the planted model beside a second one of other values."""
    return compare_page(project.folder, tmp_path_factory.mktemp("comparison"))


@pytest.fixture(scope="session")
def trace(project: Project) -> Path:
    """The page of an answer that the planted model reads from a document."""
    project.make("results/tiny/traces/kiasma.html")
    return project.folder / "results/tiny/traces/kiasma.html"


@pytest.fixture(scope="session")
def hostile_trace_page(
    project: Project, trace: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The page of the same trace, its question, answer and source tokens HTML."""
    return hostile_trace(project.folder, tmp_path_factory.mktemp("hostile trace"))


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    install = Path(__file__).parents[1] / "install_packages.sh"
    wanted = ["chromium chromedriver", "chromium chromium-driver"]
    done = subprocess.run([install, *wanted], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    options = webdriver.ChromeOptions()
    # Without a sandbox it also runs as root in a container; the pages are the project's own.
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{flag}")
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    yield driver
    driver.quit()
