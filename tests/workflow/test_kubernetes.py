"""What the profile for Kubernetes asks for, by a dry run."""

from __future__ import annotations

import subprocess
import sys

from snakemake_project import TARGET, Run, copied_project, environment


def test_model_jobs_ask_for_their_gpus_and_others_for_none(tmp_path):
    project = copied_project(tmp_path / "project")
    asked = {"device": "balanced", "gpus": 2, "mem_mb": 1500, "runtime": 30}
    project.edit_config(lambda config: config["models"]["tiny"].update(asked))
    command = [sys.executable, "-m", "snakemake", "--workflow-profile", "profiles/kubernetes"]
    # A folder in the bucket's place: a dry run looks for the inputs.
    command += ["--default-storage-provider", "fs", "--default-storage-prefix", project.folder]
    done = subprocess.run(
        [*command, "--dry-run", TARGET],
        cwd=project.folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    run = Run(done.returncode, done.stdout + done.stderr)
    assert run.code == 0, run.text
    captures = run.lines_of("capture", "resources")
    assert len(captures) == 2
    for line in captures:
        assert "gpu=2" in line and "gpu_manufacturer=nvidia" in line
        assert "mem_mb=1500" in line and "runtime=30" in line
    assert run.jobs["score"] == 2
    assert not [line for line in run.lines_of("score", "resources") if "gpu=" in line]
