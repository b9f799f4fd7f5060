"""A row of `scores:` in the config with its defaults filled in, checked before any job runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workflow_scripts.common.errors import UserError
from workflow_scripts.scores.detectors import DETECTORS
from workflow_scripts.scores.formulas import check_formula
from workflow_scripts.scores.reductions import COLUMNS, DIRECTIONS, GATES, NEED_TOKEN, OFF, STEPS

POOLS = ("steps", "probes")
_CHOICES: dict[str, Iterable[str]] = {
    "direction": DIRECTIONS,
    "off": OFF,
    "steps": STEPS,
    "gate": GATES,
    "pool": POOLS,
    "compat": ("official",),
}
_KEYS = ("dataset", "formula", "detector", "permutations", *_CHOICES)


@dataclass(frozen=True)
class ScoreSettings:
    """How a score is computed; see `parse_score`.

    Attributes
    ----------
    name, dataset
        Key of the score and of the probes it is computed from.
    formula, detector
        One is set, the other None.
    columns
        Columns that the formula names.
    direction, off, steps, gate, pool
        As in the config, defaults filled in.
    permutations
        Label permutations of the contrastive detectors' filter; 0 for none.
    """

    name: str
    dataset: str
    formula: str | None
    detector: str | None
    columns: tuple[str, ...]
    direction: str
    off: str
    steps: str
    gate: str
    pool: str
    permutations: int


def check_score(name: str, row: Mapping[str, Any]) -> None:
    """Check a row of `scores:`: that of a score from evidence, or of a difference of two scores.

    Raises
    ------
    UserError
        See `parse_score`; or if a difference has other keys.
    """
    if "difference" not in row:
        parse_score(name, row)
    elif len(row) > 1:
        raise UserError(
            f"scores.{name}: a difference has just the key difference; set the others in the two "
            "scores that it names"
        )


def parse_score(name: str, row: Mapping[str, Any]) -> ScoreSettings:
    """Return the settings of a score that is computed from evidence.

    Parameters
    ----------
    name
        Key of the row under `scores:`.
    row
        dataset, and either formula or detector; optional: direction, off, steps, gate, pool,
        permutations, and `compat: official`, which makes `probes` the default pool. Or, for a
        causal score, just patching and metric.

    Raises
    ------
    UserError
        If a key or a value is unknown, or the keys do not fit each other.
    """
    key = f"scores.{name}"
    if "patching" in row:
        return _causal_score(name, row)
    for found in row:
        if found not in _KEYS:
            raise UserError(f"{key}.{found}: unknown key; known keys: {', '.join(_KEYS)}")
    for option, choices in _CHOICES.items():
        if option in row and row[option] not in choices:
            raise UserError(f"{key}.{option}: '{row[option]}' is not one of {', '.join(choices)}")
    if "dataset" not in row:
        raise UserError(f"{key}: names no dataset; add `dataset:` with a key of `probes:`")
    if ("formula" in row) == ("detector" in row):
        raise UserError(f"{key}: needs either `formula:` or `detector:`")
    official = row.get("compat") == "official"
    if official and row.get("pool") == "steps":
        raise UserError(f"{key}: `compat: official` pools probes; leave `pool: steps` out")
    default = _detector_defaults(key, row) if "detector" in row else _formula_defaults(key, row)
    chosen = default | {option: row[option] for option in default if option in row}
    if official and "pool" not in row:
        chosen["pool"] = "probes"
    columns: tuple[str, ...] = ()
    if "formula" in row:
        columns = tuple(check_formula(f"{key}.formula", row["formula"], COLUMNS))
        missing = sorted(NEED_TOKEN.intersection(columns))
        if chosen["steps"] == "prompt" and missing:
            raise UserError(
                f"{key}: `steps: prompt` has no generated token, so no {', '.join(missing)}; use "
                "columns of alpha, or other steps"
            )
    return ScoreSettings(
        name=name,
        dataset=row["dataset"],
        formula=row.get("formula"),
        detector=row.get("detector"),
        columns=columns,
        permutations=row.get("permutations", 0),
        **chosen,
    )


def _causal_score(name: str, row: Mapping[str, Any]) -> ScoreSettings:
    """Return the settings of a score from patching: its mean over probes, and nothing to choose."""
    if set(row) != {"patching", "metric"}:
        raise UserError(
            f"scores.{name}: a score from patching has just the keys patching and metric"
        )
    return ScoreSettings(
        name=name,
        dataset=row["patching"],
        formula=None,
        detector=None,
        columns=(),
        direction="raw",
        off="all",
        steps="answer",
        gate="none",
        pool="probes",
        permutations=0,
    )


def _formula_defaults(key: str, row: Mapping[str, Any]) -> dict[str, str]:
    if "permutations" in row:
        raise UserError(f"{key}.permutations: a formula does not use it; only a detector may")
    return {"direction": "raw", "off": "all", "steps": "answer", "gate": "passed", "pool": "steps"}


def _detector_defaults(key: str, row: Mapping[str, Any]) -> dict[str, str]:
    name = row["detector"]
    if name not in DETECTORS:
        raise UserError(f"{key}.detector: '{name}' is not one of {', '.join(sorted(DETECTORS))}")
    detector = DETECTORS[name]
    for option in ("direction", "off", "permutations"):
        if option in row and option not in detector.options:
            raise UserError(f"{key}.{option}: detector {name} does not use it; leave it out")
    if row.get("steps", detector.steps[0]) not in detector.steps:
        raise UserError(f"{key}.steps: detector {name} reads {' or '.join(detector.steps)} steps")
    permutations = row.get("permutations", 1)
    if not isinstance(permutations, int) or isinstance(permutations, bool) or permutations < 1:
        raise UserError(f"{key}.permutations: {permutations!r} is not a positive whole number")
    return {
        "direction": "raw",
        "off": "all",
        "steps": detector.steps[0],
        "gate": detector.gate,
        "pool": "steps",
    }
