"""A Slurm cluster of one node on this machine: the real daemons, in a folder of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path

from daemons import daemon, free_ports, install

START_S = 60

# Cores, memory and GPUs are only counted, so they may be more than this machine has.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=sched_interval=1,sched_min_interval=0
GresTypes=gpu
MinJobAge=86400
KillWait=1
MailProg=/bin/true
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=64000 Gres=gpu:4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster; its commands need `environment`."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def command(self, *words: str) -> str:
        """Run a command of Slurm and return what it says."""
        environment = os.environ | self.environment
        return subprocess.run(
            words, env=environment, capture_output=True, text=True, check=True
        ).stdout

    def jobs(self) -> list[dict[str, str]]:
        """Return the fields that scontrol shows of every job, finished ones too, oldest first."""
        text = self.command("scontrol", "--oneliner", "show", "job")
        words = [line.split() for line in text.splitlines() if line.startswith("JobId=")]
        jobs = [dict(word.split("=", 1) for word in line if "=" in word) for line in words]
        return sorted(jobs, key=lambda job: int(job["JobId"]))


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start munge, slurmctld and slurmd, and stop them in the end."""
    install("munged slurmctld slurmd sbatch scontrol", "munge slurmctld slurmd slurm-client")
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    text = CONFIG.format(host=host, user=getuser(), folder=folder, ports=free_ports(2))
    (folder / "slurm.conf").write_text(text)
    # Plain files, as slurmd notes: counting them needs no device.
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-3]\n")
    for index in range(4):
        (folder / f"gpu{index}").touch()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    _write_srun(folder)
    cluster = Cluster(folder)
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    with ExitStack() as daemons:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            log = folder / f"{command[0]}.log"
            daemons.enter_context(daemon(command, log, os.environ | cluster.environment))
        _wait_for_node(cluster)
        try:
            yield cluster
        finally:
            cluster.command("scancel", "--user", getuser())


def _write_srun(folder: Path) -> None:
    """Write an srun that knows this cluster: the plugin hides SLURM_CONF from the one it starts."""
    srun = folder / "bin" / "srun"
    srun.parent.mkdir()
    real = shutil.which("srun")
    srun.write_text(f"#!/bin/sh\nSLURM_CONF='{folder}/slurm.conf' exec {real} \"$@\"\n")
    srun.chmod(0o755)


def _wait_for_node(cluster: Cluster) -> None:
    """Wait until the node takes jobs."""
    deadline = time.monotonic() + START_S
    state = ""
    while state != "idle":
        logs = [path.read_text() for path in sorted(cluster.folder.glob("*.log"))]
        assert time.monotonic() < deadline, "\n".join([f"node is '{state}'", *logs])
        time.sleep(0.2)
        try:
            state = cluster.command("sinfo", "--noheader", "--format=%t").strip()
        except subprocess.CalledProcessError as error:
            state = error.stderr
