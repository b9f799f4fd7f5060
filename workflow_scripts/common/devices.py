"""GPUs of one machine, shared out among the jobs that run there at once."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


def take_gpu(names: Sequence[str], *, poll_seconds: float = 1.0) -> int:
    """Take a GPU that no other job of this user holds; wait until there is one.

    It is held by a lock on a file, which the system releases when the process ends, however it ends.

    Parameters
    ----------
    names
        What identifies each visible GPU on this machine, such as its UUID.
    poll_seconds
        Pause before looking again where all are held.

    Returns
    -------
    int
        Its index in `names`.
    """
    folder = Path(tempfile.gettempdir()) / f"locos-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    while True:
        for index, name in enumerate(names):
            # Left open on purpose: closing it would release the lock.
            handle = os.open(folder / f"{name}.lock", os.O_CREAT | os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
            else:
                return index
        time.sleep(poll_seconds)
