"""An S3 server on this machine: Ceph's object gateway, its monitor, and an OSD that keeps objects in memory."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from daemons import daemon, free_ports, install

START_S = 120

CONFIG = """
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{ports[0]}
ms bind msgr2 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
crash dir = {folder}
paxos propose interval = 0.05
osd objectstore = memstore
memstore device bytes = 1073741824
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
rgw frontends = beast endpoint=127.0.0.1:{ports[1]}
"""


@contextmanager
def running_server(folder: Path) -> Iterator[dict[str, str]]:
    """Start a server and return the environment with which Snakemake's plugin finds it."""
    install("ceph ceph-mon ceph-osd radosgw radosgw-admin", "ceph-common ceph-mon ceph-osd radosgw")
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()
    fsid, osd, ports = str(uuid.uuid4()), str(uuid.uuid4()), free_ports(2)
    (folder / "ceph.conf").write_text(CONFIG.format(folder=folder, fsid=fsid, ports=ports))
    environment = os.environ | {"CEPH_CONF": str(folder / "ceph.conf")}

    def run(command: str, *more: str) -> None:
        """Run a command until it succeeds: some come before the servers are ready."""
        deadline = time.monotonic() + START_S
        while True:
            done = subprocess.run(
                [*command.split(), *more],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=START_S,
                check=False,
            )
            if done.returncode == 0:
                return
            assert time.monotonic() < deadline, f"{command}: {done.stderr}"
            time.sleep(0.2)

    with ExitStack() as daemons:

        def start(command: str) -> None:
            log = folder / f"{command.split()[0]}.txt"
            daemons.enter_context(daemon(command.split(), log, environment))

        run(f"monmaptool --create --clobber --addv a v1:127.0.0.1:{ports[0]} --fsid {fsid} monmap")
        run("ceph-mon --mkfs -i a --monmap monmap")
        start("ceph-mon -f -i a")
        run(f"ceph osd new {osd}")
        run(f"ceph-osd --mkfs -i 0 --osd-uuid {osd}")
        # Where it asked the monitor for its config, an OSD forgets the cluster's fsid until the monitor
        # tells it, and its first commands may be refused as of the wrong fsid.
        start("ceph-osd -f -i 0 --no-mon-config")
        start("radosgw -f -n client.rgw --no-mon-config")
        access, secret = secrets.token_hex(8), secrets.token_hex(16)
        keys = ["--access-key", access, "--secret-key", secret]
        run("radosgw-admin user create --uid locos --display-name locos", *keys)
        yield {
            "SNAKEMAKE_STORAGE_S3_ENDPOINT_URL": f"http://127.0.0.1:{ports[1]}",
            "SNAKEMAKE_STORAGE_S3_ACCESS_KEY": access,
            "SNAKEMAKE_STORAGE_S3_SECRET_KEY": secret,
        }
