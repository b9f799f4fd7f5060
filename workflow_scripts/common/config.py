"""The config checked before any job runs: every mistake is one line that names its key."""

from __future__ import annotations

import copy
import difflib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from workflow_scripts.common.errors import UserError

Config = dict[str, Any]

SCHEMA_FILE = "rules/schemas/config.schema.yaml"

_OVERLAY = (
    " (nested values given with --config arrive as strings: put them into a YAML file and pass it "
    "with --configfile)"
)


def validate(
    config: Mapping[str, Any],
    root: Path,
    *,
    check_score: Callable[[str, Mapping[str, Any]], Any],
    check_sources: Callable[[str, Mapping[str, Any]], Any],
) -> Config:
    """Return the config completed by its defaults.

    Parameters
    ----------
    config
        As Snakemake read and merged it.
    root
        Folder of the workflow, where the schema is.
    check_score
        Raises UserError for a row of `scores:` that cannot work; given its key and the row.
    check_sources
        The same for a row of `probes:` and the user's files that it names.

    Raises
    ------
    UserError
        One line that names the key, what is wrong and how to mend it.
    """
    schema = yaml.safe_load((root / SCHEMA_FILE).read_text(encoding="utf-8"))
    completed = copy.deepcopy(dict(config))
    errors = sorted(Draft202012Validator(schema).iter_errors(completed), key=_depth_first)
    if errors:
        raise UserError("config: " + _describe(_deepest(errors[0])))
    _fill_defaults(completed, schema, schema["$defs"])
    _check_references(completed)
    for name, row in completed["models"].items():
        _check_model(name, row)
    for name, row in completed["probes"].items():
        _check_probes(name, row)
        check_sources(name, row)
    for name, row in completed["scores"].items():
        check_score(name, row)
    _check_head_counts(completed)
    return completed


def _depth_first(error: ValidationError) -> tuple[int, str]:
    return -len(error.absolute_path), str(list(error.absolute_path))


def _deepest(error: ValidationError) -> ValidationError:
    """Return the cause of a failed `oneOf` in the alternative that fits best."""
    while error.context:
        by_branch: dict[Any, list[ValidationError]] = {}
        for cause in error.context:
            by_branch.setdefault(cause.schema_path[0], []).append(cause)
        best = min(by_branch.values(), key=_misfit)
        error = best[0]
    return error


def _misfit(errors: list[ValidationError]) -> tuple[int, int]:
    """Rank alternatives: one whose required keys are there was meant."""
    return sum(error.validator in ("required", "type") for error in errors), len(errors)


def _describe(error: Any) -> str:
    """Return one line for a schema violation."""
    key = ".".join(map(str, error.absolute_path)) or "top level"
    found, rule = error.instance, error.validator_value
    overlay = _OVERLAY if isinstance(found, str) else ""
    if error.validator == "additionalProperties":
        known = list(error.schema.get("properties", {}))
        name = next(name for name in found if name not in known)
        return f"{key}: unknown key '{name}'{_suggest(name, known)}"
    if error.validator == "required":
        name = next(name for name in rule if name not in found)
        return f"{key}: key '{name}' is missing"
    if error.validator == "type":
        return f"{key}: {found!r} is a {_type(found)}, expected a {_type_name(rule)}{overlay}"
    if error.validator == "enum":
        return f"{key}: {found!r} is not one of {', '.join(map(str, rule))}{_suggest(found, rule)}"
    if error.validator == "minimum":
        return f"{key}: {found!r} is too small; the least is {rule}"
    if error.validator == "maximum":
        return f"{key}: {found!r} is too large; the most is {rule}"
    if error.validator == "pattern":
        return f"{key}: {found!r} does not have the form {rule}"
    if error.validator in ("minItems", "minProperties", "minLength"):
        return f"{key}: is empty; give at least one entry"
    return f"{key}: {error.message}"


def _type(value: Any) -> str:
    names = {bool: "boolean", str: "string", int: "whole number", float: "number", list: "list"}
    return "nothing" if value is None else names.get(type(value), "mapping")


def _type_name(rule: str) -> str:
    return {"object": "mapping", "array": "list", "integer": "whole number"}.get(rule, rule)


def _suggest(name: Any, known: Iterable[Any]) -> str:
    """Return the nearest known name as a question, and the known names."""
    names = [str(item) for item in known]
    near = difflib.get_close_matches(str(name), names, n=1)
    return (f"; did you mean '{near[0]}'?" if near else "") + f" (known: {', '.join(names)})"


def _fill_defaults(value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> None:
    """Set every missing key that has a default."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rsplit("/", 1)[-1]]
    if not isinstance(value, dict):
        return
    properties = schema.get("properties", {})
    for name, rule in properties.items():
        if name not in value and "default" in rule:
            value[name] = copy.deepcopy(rule["default"])
    for name, item in value.items():
        rule = properties.get(name, schema.get("additionalProperties"))
        if isinstance(rule, dict):
            _fill_defaults(item, rule, definitions)


def _check_references(config: Config) -> None:
    """Check that rows name rows that exist, and of the right split."""
    datasets, scores = config["probes"], config["scores"]
    calibration = config["ablation"]["calibration"]["dataset"]
    for name, row in scores.items():
        if "patching" in row and row["patching"] not in config["patching"]:
            raise UserError(
                f"config: scores.{name}.patching: unknown patching '{row['patching']}'"
                f"{_suggest(row['patching'], config['patching'])}"
            )
    named = [
        (f"{table}.{name}.dataset", row["dataset"])
        for table in ("scores", "patching")
        for name, row in config[table].items()
        if "dataset" in row
    ]
    named += [(f"tasks.{name}.dataset", row["dataset"]) for name, row in config["tasks"].items()]
    named.append(("ablation.calibration.dataset", calibration))
    for key, dataset in named:
        if dataset not in datasets:
            raise UserError(
                f"config: {key}: unknown dataset '{dataset}'{_suggest(dataset, datasets)}"
            )
    for name, row in config["selectors"].items():
        if "score" in row and row["score"] not in scores:
            raise UserError(
                f"config: selectors.{name}.score: unknown score '{row['score']}'"
                f"{_suggest(row['score'], scores)}"
            )
    for name, row in config["tasks"].items():
        if datasets[row["dataset"]]["split"] == "detect":
            raise UserError(
                f"config: tasks.{name}.dataset: '{row['dataset']}' has split detect; evaluate on a "
                "dataset with split evaluate"
            )
    if datasets[calibration]["split"] == "evaluate":
        raise UserError(
            f"config: ablation.calibration.dataset: '{calibration}' has split evaluate; calibrate "
            "on a dataset with split detect"
        )


def _check_model(name: str, row: Mapping[str, Any]) -> None:
    """Check what can be seen of a model without loading it."""
    folder = row["source"].get("folder")
    if folder is not None and not (Path(folder) / "config.json").is_file():
        raise UserError(
            f"config: models.{name}.source.folder: {folder} has no config.json; name a folder "
            "saved by save_pretrained"
        )
    # A machine with a GPU has its driver's tool; torch is asked only where the tool is missing.
    wants_gpu = row["device"].startswith("cuda") or row["device"] == "balanced"
    if wants_gpu and shutil.which("nvidia-smi") is None:
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                f"config: models.{name}.device: {row['device']} asked for, but there is no GPU "
                "here; set device: cpu or auto"
            )


def _check_probes(name: str, row: Mapping[str, Any]) -> None:
    """Check that the files a row of probes names exist."""
    for key in ("needles", "haystacks"):
        if key in row and not Path(row[key]).exists():
            raise UserError(f"config: probes.{name}.{key}: {row[key]} does not exist")


def _check_head_counts(config: Config) -> None:
    """Check k against the heads of every model whose config lies on this machine."""
    most = max(config["ablation"]["k"])
    for name, row in config["models"].items():
        if "folder" not in row["source"]:
            continue
        path = Path(row["source"]["folder"]) / "config.json"
        model = json.loads(path.read_text(encoding="utf-8"))
        model = model.get("text_config", model)
        heads = model.get("num_hidden_layers", 0) * model.get("num_attention_heads", 0)
        if heads and most > heads:
            raise UserError(
                f"config: ablation.k: {most} is more than the {heads} heads of model {name}"
            )
