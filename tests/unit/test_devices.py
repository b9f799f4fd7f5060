"""Jobs on a machine with several GPUs take one each."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from workflow_scripts.common.devices import take_gpu
from workflow_scripts.common.models import choose_device

JOB = """
import sys
from workflow_scripts.common.devices import take_gpu
print(take_gpu(["first", "second"], poll_seconds=0.01), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def own_locks(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def start_job() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", JOB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.usefixtures("own_locks")
def test_jobs_take_one_gpu_each_and_the_next_waits_until_one_is_killed() -> None:
    jobs = [start_job(), start_job()]
    taken = [job.stdout.readline().strip() for job in jobs]
    assert sorted(taken) == ["0", "1"]
    waiting = start_job()
    jobs[1].kill()
    assert waiting.stdout.readline().strip() == taken[1]
    for job in (jobs[0], waiting):
        job.communicate()


@pytest.mark.usefixtures("own_locks")
@pytest.mark.parametrize(("device", "count"), [("cuda", 3), ("auto", 3)])
def test_of_several_gpus_a_free_one_is_chosen(monkeypatch, device, count) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}")
    )
    assert take_gpu(["gpu-0"]) == 0
    assert choose_device(device) == "cuda:1"


@pytest.mark.parametrize("device", ["cuda:1", "cuda", "cpu"])
def test_a_named_gpu_or_the_only_one_is_used_as_it_is(monkeypatch, device) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3 if device == "cuda:1" else 1)
    assert choose_device(device) == device
