"""Store and results in a bucket.

The S3 server is Ceph's object gateway (radosgw) with a monitor and an OSD that keeps its objects in
memory, from Debian's packages: a server that people run in production, checks signatures, and starts
in seconds. `install_s3.sh` installs it.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from snakemake_project import TARGET, Project, Run, copied_project, environment
from test_reruns import NOTHING, expensive

HERE = Path(__file__).parent
DEADLINE_S = 90


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return the environment with which Snakemake's plugin finds the server."""
    done = subprocess.run([HERE / "install_s3.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # A short path: those of Unix sockets are limited.
    folder = tmp_path_factory.mktemp("s3")
    port, access, secret = free_port(), secrets.token_hex(8), secrets.token_hex(16)
    command = [HERE / "start_s3.sh", folder, str(free_port()), str(port), access, secret]
    log = (folder / "start.log").open("w+", encoding="utf-8")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        )
        log.seek(0)
        assert done.returncode == 0, log.read()
        yield {
            "SNAKEMAKE_STORAGE_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "SNAKEMAKE_STORAGE_S3_ACCESS_KEY": access,
            "SNAKEMAKE_STORAGE_S3_SECRET_KEY": secret,
        }
    finally:
        log.close()
        for file in (folder / "run").glob("*.pid"):
            os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.fixture(scope="module")
def bucket(server: dict[str, str]) -> Any:
    resource = boto3.resource(
        "s3",
        endpoint_url=server["SNAKEMAKE_STORAGE_S3_ENDPOINT_URL"],
        aws_access_key_id=server["SNAKEMAKE_STORAGE_S3_ACCESS_KEY"],
        aws_secret_access_key=server["SNAKEMAKE_STORAGE_S3_SECRET_KEY"],
        region_name="us-east-1",
    )
    bucket = resource.Bucket("locos")
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            bucket.create()
            return bucket
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def objects(bucket: Any, prefix: str) -> dict[str, bytes]:
    """Return the shards and tables in a bucket by their paths below a prefix."""
    return {
        item.key.removeprefix(prefix): item.get()["Body"].read()
        for item in bucket.objects.filter(Prefix=prefix)
        if item.key.endswith((".parquet", ".zarr.zip"))
    }


def refuse_secrets(project: Project, server: dict[str, str], runs: list[Run]) -> None:
    for name in ("SNAKEMAKE_STORAGE_S3_ACCESS_KEY", "SNAKEMAKE_STORAGE_S3_SECRET_KEY"):
        secret = server[name].encode()
        files = [path for path in project.folder.rglob("*") if path.is_file()]
        assert len(files) > 100
        assert [path for path in files if secret in path.read_bytes()] == []
        assert [run for run in runs if server[name] in run.text] == []


def test_a_store_in_a_bucket_is_filled_by_one_and_used_by_the_next(
    finished, bucket, server, tmp_path
):
    expected = finished[0].tables()
    in_store = {k.removeprefix("store/"): v for k, v in expected.items() if k.startswith("store/")}
    runs = []
    for number, made in ((1, True), (2, False)):
        project = copied_project(tmp_path / f"clone {number}")
        project.edit_config(lambda config: config.update(store="s3://locos/store"))
        runs.append(project.run(TARGET, env=environment() | server))
        assert runs[-1].code == 0, runs[-1].text
        assert bool(expensive(runs[-1])) == made
        assert objects(bucket, "store/") == in_store
        own = {k: v for k, v in expected.items() if not k.startswith("store/")}
        assert project.tables() == own
        refuse_secrets(project, server, runs)
    stored = b"".join(item.get()["Body"].read() for item in bucket.objects.filter(Prefix="store/"))
    assert server["SNAKEMAKE_STORAGE_S3_SECRET_KEY"].encode() not in stored


def test_results_in_a_bucket_leave_none_here(finished, bucket, server, tmp_path):
    place = ["--default-storage-provider", "s3", "--default-storage-prefix", "s3://locos/b"]
    project = copied_project(tmp_path / "clone")
    first = project.run(*place, TARGET, env=environment() | server)
    assert first.code == 0, first.text
    assert objects(bucket, "b/results/") == finished[0].tables()
    assert not list((project.folder / "results").rglob("*.parquet"))
    again = project.run(*place, "--dry-run", TARGET, env=environment() | server)
    assert NOTHING in again.text
    refuse_secrets(project, server, [first, again])


def test_wrong_credentials_are_told_without_them(bucket, server, tmp_path):
    project = copied_project(tmp_path / "clone")
    project.edit_config(lambda config: config.update(store="s3://locos/store"))
    wrong = server | {"SNAKEMAKE_STORAGE_S3_SECRET_KEY": "not-the-secret"}
    run = project.run("--dry-run", TARGET, env=environment() | wrong)
    assert run.code == 1
    assert "not-the-secret" not in run.text
