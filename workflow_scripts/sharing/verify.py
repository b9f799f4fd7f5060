"""Read every artifact of a store and name those that are damaged or lie in the wrong place.

python -m workflow_scripts.sharing.verify STORE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from workflow_scripts.common.errors import UserError
from workflow_scripts.sharing.artifacts import check_artifact, store_files


def verify(store: Path) -> tuple[int, list[str]]:
    """Return the number of artifacts in a store, and a line for each that is not as it should be."""
    names, errors = store_files(store), []
    for name in names:
        try:
            check_artifact(store, name)
        except UserError as error:
            errors.append(str(error))
    return len(names), errors


def main() -> None:
    """Verify the store that is named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("store", type=Path)
    count, errors = verify(parser.parse_args().store)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    print(f"{count} artifacts, {len(errors)} of them damaged or misplaced")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
