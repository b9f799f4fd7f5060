"""The config checked before any job runs: every mistake is one line that names its key."""

from __future__ import annotations

import copy
import difflib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from workflow_scripts.common.errors import UserError
from workflow_scripts.common.layout import file_path, kv_tasks, model_config_path

Config = dict[str, Any]

SCHEMA_FILE = "rules/schemas/config.schema.yaml"

# JSON Schema takes 2.0 for an integer; Python's range() does not.
_Validator: Any = extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    ),
)

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
    _check_keys(completed, ())
    _drop_emptied_rows(completed)
    errors = sorted(_Validator(schema).iter_errors(completed), key=_depth_first)
    if errors:
        raise UserError("config: " + _describe(errors[0]))
    _fill_defaults(completed, schema, schema["$defs"])
    _check_references(completed)
    _check_texts(completed)
    _check_splits(completed)
    _check_retrieval(completed)
    _check_kv_plan(completed)
    _check_interventions(completed)
    _check_directions(completed)
    for name, row in completed["models"].items():
        _check_model(name, row)
    _check_files(completed)
    _check_stores(completed)
    for name, row in completed["probes"].items():
        check_sources(name, row)
    for name, row in completed["scores"].items():
        check_score(name, row)
    _check_known_models(completed)
    return completed


def check_devices(config: Config, *, elsewhere: bool) -> None:
    """Check that jobs will find the devices that models ask for.

    Parameters
    ----------
    elsewhere
        Whether jobs run on other machines, whose GPUs cannot be seen from here.

    Raises
    ------
    UserError
        If a model asks for a GPU and there is none, or leaves other machines to guess.
    """
    for name, row in config["models"].items():
        key, device = f"config: models.{name}.device", row["device"]
        if elsewhere:
            if device == "auto":
                raise UserError(
                    f"{key}: auto cannot be resolved for jobs on other machines; set cuda, balanced "
                    "or cpu"
                )
        # A machine with a GPU has its driver's tool; torch is asked only where the tool is missing.
        elif device not in ("auto", "cpu") and shutil.which("nvidia-smi") is None:
            import torch

            if not torch.cuda.is_available():
                raise UserError(
                    f"{key}: {device} asked for, but there is no GPU here; set device: cpu or auto"
                )


def _depth_first(error: ValidationError) -> tuple[int, str]:
    return -len(error.absolute_path), str(list(error.absolute_path))


def _check_keys(value: Any, path: tuple[str, ...]) -> None:
    """Refuse keys that YAML does not read as text, such as 1, yes or a date."""
    if not isinstance(value, Mapping):
        return
    for name, item in value.items():
        if not isinstance(name, str):
            raise UserError(
                f"config: {'.'.join(path) or 'top level'}: key {name!r} is read as a {_type(name)}; "
                "put it in quotes"
            )
        _check_keys(item, (*path, name))


def _drop_emptied_rows(config: Config) -> None:
    """Drop the rows that an overlay has set to null: laid over another file, it could only add."""
    for table in ("models", "probes", "patching", "scores", "selectors", "tasks"):
        if isinstance(config.get(table), dict):
            config[table] = {name: row for name, row in config[table].items() if row is not None}


def _describe(error: Any) -> str:
    """Return one line for a schema violation."""
    key = ".".join(map(str, error.absolute_path)) or "top level"
    found, rule = error.instance, error.validator_value
    match error.validator:
        case "oneOf" if isinstance(found, dict):
            return _describe_alternatives(key, error)
        case "oneOf":
            return _describe(min(error.context, key=_depth_first))
        case "additionalProperties":
            known = list(error.schema.get("properties", {}))
            name = next(name for name in found if name not in known)
            return f"{key}: unknown key '{name}'{_suggest(name, known)}"
        case "required":
            name = next(name for name in rule if name not in found)
            return f"{key}: key '{name}' is missing"
        case "type":
            what = "is empty" if found is None else f"{found!r} is a {_type(found)}"
            overlay = _OVERLAY if isinstance(found, str) else ""
            return f"{key}: {what}, expected a {_type_name(rule)}{overlay}"
        case "enum":
            near = _nearest(found, rule)
            return f"{key}: {found!r} is not one of {', '.join(map(str, rule))}{near}"
        case "const":
            return f"{key}: {found!r} is not possible; the only value is {json.dumps(rule)}"
        case "minimum":
            return f"{key}: {found!r} is too small; the least is {rule}"
        case "maximum":
            return f"{key}: {found!r} is too large; the most is {rule}"
        case "pattern":
            expected = error.schema["description"].removesuffix(".")
            return f"{key}: '{found}' does not fit; expected: {expected}"
        case "minItems" | "minProperties" | "minLength" if not found:
            return f"{key}: is empty; give at least one entry"
        case "contains":
            return f"{key}: {', '.join(map(str, found))} lacks {rule['const']}; add it"
        case "uniqueItems":
            twice = next(item for i, item in enumerate(found) if item in found[:i])
            return f"{key}: names {twice} twice; remove one"
    return f"{key}: {error.message}"


def _describe_alternatives(key: str, error: Any) -> str:
    """Return one line for a mapping that is none of its possible forms.

    If one form shares more keys with it than any other, that was meant, and its first violation is
    described; else all forms are named.
    """
    forms = error.validator_value
    shared = [len(error.instance.keys() & form.get("properties", {}).keys()) for form in forms]
    best = max(shared)
    if best and shared.count(best) == 1:
        # schema_path: the form's number, then the rest.
        causes = [c for c in error.context if c.schema_path[0] == shared.index(best)]
        return _describe(min(causes, key=_depth_first))
    names = ", ".join(error.instance) or "none"
    known = " | ".join(", ".join(form["required"]) for form in forms if "required" in form)
    return f"{key}: its keys ({names}) fit no known form; give one of: {known}"


def _type(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "boolean",
        str: "string",
        int: "whole number",
        float: "number",
        list: "list",
    }
    return names.get(type(value), "mapping")


def _type_name(rule: str) -> str:
    return {"object": "mapping", "array": "list", "integer": "whole number"}.get(rule, rule)


def _suggest(name: Any, known: Iterable[Any]) -> str:
    """Return the nearest known name as a question, and the known names."""
    names = [str(item) for item in known]
    return f"{_nearest(name, names)} (known: {', '.join(names) or 'none'})"


def _nearest(name: Any, known: Iterable[Any]) -> str:
    near = difflib.get_close_matches(str(name), [str(item) for item in known], n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


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
    for form in schema.get("oneOf", ()):
        if "required" in form and set(form["required"]) <= value.keys():
            _fill_defaults(value, form, definitions)
    for name, item in value.items():
        rule = properties.get(name, schema.get("additionalProperties"))
        if isinstance(rule, dict):
            _fill_defaults(item, rule, definitions)


def _check_references(config: Config) -> None:
    """Check that rows name rows that exist."""
    references = [
        (f"{table}.{name}.{key}", row[key], target)
        for table, key, target in (
            ("patching", "dataset", "probes"),
            ("scores", "dataset", "probes"),
            ("scores", "patching", "patching"),
            ("tasks", "dataset", "probes"),
            ("traces", "dataset", "probes"),
        )
        for name, row in config[table].items()
        if key in row
    ]
    references.append(
        ("ablation.calibration.dataset", config["ablation"]["calibration"]["dataset"], "probes")
    )
    for kind, score in config["analysis"].get("specificity", {}).items():
        references.append((f"analysis.specificity.{kind}", score, "scores"))
    references += [
        (f"scores.{name}.difference", term, "scores")
        for name, row in config["scores"].items()
        for term in row.get("difference", ())
    ]
    for name, row in config["selectors"].items():
        references += [(f"selectors.{name}.{key}", score, "scores") for key, score in _scores(row)]
    references += [
        (f"retrieval.{key}", config["retrieval"][key], target)
        for key, target in (("score", "scores"), ("present", "probes"), ("removed", "probes"))
        if "retrieval" in config
    ]
    if "kv_plan" in config:
        references.append(("kv_plan.score", config["kv_plan"]["score"], "scores"))
    for key, name, target in references:
        if name not in config[target]:
            kind = {"probes": "dataset", "scores": "score"}.get(target, target)
            raise UserError(
                f"config: {key}: unknown {kind} '{name}'{_suggest(name, config[target])}"
            )
    for name, row in config["scores"].items():
        for term in row.get("difference", ()):
            if "difference" in config["scores"][term]:
                raise UserError(
                    f"config: scores.{name}.difference: {term} is a difference itself; name two "
                    "scores that are not"
                )


def _scores(selector: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the scores that a selector chooses by, each after the key that names it."""
    for key in ("score", "matched_to"):
        if key in selector:
            yield key, selector[key]
    for key in ("union", "difference"):
        for score in selector.get(key, ()):
            yield key, score


def _terms(config: Config, score: str) -> list[str]:
    """Return the scores that a difference subtracts, or the score itself."""
    terms: list[str] = config["scores"][score].get("difference", [score])
    return terms


def _check_interventions(config: Config) -> None:
    """Check that a factor and a site stand only where the mode has one, and a factor where it must."""
    for name, row in config["selectors"].items():
        mode = row.get("mode", config["ablation"]["mode"])
        if mode == "scale" and "factor" not in config["ablation"] | row:
            raise UserError(
                f"config: selectors.{name}: mode scale needs a factor; add one, such as factor: 2"
            )
        for key, wanted in (("factor", "scale"), ("site", "mean_query or zero_query")):
            if key in row and mode not in wanted.split(" or "):
                raise UserError(
                    f"config: selectors.{name}.{key}: is for mode {wanted}, not {mode}; remove it"
                )


def _check_splits(config: Config) -> None:
    """Check that tasks are not answered on probes that heads or means were taken from."""
    datasets, calibration = config["probes"], config["ablation"]["calibration"]["dataset"]
    for name, row in config["tasks"].items():
        if datasets[row["dataset"]]["split"] == "detect":
            raise UserError(
                f"config: tasks.{name}.dataset: '{row['dataset']}' has split detect; evaluate on a "
                "dataset with split evaluate"
            )
        if datasets[row["dataset"]]["answer"] == "gold":
            raise UserError(
                f"config: tasks.{name}.dataset: '{row['dataset']}' has answer gold, so nothing is "
                "answered; evaluate on a dataset with answer generated"
            )
    if datasets[calibration]["split"] == "evaluate":
        raise UserError(
            f"config: ablation.calibration.dataset: '{calibration}' has split evaluate; calibrate "
            "on a dataset with split detect"
        )
    used = [("ablation.calibration.dataset", calibration)]
    chosen_by = [name for row in config["selectors"].values() for _, name in _scores(row)]
    if "kv_plan" in config:
        chosen_by.append(config["kv_plan"]["score"])
    for score in [term for name in chosen_by for term in _terms(config, name)]:
        row = config["scores"][score]
        # The public code detects and evaluates on the same probes.
        if row.get("compat") == "official":
            continue
        if "patching" in row:
            key = f"patching.{row['patching']}.dataset"
            used.append((key, config["patching"][row["patching"]]["dataset"]))
        elif "dataset" in row:
            used.append((f"scores.{score}.dataset", row["dataset"]))
    for key, found_on in used:
        for task, row in config["tasks"].items():
            one, other = datasets[found_on], datasets[row["dataset"]]
            paths = [Path(file_path(config, row["needles"])).resolve() for row in (one, other)]
            shared = paths[0] == paths[1]
            if shared and (one["split"], other["split"]) != ("detect", "evaluate"):
                raise UserError(
                    f"config: {key}: '{found_on}' (split {one['split']}) shares needles with "
                    f"'{row['dataset']}' (split {other['split']}) of task {task}; give them split "
                    "detect and split evaluate"
                )


def _check_texts(config: Config) -> None:
    """Check that texts are read by tasks alone, judged by their loss, and that nothing else is."""
    texts = {name for name, row in config["probes"].items() if row["format"] == "text"}
    for table in ("scores", "patching", "traces"):
        for name, row in config[table].items():
            if row.get("dataset") in texts:
                raise UserError(
                    f"config: {table}.{name}.dataset: '{row['dataset']}' has format text, about which "
                    "nothing is asked; name a dataset with questions"
                )
    for name, row in config["tasks"].items():
        is_text, metric = row["dataset"] in texts, row.get("metric")
        if metric is not None and is_text != (metric == "loss"):
            raise UserError(
                f"config: tasks.{name}.metric: {metric} does not fit format "
                f"{config['probes'][row['dataset']]['format']}; texts, and only they, are judged by "
                "loss: remove it"
            )
        if is_text and row["role"] == "target":
            raise UserError(
                f"config: tasks.{name}.role: a loss has no answers that heads could matter for; give "
                "role target to a task with answers"
            )


def _check_retrieval(config: Config) -> None:
    """Check that a trace has something to be read against, held out from the heads' detection."""
    if "retrieval" not in config:
        if config["traces"]:
            raise UserError(
                "config: traces: need the key retrieval, which says what an answer is compared with; "
                "add it (score, k, present, removed)"
            )
        return
    row, datasets = config["retrieval"], config["probes"]
    for role, needle in (("present", "present"), ("removed", "removed")):
        dataset = datasets[row[role]]
        if dataset["needle"] != needle or dataset["split"] != "evaluate":
            raise UserError(
                f"config: retrieval.{role}: '{row[role]}' has needle {dataset['needle']} and split "
                f"{dataset['split']}; name a dataset with needle: {needle} and split: evaluate"
            )


def _check_kv_plan(config: Config) -> None:
    """Check that a KV plan has a task to be checked on."""
    if "kv_plan" in config and not kv_tasks(config):
        raise UserError(
            "config: kv_plan: is checked on tasks with a needle in a haystack, and there is none; add "
            "one, or remove kv_plan"
        )


def _check_directions(config: Config) -> None:
    """Check that scores read captured directions; unit is derived from raw, which always is."""
    if "tuned_lens" in config["directions"]:
        for name, row in config["models"].items():
            _check_lens(f"config: models.{name}.tuned_lens", row["tuned_lens"])
    for name, row in config["scores"].items():
        direction = row.get("direction", "raw")
        if direction not in (*config["directions"], "unit"):
            raise UserError(
                f"config: scores.{name}.direction: {direction} is not captured; add it to "
                f"directions ({', '.join(config['directions'])})"
            )


def _check_lens(key: str, row: Mapping[str, Any]) -> None:
    """Check that the files that a tuned lens is read from or trained on exist."""
    if "file" in row and not Path(row["file"]).is_file():
        raise UserError(f"{key}.file: {row['file']} is no file")
    for text in row.get("train", {}).get("texts", ()):
        if not Path(text).exists():
            raise UserError(f"{key}.train.texts: {text} does not exist")


def _check_model(name: str, row: Mapping[str, Any]) -> None:
    """Check what can be seen of a model without loading it."""
    folder = row["source"].get("folder")
    if folder is not None and not (Path(folder) / "config.json").is_file():
        raise UserError(
            f"config: models.{name}.source.folder: {folder} has no config.json; name a folder "
            "saved by save_pretrained"
        )
    if row["gpus"] > 1 and row["device"] != "balanced":
        raise UserError(
            f"config: models.{name}.gpus: {row['gpus']}, but device {row['device']} uses one; set "
            "device: balanced"
        )


def _check_files(config: Config) -> None:
    """Check that the files that rows name exist, but for those that are fetched."""
    for name, row in config["probes"].items():
        needles, haystacks = row["needles"], row.get("haystacks")
        if isinstance(needles, str) and not Path(needles).is_file():
            raise UserError(f"config: probes.{name}.needles: {needles} is no file")
        if "prompt" in row and not Path(row["prompt"]).is_file():
            raise UserError(f"config: probes.{name}.prompt: {row['prompt']} is no file")
        if isinstance(haystacks, str) and not Path(haystacks).exists():
            raise UserError(f"config: probes.{name}.haystacks: {haystacks} does not exist")
        for file in haystacks if isinstance(haystacks, list) else ():
            if isinstance(file, str) and not Path(file).is_file():
                raise UserError(f"config: probes.{name}.haystacks: {file} is no file")
    for name, row in config["selectors"].items():
        if "heads_file" in row and not Path(row["heads_file"]).is_file():
            raise UserError(f"config: selectors.{name}.heads_file: {row['heads_file']} is no file")


def _check_stores(config: Config) -> None:
    """Check that shared stores and archives are there, lest a failed mount makes everything again."""
    for store in config["shared_stores"]:
        if not Path(store).is_dir():
            raise UserError(
                f"config: shared_stores: {store} is no folder; mount it, or take it out of the list"
            )
    activations = config["activations"]
    if activations["source"] == "archive" and not Path(activations.get("table", "")).is_file():
        raise UserError(
            f"config: activations.table: {activations.get('table', 'missing')}: name the table of the "
            "archive's files, or set source: capture"
        )


def _check_known_models(config: Config) -> None:
    """Check k against the heads of every model whose config lies on this machine."""
    for name in config["models"]:
        path = Path(model_config_path(config, name))
        if not path.is_file():  # a wheel not converted yet, a hub model not fetched yet
            continue
        try:
            model = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(
                f"config: models.{name}: {path} is not a JSON object ({error})"
            ) from None
        if not isinstance(model, dict):
            raise UserError(
                f"config: models.{name}: {path} is not a JSON object (but a {_type(model)})"
            )
        check_heads(config, name, model)


def check_heads(config: Config, name: str, model: Mapping[str, Any]) -> None:
    """Check that a model has as many heads as `ablation.k` and `analysis.k` ask for.

    Parameters
    ----------
    config
        Complete.
    name, model
        The model's key, and the content of its config.json. Families that call their numbers of layers
        and heads otherwise, such as GPT-2, are checked when their heads are selected.

    Raises
    ------
    UserError
        If it has fewer.
    """
    model = model.get("text_config", model)
    heads = model.get("num_hidden_layers", 0) * model.get("num_attention_heads", 0)
    sizes = {"ablation.k": config["ablation"]["k"], "analysis.k": config["analysis"].get("k", [])}
    key, most = max(((key, k) for key, ks in sizes.items() for k in ks), key=lambda pair: pair[1])
    if heads and most > heads:
        raise UserError(f"config: {key}: {most} is more than the {heads} heads of model {name}")
