"""Files of the hub and the web: fetched, checked and named, or refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from workflow_scripts.common.digests import canonical_json
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.layout import file_digests, file_path, remote_files
from workflow_scripts.data import fetch_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT = b'{"model_type": "llama"}'
ERRORS = {  # what the hub answers for a repository: status and its own code
    "gated": (403, "GatedRepo"),
    "missing": (401, "RepoNotFound"),
    "commitless": (404, "RevisionNotFound"),
    "empty": (404, "EntryNotFound"),
}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does, and plain files of a web address too."""

    def do_GET(self) -> None:
        name = self.path.removeprefix("/datasets").split("/")[2] if self.path.count("/") > 1 else ""
        status, code = ERRORS.get(name, (200, ""))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", '"etag"')
        self.send_header("Content-Length", str(len(CONTENT) if status == 200 else 0))
        self.end_headers()
        if status == 200 and self.command == "GET":
            self.wfile.write(CONTENT[:5] if name == "broken" else CONTENT)

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ask_hub(cache: Path, endpoint: str, *names: str, **env: str) -> list[str]:
    """Ask for the config of some repositories in a process of its own; return what is said."""
    code = (
        "import sys; from workflow_scripts.common.hub import hub_file\n"
        "from workflow_scripts.common.errors import UserError\n"
        "for name in sys.argv[2:]:\n"
        "    try: print(hub_file('owner/' + name, 'config.json', sys.argv[1], instead='DO THIS'))\n"
        "    except UserError as error: print(error)\n"
    )
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0", **env}
    done = subprocess.run(
        [sys.executable, "-c", code, COMMIT, *names],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_file_is_fetched_once_and_then_read_from_the_cache(tmp_path: Path, address: str) -> None:
    (first,) = ask_hub(tmp_path, address, "plain")
    assert Path(first).read_bytes() == CONTENT
    nowhere = "http://127.0.0.1:9"
    assert ask_hub(tmp_path, nowhere, "plain") == [first]
    assert ask_hub(tmp_path, nowhere, "plain", HF_HUB_OFFLINE="1") == [first]


def test_each_refusal_of_the_hub_is_a_line_that_says_what_to_do(
    tmp_path: Path, address: str
) -> None:
    gated, missing, commitless, empty = ask_hub(tmp_path, address, *ERRORS)
    assert f"licence at {address}/owner/gated" in gated and "HF_TOKEN, or DO THIS" in gated
    assert "no such repository" in missing and "HF_TOKEN, or DO THIS" in missing
    assert "no such commit" in commitless and COMMIT in commitless
    assert "holds no config.json" in empty


def test_a_hub_that_cannot_be_reached_is_named_at_once(tmp_path: Path) -> None:
    (line,) = ask_hub(tmp_path, "http://127.0.0.1:9", "plain")
    assert line.startswith(f"model owner/plain at revision {COMMIT}: cannot be fetched from http")
    assert line.endswith("check the network, or DO THIS")
    (line,) = ask_hub(tmp_path, "http://127.0.0.1:9", "plain", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in line and line.endswith("or DO THIS")


def fetched(folder: Path, source: dict[str, str]) -> SimpleNamespace:
    output = SimpleNamespace(file=str(folder / "f.json"), origin=str(folder / "f.json.origin.json"))
    fetch_file.main(
        SimpleNamespace(params=SimpleNamespace(spec=canonical_json(source)), output=output)
    )
    return output


def test_a_web_file_is_kept_with_its_origin(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = {"url": f"{address}/some", "revision": COMMIT, "file": "part/f.json"}
    output = fetched(tmp_path, source)
    assert Path(output.file).read_bytes() == CONTENT
    digest = sha256(CONTENT).hexdigest()
    origin = json.loads(Path(output.origin).read_text())
    assert origin == {**source, "sha256": digest, "bytes": len(CONTENT)}
    assert f"add sha256: {digest}" in caplog.text
    caplog.clear()
    fetched(tmp_path, {**source, "sha256": digest})
    assert not caplog.text


def test_a_file_of_another_content_is_refused_and_not_kept(tmp_path: Path, address: str) -> None:
    source = {"url": f"{address}/some", "revision": COMMIT, "file": "f.json", "sha256": "0" * 64}
    with pytest.raises(UserError, match=rf"sha256 is {sha256(CONTENT).hexdigest()}, the config"):
        fetched(tmp_path, source)
    assert not list(tmp_path.iterdir())


def test_a_web_address_that_does_not_answer_is_named(tmp_path: Path) -> None:
    source = {"url": "http://127.0.0.1:9/x", "revision": COMMIT, "file": "f.json"}
    with pytest.raises(UserError, match="http://127.0.0.1:9/x/.*/f.json: cannot be fetched .*path"):
        fetched(tmp_path, source)


def test_a_file_that_breaks_off_is_named_and_not_kept(tmp_path: Path, address: str) -> None:
    source = {"url": f"{address}/owner/broken", "revision": COMMIT, "file": "f.json"}
    with pytest.raises(UserError, match=rf"broken/{COMMIT}/f.json: cannot be fetched .*18 bytes"):
        fetched(tmp_path, source)
    assert not list(tmp_path.iterdir())


def test_a_pinned_remote_file_means_the_same_as_its_copy(tmp_path: Path) -> None:
    copy = tmp_path / "needles.json"
    copy.write_bytes(CONTENT)
    remote = {"hub": "a/b", "revision": COMMIT, "file": "sets/needles.json"}
    pinned = {**remote, "sha256": sha256(CONTENT).hexdigest()}
    assert file_digests([pinned]) == file_digests([str(copy)])
    assert file_digests([remote]) == {"needles.json": remote}
    parts = [{**remote, "file": f"part{i}/p.txt"} for i in (1, 2)]
    assert list(file_digests(parts)) == ["part1/p.txt", "part2/p.txt"]


def test_files_of_one_commit_lie_in_one_folder() -> None:
    one, other = (
        {"hub": "a/b", "revision": COMMIT, "file": f"part{i}/p.txt", "sha256": str(i) * 64}
        for i in (1, 2)
    )
    config = {"store": "s", "probes": {"x": {"needles": one, "haystacks": ["here.txt", other]}}}
    paths = [file_path(config, file) for file in (one, other)]
    assert remote_files(config) == dict(zip(paths, (one, other), strict=True))
    assert paths[0].removesuffix("part1/p.txt") == paths[1].removesuffix("part2/p.txt")
    assert file_path(config, "here.txt") == "here.txt"
    later = file_path(config, {**one, "revision": "f" * 40})
    assert later != paths[0] and later.endswith("/part1/p.txt")
