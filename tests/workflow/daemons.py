"""Servers of other projects that tests start on this machine."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

INSTALL = Path(__file__).parents[1] / "install_packages.sh"


def install(programs: str, packages: str) -> None:
    """Make sure that programs are there, by installing their packages if need be."""
    done = subprocess.run(
        [INSTALL, programs, packages], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nothing listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def daemon(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a server in the foreground until the block ends, or this process, however it does."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait()
