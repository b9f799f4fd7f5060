"""What the profile for Kubernetes asks for, by a dry run."""

from __future__ import annotations

import subprocess
import sys

from snakemake_project import TARGET, Run, copied_project, environment


def test_64_shards_are_64_jobs_with_gpus_that_wait_for_none_of_each_other(tmp_path):
    project = copied_project(tmp_path / "project")
    asked = {"device": "balanced", "gpus": 2, "mem_mb": 1500, "runtime": 30}
    project.edit_config(lambda config: config["models"]["tiny"].update(asked))
    project.edit_config(lambda config: config["probes"]["nolima"].update(size=64, shards=64))
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
    assert len(captures) == 64
    assert not [line for line in run.lines_of("capture", "input") if ".zarr.zip" in line]
    for line in captures:
        assert "gpu=2" in line and "gpu_manufacturer=nvidia" in line
        assert "mem_mb=1500" in line and "runtime=30" in line
    assert run.jobs["score"] == 2
    assert not [line for line in run.lines_of("score", "resources") if "gpu=" in line]
