"""A copy of the project on the planted model, and Snakemake started in it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
TARGET = "results/tiny/ablation.parquet"
DEADLINE_S = 600
_SAID = "said.txt"

# A job's heading in Snakemake's list, its lines, and the empty line that ends it.
_JOB = re.compile(r"^(?:local)?(?:rule|checkpoint) (\w+):\n((?:    .+\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """What a Snakemake command said.

    Attributes
    ----------
    code
        Its exit status.
    text
        All that it printed.
    """

    code: int
    text: str

    @property
    def jobs(self) -> Counter[str]:
        """How often each rule was listed or run."""
        return Counter(name for name, _ in _JOB.findall(self.text))

    def lines_of(self, rule: str, field: str) -> list[str]:
        """Return a field, such as output or wildcards, of every job of a rule."""
        wanted = re.compile(rf"^    {field}: (.+)$", re.MULTILINE)
        return [
            found
            for name, job in _JOB.findall(self.text)
            if name == rule
            for found in wanted.findall(job)
        ]


@dataclass(frozen=True)
class Project:
    """A copy of the project in a folder of its own."""

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", "--cores", "2", *arguments]

    @contextmanager
    def started(
        self, command: Sequence[str], *, env: dict[str, str] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a command in the folder; when the block ends, wait for its end. See `said`.

        It has a process group of its own, of which nothing outlives the block.
        """
        with (self.folder / _SAID).open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment() if env is None else env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
            process.wait(DEADLINE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def said(self) -> str:
        """Return what the command that was last started said."""
        return (self.folder / _SAID).read_text(encoding="utf-8")

    def lose(self, pattern: str) -> Path:
        """Delete one artifact of the planted model's store and return where it was."""
        artifact = next((self.folder / "results/store/tiny").glob(pattern))
        artifact.unlink()
        return artifact

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> Run:
        """Run Snakemake to its end."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=environment() if env is None else env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return Run(done.returncode, done.stdout)

    def make(self, target: str = TARGET) -> Run:
        """Make a target; it must succeed."""
        run = self.run(target)
        assert run.code == 0, run.text
        return run

    def would_run(self, target: str = TARGET) -> Run:
        """List what a target needs."""
        run = self.run("--dry-run", target)
        assert run.code == 0, run.text
        return run

    def edit_config(self, change: Callable[[dict[str, Any]], Any]) -> None:
        path = self.folder / "config.yaml"
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        change(config)
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")

    def replace(self, file: str, old: str, new: str) -> None:
        """Edit a file; the old text must be in it."""
        path = self.folder / file
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    def tables(self) -> dict[str, bytes]:
        """Return the bytes of every Parquet file and shard under results/."""
        results = self.folder / "results"
        return {
            path.relative_to(results).as_posix(): path.read_bytes()
            for suffix in ("parquet", "zarr.zip")
            for path in sorted(results.rglob(f"[!.]*.{suffix}"))
        }


def environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def copied_project(folder: Path) -> Project:
    """Copy the sources, without anything that was made from them; tiny.yaml becomes config.yaml."""
    made = shutil.ignore_patterns(".*", "results", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=made, dirs_exist_ok=True)
    shutil.copy(Path(__file__).with_name("tiny.yaml"), folder / "config.yaml")
    return Project(folder)


def with_fewer_answers(config: dict[str, Any]) -> None:
    """Keep one task and the top heads of one score: half of the jobs."""
    config["tasks"] = {"nonliteral": config["tasks"]["nonliteral"]}
    config["selectors"] = {"locos": {"score": "locos", "ends": ["top"]}}
