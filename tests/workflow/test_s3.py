"""Store and results in buckets of a real S3 server; credentials stand in the environment alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import BotoCoreError, ClientError
from s3_server import running_server
from snakemake_project import TARGET, Project, Run, copied_project, environment, with_fewer_answers
from test_reruns import NOTHING, expensive

DEADLINE_S = 120
SECRETS = ("SNAKEMAKE_STORAGE_S3_ACCESS_KEY", "SNAKEMAKE_STORAGE_S3_SECRET_KEY")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with running_server(tmp_path_factory.mktemp("s3")) as variables:
        yield variables


def new_bucket(server: dict[str, str], name: str) -> Any:
    """Make a bucket, as soon as the server does."""
    bucket = boto3.resource(
        "s3",
        endpoint_url=server["SNAKEMAKE_STORAGE_S3_ENDPOINT_URL"],
        aws_access_key_id=server["SNAKEMAKE_STORAGE_S3_ACCESS_KEY"],
        aws_secret_access_key=server["SNAKEMAKE_STORAGE_S3_SECRET_KEY"],
        region_name="us-east-1",
    ).Bucket(name)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            bucket.create()
            return bucket
        except (BotoCoreError, ClientError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def objects(bucket: Any) -> dict[str, bytes]:
    return {item.key: item.get()["Body"].read() for item in bucket.objects.all()}


def tables(found: dict[str, bytes]) -> dict[str, bytes]:
    """Return the Parquet files and shards, by their paths below results/."""
    return {
        path.removeprefix("results/"): content
        for path, content in found.items()
        if path.endswith((".parquet", ".zarr.zip"))
    }


def clone(folder: Path) -> Project:
    """Copy the project, with nothing made in it."""
    project = copied_project(folder)
    project.edit_config(with_fewer_answers)
    return project


def completed(server: dict[str, str], project: Project, *arguments: str) -> Run:
    run = project.run(*arguments, env=environment() | server)
    assert run.code == 0, run.text
    return run


def assert_no_secret(server: dict[str, str], bucket: Any, project: Project, run: Run) -> None:
    """Look for the credentials in a project's files, in what a run said and in a bucket."""
    files = {str(path): path.read_bytes() for path in project.folder.rglob("*") if path.is_file()}
    assert any("/.snakemake/log/" in path for path in files)
    everything = files | objects(bucket) | {"said": run.text.encode()}
    for secret in (server[name].encode() for name in SECRETS):
        assert [path for path, content in everything.items() if secret in content] == []


def test_a_store_in_a_bucket_is_filled_by_one_and_used_by_the_next(fewer_answers, server, tmp_path):
    bucket = new_bucket(server, "team")
    expected = fewer_answers.tables()
    made = {"tokenize_probes": 2, "capture": 2, "calibrate": 1, "generate": 2}
    for person, jobs in (("ann", made), ("bob", {})):
        project = clone(tmp_path / person)
        project.edit_config(lambda config: config.update(store="s3://team/store"))
        run = completed(server, project, TARGET)
        assert expensive(run) == jobs
        own, shared = project.tables(), tables(objects(bucket))
        assert "tiny/ablation.parquet" in own and len(shared) == 7
        assert own.items() | shared.items() <= expected.items()
        assert_no_secret(server, bucket, project, run)


def test_results_in_a_bucket_leave_none_here_and_are_found_again(fewer_answers, server, tmp_path):
    bucket = new_bucket(server, "runs")
    store = fewer_answers.folder / "results/store"
    for path in store.rglob("*"):
        if path.is_file():
            key = f"results/store/{path.relative_to(store).as_posix()}"
            bucket.upload_file(str(path), key)
    project = clone(tmp_path / "clone")
    place = ["--default-storage-provider", "s3", "--default-storage-prefix", "s3://runs"]
    run = completed(server, project, *place, TARGET)
    assert expensive(run) == {}
    assert tables(objects(bucket)) == fewer_answers.tables()
    assert not list((project.folder / "results").rglob("*.parquet"))
    assert_no_secret(server, bucket, project, run)
    assert NOTHING in completed(server, project, *place, "--dry-run", TARGET).text


def test_wrong_credentials_are_refused_and_not_shown(server, tmp_path):
    project = clone(tmp_path / "clone")
    project.edit_config(lambda config: config.update(store="s3://team/store"))
    wrong = "not-the-secret-of-this-server"
    run = project.run("--dry-run", TARGET, env=environment() | server | {SECRETS[1]: wrong})
    assert run.code == 1
    assert "Failed to check existence of s3://team/store" in run.text and "403" in run.text
    assert wrong not in run.text
