"""How a Snakemake script starts: logging to the rule's log, user errors as one line."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from workflow_scripts.common.errors import UserError

log = logging.getLogger("locos")

_FREE = "free some space, or name a folder on another disk as store: in the config, and run again"
_OWN = "put a store of your own over this one: store: for yours, shared_stores: for this"
NO_ROOM = {errno.ENOSPC: _FREE, errno.EDQUOT: _FREE, errno.EROFS: _OWN, errno.EACCES: _OWN}
"""What to do about a disk that takes no file, by the number of the operating system's error."""


def run_script(
    main: Callable[[Any], None],
    snakemake: Any,
    artifacts: Iterable[Sequence[str]] | None = None,
) -> None:
    """Run a script's main function on the `snakemake` object, unless its outputs are there already.

    Messages go to the terminal and to the rule's log file. A `UserError`, a full and a read-only disk
    become one line and exit status 1; anything else is a bug and keeps its traceback, in the log too.

    Parameters
    ----------
    main
        Makes the outputs that are not there.
    snakemake
        The object that Snakemake gives a script.
    artifacts
        The outputs, those together that are of use together only; None if all are.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if snakemake.log:
        handlers.append(logging.FileHandler(snakemake.log[0], mode="w", encoding="utf-8"))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=handlers
    )
    try:
        made = [_made_meanwhile(files) for files in artifacts or [snakemake.output]]
        if not all(made):
            main(snakemake)
    except UserError as error:
        log.error("error: %s", error)
        sys.exit(1)
    except OSError as error:
        if error.errno not in NO_ROOM:
            log.exception("unexpected error in rule %s", snakemake.rule)
        else:
            log.error("error: %s: %s; %s", snakemake.output[0], error, NO_ROOM[error.errno])
        sys.exit(1)
    except Exception:
        log.exception("unexpected error in rule %s", snakemake.rule)
        sys.exit(1)


def _made_meanwhile(files: Sequence[str]) -> bool:
    """Return whether an artifact's files are there, made by another run or by a job of another size.

    Snakemake leaves the outputs of the store where they are; those of other rules it deletes before.
    What is not complete is removed here.
    """
    present = [path for path in map(Path, files) if path.exists()]
    if present and len(present) == len(files):
        log.info("%s: is there already and stays; to make it again, delete it", files[0])
        return True
    for path in present:
        path.unlink()
    return False
