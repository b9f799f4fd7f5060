"""How a Snakemake script starts: logging to the rule's log, user errors as one line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from workflow_scripts.common.errors import UserError

log = logging.getLogger("locos")


def run_script(main: Callable[[Any], None], snakemake: Any) -> None:
    """Run a script's main function on the `snakemake` object.

    Messages go to the terminal and to the rule's log file. A `UserError` becomes one line and exit
    status 1; anything else is a bug and keeps its traceback, in the log too.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if snakemake.log:
        handlers.append(logging.FileHandler(snakemake.log[0], mode="w", encoding="utf-8"))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=handlers
    )
    try:
        main(snakemake)
    except UserError as error:
        log.error("error: %s", error)
        sys.exit(1)
    except Exception:
        log.exception("unexpected error in rule %s", snakemake.rule)
        sys.exit(1)
