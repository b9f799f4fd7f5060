"""Digests of the sources that decide the numbers in the store, beside the versions they belong to.

After a change of such a source, decide whether its version in `common/versions.py` must be raised, then
record what the sources are now:

    python -m tests.unit.accept_sources
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workflow_scripts.common import versions
from workflow_scripts.common.code_digest import bare_source, project_modules

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/data/source_digests.json"
COMMAND = "python -m tests.unit.accept_sources"

SCRIPTS = {
    "PROBES_VERSION": "probes/tokenize_probes.py",
    "LENS_VERSION": "lenses/train_lens.py",
    "CAPTURE_VERSION": "activations/capture.py",
    "CALIBRATION_VERSION": "ablation/calibrate.py",
    "PATCHING_VERSION": "patching/patch.py",
    "ABLATION_VERSION": "ablation/generate.py",
}
"""The script that makes what each version stands for; what it imports is guarded too."""

NEUTRAL = {
    # Messages, logs, the file around the numbers, and keys, whose own change makes new keys.
    "common/errors.py",
    "common/script.py",
    "common/artifacts.py",
    "common/digests.py",
    "common/layout.py",
    "common/versions.py",
    # Which heads are ablated: the head sets stand in the key themselves.
    "ablation/selection.py",
    "scores/ranking.py",
    "scores/pooling.py",
}
"""Imported modules that decide no number of an artifact."""

Record = dict[str, dict[str, Any]]


def present() -> Record:
    """Return each version with the digests of its sources, as they are now."""
    package = ROOT / "workflow_scripts"
    record: Record = {}
    for name, script in SCRIPTS.items():
        modules = {
            path.relative_to(package).as_posix(): bare_source(path.read_text(encoding="utf-8"))
            for path in project_modules(package / script, ROOT)
        }
        # A package's file that holds no code cannot change a number.
        sources = {
            module: hashlib.sha256(code.encode()).hexdigest()[:16]
            for module, code in sorted(modules.items())
            if module not in NEUTRAL and code
        }
        record[name] = {"version": getattr(versions, name), "sources": sources}
    return record


def recorded() -> Record:
    """Return what was accepted last."""
    return json.loads(RECORD.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def undecided(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a message for each version whose record does not fit the present sources."""
    messages = []
    for name, entry in now.items():
        old = before.get(name, {"version": None, "sources": {}})
        names = sorted(entry["sources"].keys() | old["sources"].keys())
        changed = [n for n in names if entry["sources"].get(n) != old["sources"].get(n)]
        if entry["version"] != old["version"]:
            messages.append(f"{name} is {entry['version']}, recorded {old['version']}: {COMMAND}")
        elif changed:
            messages.append(
                f"{name} is still {entry['version']}, but {', '.join(changed)} changed. Do the same "
                f"inputs give other numbers now? Then raise {name} in "
                "workflow_scripts/common/versions.py, so that old artifacts are made again. "
                f"Either way, record the decision: {COMMAND}"
            )
    return messages


if __name__ == "__main__":
    for message in undecided(recorded() if RECORD.exists() else {}, present()):
        print("accepted:", message.split(". ")[0])
    RECORD.write_text(json.dumps(present(), indent=2) + "\n", encoding="utf-8")
