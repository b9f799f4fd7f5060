"""Each mistake in a config is one line that names its key, before anything is loaded."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from workflow_scripts.common.config import SCHEMA_FILE, check_devices, validate
from workflow_scripts.common.digests import key_of
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.layout import activations_spec, converted_folder, task_metric
from workflow_scripts.scores.settings import check_score

ROOT = Path(__file__).parents[2]
Config = dict[str, Any]

OVERLAY = (
    " (nested values given with --config arrive as strings: put them into a YAML file and pass it "
    "with --configfile)"
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A valid config whose files lie in a temporary folder: 3 layers of 4 heads."""
    (tmp_path / "needles.json").write_text("[]", encoding="utf-8")
    (tmp_path / "texts").mkdir()
    (tmp_path / "model").mkdir()
    geometry = {"num_hidden_layers": 3, "num_attention_heads": 4}
    (tmp_path / "model/config.json").write_text(json.dumps(geometry), encoding="utf-8")
    probes = {
        "format": "nolima",
        "needles": str(tmp_path / "needles.json"),
        "haystacks": str(tmp_path / "texts"),
        "questions": ["onehop"],
        "context_lengths": [64],
        "depths": [50],
    }
    return {
        "store": str(tmp_path / "store"),
        "seed": 42,
        "models": {"tiny": {"source": {"folder": str(tmp_path / "model")}, "device": "cpu"}},
        "probes": {
            "nolima": {**probes, "split": "detect"},
            "nonliteral": {**probes, "split": "evaluate"},
        },
        "patching": {"filler": {"dataset": "nolima", "corruption": "filler"}},
        "scores": {
            "locos": {"dataset": "nolima", "formula": "needle_phi - off_phi"},
            "cri": {"patching": "filler", "metric": "logit"},
        },
        "selectors": {
            "locos": {"score": "locos", "ends": ["top", "bottom"]},
            "random": {"random": True, "seeds": [1, 2]},
        },
        "ablation": {"k": [1, 12], "calibration": {"dataset": "nolima"}},
        "tasks": {"nonliteral": {"dataset": "nonliteral"}},
    }


def accept(name: str, row: Mapping[str, Any]) -> None:
    """Find nothing wrong with a row."""


def checked(config: Config) -> Config:
    return validate(config, ROOT, check_score=accept, check_sources=accept)


def put(config: Config, path: str, value: Any) -> None:
    """Set the value of a dotted key."""
    *parents, last = path.split(".")
    for name in parents:
        config = config[name]
    config[last] = value


def message(config: Config) -> str:
    """Return the error of a config, one line."""
    with pytest.raises(UserError) as caught:
        checked(config)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_valid_config_is_completed_by_defaults_and_left_as_it_was(config: Config) -> None:
    before = copy.deepcopy(config)
    completed = checked(config)
    assert config == before
    assert completed["directions"] == ["raw"]
    assert completed["models"]["tiny"] == {
        "source": before["models"]["tiny"]["source"],
        "dtype": "float32",
        "device": "cpu",
        "batch_tokens": 8192,
        "threads": 1,
        "gpus": 1,
        "shards_per_job": 1,
        "runtime": 240,
        "mem_mb": 6000,
        "trust_remote_code": False,
        "tuned_lens": {
            "train": {
                "texts": ["data/tasks/loss_en.txt", "data/haystacks/en"],
                "steps": 250,
                "tokens": 512,
                "rank": 64,
            }
        },
    }
    assert completed["probes"]["nolima"] == before["probes"]["nolima"] | {
        "max_new_tokens": 50,
        "max_thinking_tokens": 0,
        "shards": 1,
        "needle": "present",
        "answer": "generated",
        "max_skipped": 0.5,
    }
    assert completed["patching"]["filler"]["probes"] == 4
    assert completed["ablation"] == {
        "k": [1, 12],
        "mode": "mean_query",
        "site": "q_proj",
        "calibration": {"dataset": "nolima", "probes": 50, "max_tokens": 5000},
    }


def test_a_config_without_patching_gets_an_empty_table(config: Config) -> None:
    del config["patching"], config["scores"]["cri"]
    assert checked(config)["patching"] == {}


def test_a_completed_config_is_valid_and_complete(config: Config) -> None:
    completed = checked(config)
    assert checked(completed) == completed


# --- what the schema finds


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("seed", "42", "seed: '42' is a string, expected a whole number" + OVERLAY),
        ("seed", 4.0, "seed: 4.0 is a number, expected a whole number"),
        ("seed", True, "seed: True is a boolean, expected a whole number"),
        ("seed", -1, "seed: -1 is too small; the least is 0"),
        ("store", "", "store: is empty; give at least one entry"),
        ("scores", None, "scores: is empty, expected a mapping"),
        ("scores", {}, "scores: is empty; give at least one entry"),
        ("models", "{a: 1}", "models: '{a: 1}' is a string, expected a mapping" + OVERLAY),
        ("ablation.k", "[1]", "ablation.k: '[1]' is a string, expected a list" + OVERLAY),
        ("ablation.k", 5, "ablation.k: 5 is a whole number, expected a list"),
        ("ablation.k", [1, 0], "ablation.k.1: 0 is too small; the least is 1"),
        ("ablation.k", [], "ablation.k: is empty; give at least one entry"),
        ("ablation.k", [2, 1, 2], "ablation.k: names 2 twice; remove one"),
        (
            "ablation.mode",
            "meen_query",
            "ablation.mode: 'meen_query' is not one of mean_query, zero_query, mean_output, "
            "zero_output, knockout, evict, scale; did you mean 'mean_query'?",
        ),
        ("directions", ["frozen_norm"], "directions: frozen_norm lacks raw; add it"),
        (
            "probes.nolima.depths",
            [101],
            "probes.nolima.depths.0: 101 is too large; the most is 100",
        ),
        ("probes.nolima.depths", [-1], "probes.nolima.depths.0: -1 is too small; the least is 0"),
        (
            "models.tiny.dtype",
            "bfloat",
            "models.tiny.dtype: 'bfloat' is not one of float32, bfloat16, float16; did you mean "
            "'bfloat16'?",
        ),
        (
            "models.tiny.device",
            "gpu",
            "models.tiny.device: 'gpu' does not fit; expected: auto (a GPU where there is one), cpu, "
            "cuda, cuda:N, or balanced (layers spread over all GPUs)",
        ),
        (
            "models.tiny.source",
            "some/folder",
            "models.tiny.source: 'some/folder' is a string, expected a mapping" + OVERLAY,
        ),
        (
            "models.tiny.source",
            {"hub": "owner/name"},
            "models.tiny.source: key 'revision' is missing",
        ),
        (
            "models.tiny.source",
            {"hub": "owner/name", "revision": "main"},
            "models.tiny.source.revision: 'main' does not fit; expected: A commit of the "
            "repository, 40 lower-case hexadecimal digits, not a branch or tag",
        ),
        (
            "models.tiny.source",
            {"hub": "owner/name", "folder": "here"},
            "models.tiny.source: its keys (hub, folder) fit no known form; give one of: wheel, "
            "file, sha256 | hub, revision | folder",
        ),
        (
            "models.tiny.source",
            {},
            "models.tiny.source: its keys (none) fit no known form; give one of: wheel, file, "
            "sha256 | hub, revision | folder",
        ),
        (
            "models.Org/Name",
            {"source": {"folder": "here"}},
            "models: 'Org/Name' does not fit; expected: A lower-case name of letters, digits, '.', "
            "'_' and '-'",
        ),
        (
            "selectors.none",
            {"score": "locos", "ends": ["top"]},
            "selectors: 'none' does not fit; expected: A lower-case name of letters, digits, '_' "
            "and '-', other than none",
        ),
        ("selectors.random", {"random": True}, "selectors.random: key 'seeds' is missing"),
        (
            "selectors.random",
            {"random": False, "seeds": [1]},
            "selectors.random.random: False is not possible; the only value is true",
        ),
        (
            "selectors.locos",
            {"heads": ["12-3", "L4H5"]},
            "selectors.locos.heads.1: 'L4H5' does not fit; expected: A head as layer-head, such as "
            "12-3",
        ),
    ],
)
def test_a_value_of_a_wrong_kind_is_named_with_what_is_expected(
    config: Config, path: str, value: Any, expected: str
) -> None:
    put(config, path, value)
    assert message(config) == f"config: {expected}"


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("sed", "seed"),
        ("models.tiny.batch_token", "batch_tokens"),
        ("probes.nolima.contxt_lengths", "context_lengths"),
        ("patching.filler.corupption", "corruption"),
        ("scores.locos.formla", "formula"),
        ("ablation.calibration.max_token", "max_tokens"),
        ("selectors.random.matched", "matched_to"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(config: Config, path: str, near: str) -> None:
    put(config, path, 1)
    *parents, last = path.split(".")
    where = ".".join(parents) or "top level"
    expected = f"config: {where}: unknown key '{last}'; did you mean '{near}'? (known: "
    assert message(config).startswith(expected)


def test_a_missing_key_is_named(config: Config) -> None:
    del config["tasks"]
    assert message(config) == "config: top level: key 'tasks' is missing"


def test_a_key_that_yaml_does_not_read_as_text_is_refused(config: Config) -> None:
    config["tasks"] |= yaml.safe_load("{yes: {dataset: nonliteral}}")
    assert message(config) == ("config: tasks: key True is read as a boolean; put it in quotes")


def schema_objects(schema: Any) -> list[Mapping[str, Any]]:
    """Return every mapping inside a schema."""
    if isinstance(schema, list):
        return [found for item in schema for found in schema_objects(item)]
    if not isinstance(schema, dict):
        return []
    return [schema] + [found for item in schema.values() for found in schema_objects(item)]


SCHEMA = yaml.safe_load((ROOT / SCHEMA_FILE).read_text(encoding="utf-8"))


def test_every_mapping_of_the_schema_is_closed() -> None:
    for part in schema_objects(SCHEMA):
        if part.get("type") == "object":
            assert part["additionalProperties"] is not True, part


def test_every_key_of_the_schema_is_described() -> None:
    shared = {f"#/$defs/{name}": part for name, part in SCHEMA["$defs"].items()}
    for part in schema_objects(SCHEMA):
        for name, rule in part.get("properties", {}).items():
            rule = shared.get(rule.get("$ref"), rule)
            assert "description" in rule or "properties" in rule, name
        if "pattern" in part:
            assert part["description"].endswith("."), part


# --- references between rows


@pytest.mark.parametrize(
    ("path", "kind", "known"),
    [
        ("scores.locos.dataset", "dataset", "nolima, nonliteral"),
        ("patching.filler.dataset", "dataset", "nolima, nonliteral"),
        ("tasks.nonliteral.dataset", "dataset", "nolima, nonliteral"),
        ("ablation.calibration.dataset", "dataset", "nolima, nonliteral"),
        ("scores.cri.patching", "patching", "filler"),
        ("selectors.locos.score", "score", "locos, cri"),
        ("selectors.random.matched_to", "score", "locos, cri"),
    ],
)
def test_a_row_that_does_not_exist_is_named_with_those_that_do(
    config: Config, path: str, kind: str, known: str
) -> None:
    put(config, path, "qqq")
    assert message(config) == f"config: {path}: unknown {kind} 'qqq' (known: {known})"


def test_a_misspelt_row_suggests_the_nearest(config: Config) -> None:
    config["scores"]["locos"]["dataset"] = "nolma"
    assert message(config) == (
        "config: scores.locos.dataset: unknown dataset 'nolma'; did you mean 'nolima'? "
        "(known: nolima, nonliteral)"
    )


@pytest.mark.parametrize("operation", ["union", "difference"])
def test_both_scores_of_a_combination_must_exist(config: Config, operation: str) -> None:
    config["selectors"]["both"] = {operation: ["locos", "loocs"]}
    assert message(config).startswith(f"config: selectors.both.{operation}: unknown score 'loocs'")


@pytest.mark.parametrize(
    "row",
    [
        {"score": "locos", "ends": ["smallest"]},
        {"score": "locos", "above": 0.5},
        {"heads": ["0-1", "2-3"]},
        {"union": ["locos", "cri"]},
        {"difference": ["locos", "cri"]},
        {"random": True, "seeds": [1], "matched_to": "locos"},
    ],
)
def test_every_form_of_a_selector_is_accepted(config: Config, row: Config) -> None:
    config["selectors"]["new"] = row
    assert checked(config)["selectors"]["new"] == row


# --- splits


def test_a_task_on_the_detect_split_is_refused(config: Config) -> None:
    config["tasks"]["nonliteral"]["dataset"] = "nolima"
    assert message(config) == (
        "config: tasks.nonliteral.dataset: 'nolima' has split detect; evaluate on a dataset with "
        "split evaluate"
    )


def test_calibration_on_the_evaluate_split_is_refused(config: Config) -> None:
    config["ablation"]["calibration"]["dataset"] = "nonliteral"
    assert message(config) == (
        "config: ablation.calibration.dataset: 'nonliteral' has split evaluate; calibrate on a "
        "dataset with split detect"
    )


@pytest.fixture
def overlapping(config: Config) -> Config:
    """A config that finds heads on all probes, half of which a task then uses."""
    config["probes"]["everything"] = {**config["probes"]["nolima"], "split": "all"}
    config["scores"]["locos"]["dataset"] = "everything"
    return config


def test_heads_found_on_probes_of_a_task_are_refused(overlapping: Config) -> None:
    assert message(overlapping) == (
        "config: scores.locos.dataset: 'everything' (split all) shares needles with 'nonliteral' "
        "(split evaluate) of task nonliteral; give them split detect and split evaluate"
    )


def test_a_task_on_all_probes_overlaps_the_detect_split(config: Config) -> None:
    config["probes"]["nonliteral"]["split"] = "all"
    assert message(config).startswith("config: ablation.calibration.dataset: 'nolima'")


def test_patching_on_probes_of_a_task_is_refused_if_a_selector_uses_it(config: Config) -> None:
    config["patching"]["filler"]["dataset"] = "nonliteral"
    assert checked(config)
    config["selectors"]["cri"] = {"score": "cri", "ends": ["top"]}
    assert message(config).startswith("config: patching.filler.dataset: 'nonliteral'")


@pytest.mark.parametrize("region", ["all", "context", "no_bos"])
def test_the_region_off_the_needle_can_be_chosen(config: Config, region: str) -> None:
    config["scores"]["locos"]["off"] = region  # YAML reads it as a boolean unless it is quoted
    assert checked(config)["scores"]["locos"]["off"] == region


def test_a_difference_names_two_scores_that_are_none(config: Config) -> None:
    config["scores"]["d"] = {"difference": ["locos", "locus"]}
    assert "scores.d.difference: unknown score 'locus'" in message(config)
    config["scores"]["d"] = {"difference": ["locos", "cri"]}
    config["scores"]["e"] = {"difference": ["locos", "d"]}
    assert "scores.e.difference: d is a difference itself" in message(config)
    del config["scores"]["e"]
    assert checked(config)["scores"]["d"] == {"difference": ["locos", "cri"]}


def test_both_scores_of_a_difference_are_kept_off_the_probes_of_a_task(config: Config) -> None:
    config["scores"]["other"] = {"dataset": "nonliteral", "formula": "needle_phi"}
    config["scores"]["d"] = {"difference": ["locos", "other"]}
    checked(config)  # not chosen by
    config["selectors"]["d"] = {"score": "d", "ends": ["top"]}
    assert "scores.other.dataset: 'nonliteral'" in message(config)


@pytest.mark.parametrize(
    ("lens", "words"),
    [
        ({"file": "no/such.pt"}, ["tuned_lens.file", "no/such.pt"]),
        ({"train": {"texts": ["no/such/texts"]}}, ["tuned_lens.train.texts", "no/such/texts"]),
        ({"hub": "a/b", "path": "lens.pt"}, ["tuned_lens", "'revision' is missing"]),
        ({"hub": "a/b", "path": "lens.pt", "revision": "main"}, ["tuned_lens.revision", "commit"]),
        ("lens.pt", ["tuned_lens", "expected a mapping"]),
    ],
)
def test_a_lens_that_cannot_be_read_or_trained_is_refused(
    config: Config, lens: Any, words: list[str]
) -> None:
    config["directions"] = ["raw", "tuned_lens"]
    config["models"]["tiny"]["tuned_lens"] = lens
    assert [word for word in words if word not in message(config)] == []


def test_what_determines_the_lens_determines_the_activations(
    config: Config, tmp_path: Path
) -> None:
    def key(lens: Config, directions: list[str]) -> str:
        config["directions"] = directions
        config["models"]["tiny"]["tuned_lens"] = lens
        return key_of(activations_spec(checked(config), "tiny", "nolima"))

    lenses = []
    for number in range(2):
        path = tmp_path / f"{number}" / "lens.pt"
        path.parent.mkdir()
        path.write_text(str(number), encoding="utf-8")
        lenses.append({"file": str(path)})
        (path.parent / "text.txt").write_text(f"text {number}", encoding="utf-8")
        lenses.append({"train": {"texts": [str(path.parent)]}})
        lenses.append({"train": {"texts": [str(path.parent)], "rank": 3}})
        lenses.append({"hub": "a/b", "path": "lens.pt", "revision": f"{number}" * 40})
    (tmp_path / "texts" / "haystack.txt").write_text("text", encoding="utf-8")
    both = ["raw", "tuned_lens"]
    assert len({key(lens, both) for lens in lenses}) == len(lenses)
    assert len({key(lens, ["raw"]) for lens in lenses}) == 1
    moved = tmp_path / "elsewhere.pt"
    moved.write_bytes((tmp_path / "0" / "lens.pt").read_bytes())
    assert key({"file": str(moved)}, both) == key(lenses[0], both)


def test_a_task_with_forced_answers_is_refused(config: Config) -> None:
    config["probes"]["nonliteral"]["answer"] = "gold"
    assert "tasks.nonliteral.dataset" in message(config)


@pytest.fixture
def with_text(config: Config, tmp_path: Path) -> Config:
    """A config with a task that reads a text."""
    path = tmp_path / "prose.txt"
    path.write_text("Some prose.", encoding="utf-8")
    config["probes"]["prose"] = {"format": "text", "needles": str(path), "context_lengths": [8]}
    config["tasks"]["prose"] = {"dataset": "prose"}
    return config


def test_a_text_is_judged_by_its_loss(with_text: Config) -> None:
    assert task_metric(checked(with_text), "prose") == "loss"
    assert task_metric(checked(with_text), "nonliteral") == "accuracy"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("tasks.prose.metric", "accuracy", "tasks.prose.metric: accuracy does not fit format text"),
        (
            "tasks.nonliteral.metric",
            "loss",
            "tasks.nonliteral.metric: loss does not fit format nolima",
        ),
        ("tasks.prose.role", "target", "tasks.prose.role: a loss has no answers"),
        ("scores.locos.dataset", "prose", "scores.locos.dataset: 'prose' has format text"),
        ("patching.filler.dataset", "prose", "patching.filler.dataset: 'prose' has format text"),
    ],
)
def test_a_text_where_answers_are_wanted_is_refused(
    with_text: Config, path: str, value: str, said: str
) -> None:
    put(with_text, path, value)
    assert message(with_text).startswith(f"config: {said}")


def test_an_overlap_is_allowed_where_the_official_choice_is_asked_for(overlapping: Config) -> None:
    overlapping["scores"]["locos"]["compat"] = "official"
    assert checked(overlapping)


def test_other_needles_do_not_overlap(overlapping: Config, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    overlapping["probes"]["everything"]["needles"] = str(tmp_path / "other.json")
    assert checked(overlapping)


# --- files, devices, heads


def test_a_folder_without_a_model_is_named(config: Config, tmp_path: Path) -> None:
    config["models"]["tiny"]["source"]["folder"] = str(tmp_path / "texts")
    assert message(config) == (
        f"config: models.tiny.source.folder: {tmp_path / 'texts'} has no config.json; name a folder "
        "saved by save_pretrained"
    )


def test_a_model_config_that_is_not_json_is_named(config: Config, tmp_path: Path) -> None:
    (tmp_path / "model/config.json").write_text("{", encoding="utf-8")
    assert message(config).startswith(
        f"config: models.tiny: {tmp_path / 'model/config.json'} is not a JSON object ("
    )


@pytest.mark.parametrize(
    ("text", "kind"), [("[]", "list"), ("3", "whole number"), ("null", "null")]
)
def test_a_model_config_that_is_no_object_is_named(
    config: Config, tmp_path: Path, text: str, kind: str
) -> None:
    (tmp_path / "model/config.json").write_text(text, encoding="utf-8")
    assert message(config) == (
        f"config: models.tiny: {tmp_path / 'model/config.json'} is not a JSON object (but a {kind})"
    )


@pytest.mark.parametrize("name", ["nowhere.json", "texts"])
def test_needles_that_are_no_file_are_named(config: Config, tmp_path: Path, name: str) -> None:
    config["probes"]["nolima"]["needles"] = str(tmp_path / name)
    assert message(config) == f"config: probes.nolima.needles: {tmp_path / name} is no file"


def test_a_prompt_that_is_no_file_is_named(config: Config, tmp_path: Path) -> None:
    config["probes"]["nolima"]["prompt"] = str(tmp_path / "nowhere.json")
    assert message(config) == (
        f"config: probes.nolima.prompt: {tmp_path / 'nowhere.json'} is no file"
    )


def test_missing_haystacks_are_named(config: Config, tmp_path: Path) -> None:
    config["probes"]["nolima"]["haystacks"] = str(tmp_path / "nowhere")
    assert message(config) == (
        f"config: probes.nolima.haystacks: {tmp_path / 'nowhere'} does not exist"
    )


REMOTE = {"hub": "owner/name", "revision": "0" * 40, "file": "sets/needles.json"}


def test_files_that_are_fetched_need_not_be_here(config: Config) -> None:
    config["probes"]["nolima"] |= {"needles": REMOTE, "haystacks": [REMOTE]}
    assert checked(config)["probes"]["nolima"]["needles"] == REMOTE


def test_a_missing_file_in_a_list_of_haystacks_is_named(config: Config) -> None:
    config["probes"]["nolima"]["haystacks"] = [REMOTE, "nowhere.txt"]
    assert message(config) == "config: probes.nolima.haystacks: nowhere.txt is no file"


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({"hub": "owner/name", "file": "a.json"}, "needles: key 'revision' is missing"),
        (
            REMOTE | {"revision": "main"},
            "needles.revision: 'main' does not fit; expected: A commit",
        ),
        (
            REMOTE | {"file": "../a.json"},
            "needles.file: '../a.json' does not fit; expected: The path",
        ),
        (REMOTE | {"sha256": "0f"}, "needles.sha256: '0f' does not fit; expected: The SHA-256"),
        (
            {"path": "a.json"},
            "needles: its keys (path) fit no known form; give one of: hub, revision, file | url, "
            "revision, file",
        ),
    ],
)
def test_a_remote_file_that_cannot_be_fetched_is_named(
    config: Config, file: Config, expected: str
) -> None:
    config["probes"]["nolima"]["needles"] = file
    assert message(config).startswith(f"config: probes.nolima.{expected}")


def test_a_remote_file_in_a_list_is_described_where_it_stands(config: Config) -> None:
    config["probes"]["nolima"]["haystacks"] = [REMOTE, REMOTE | {"revision": "main"}]
    assert message(config).startswith("config: probes.nolima.haystacks.1.revision: 'main' does not")


def test_the_same_remote_needles_overlap(config: Config) -> None:
    for name, split in (("nolima", "all"), ("nonliteral", "evaluate")):
        config["probes"][name] |= {"needles": REMOTE, "split": split}
    assert "shares needles with 'nonliteral'" in message(config)


def test_a_row_that_an_overlay_empties_is_left_out(config: Config) -> None:
    config["scores"]["other"] = config["patching"]["filler"] = config["scores"]["cri"] = None
    completed = checked(config)
    assert list(completed["scores"]) == ["locos"]
    assert completed["patching"] == {}


def test_a_missing_file_of_heads_is_named(config: Config) -> None:
    config["selectors"]["theirs"] = {"heads_file": "nowhere.json", "ends": ["top"]}
    assert message(config) == "config: selectors.theirs.heads_file: nowhere.json is no file"


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "balanced"])
def test_a_gpu_asked_for_where_there_is_none_is_refused(
    config: Config, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    config["models"]["tiny"]["device"] = device
    with pytest.raises(UserError) as error:
        check_devices(config, elsewhere=False)
    assert str(error.value) == (
        f"config: models.tiny.device: {device} asked for, but there is no GPU here; set device: cpu "
        "or auto"
    )
    check_devices(config, elsewhere=True)


def test_auto_is_refused_where_jobs_run_on_other_machines(config: Config) -> None:
    config["models"]["tiny"]["device"] = "auto"
    check_devices(config, elsewhere=False)
    with pytest.raises(UserError, match="models.tiny.device: auto"):
        check_devices(config, elsewhere=True)


def test_several_gpus_need_a_model_that_is_spread_over_them(config: Config) -> None:
    config["models"]["tiny"].update(gpus=2, device="cuda")
    assert message(config) == (
        "config: models.tiny.gpus: 2, but device cuda uses one; set device: balanced"
    )
    config["models"]["tiny"]["device"] = "balanced"
    assert checked(config)


def test_k_may_reach_the_number_of_heads_and_no_further(config: Config) -> None:
    assert checked(config)
    config["ablation"]["k"] = [1, 13]
    assert message(config) == "config: ablation.k: 13 is more than the 12 heads of model tiny"


def test_heads_of_a_multimodal_model_are_those_of_its_text_model(
    config: Config, tmp_path: Path
) -> None:
    geometry = {"text_config": {"num_hidden_layers": 1, "num_attention_heads": 2}}
    (tmp_path / "model/config.json").write_text(json.dumps(geometry), encoding="utf-8")
    assert message(config) == "config: ablation.k: 12 is more than the 2 heads of model tiny"


def test_heads_of_a_wheel_are_known_once_it_is_converted(config: Config, tmp_path: Path) -> None:
    config["models"]["tiny"]["source"] = {
        "wheel": "name==1.0",
        "file": "a.gguf",
        "sha256": "0" * 64,
    }
    config["ablation"]["k"] = [13]
    assert checked(config)
    folder = Path(converted_folder(config, "tiny"))
    folder.parent.mkdir(parents=True)
    (tmp_path / "model").rename(folder)
    assert message(config) == "config: ablation.k: 13 is more than the 12 heads of model tiny"


# --- formulas and directions


def test_a_formula_with_an_unknown_column_is_refused_by_its_key(config: Config) -> None:
    config["scores"]["locos"]["formula"] = "needle_phy + 1"
    with pytest.raises(UserError, match=r"scores\.locos\.formula.*needle_phy"):
        validate(config, ROOT, check_score=check_score, check_sources=accept)


def test_a_direction_that_is_not_captured_is_refused(config: Config) -> None:
    config["scores"]["locos"]["direction"] = "frozen_norm"
    assert message(config) == (
        "config: scores.locos.direction: frozen_norm is not captured; add it to directions (raw)"
    )


@pytest.mark.parametrize("direction", ["raw", "unit", "frozen_norm"])
def test_captured_directions_and_unit_can_be_scored(config: Config, direction: str) -> None:
    config["directions"] = ["raw", "frozen_norm"]
    config["scores"]["locos"]["direction"] = direction
    assert checked(config)


@pytest.mark.parametrize("check", ["check_score", "check_sources"])
def test_what_a_stage_finds_wrong_with_its_rows_is_passed_on(config: Config, check: str) -> None:
    def refuse(name: str, row: Mapping[str, Any]) -> None:
        raise UserError(f"refused {name}")

    checks: dict[str, Callable[[str, Mapping[str, Any]], None]] = {
        "check_score": accept,
        "check_sources": accept,
        check: refuse,
    }
    first = {"check_score": "locos", "check_sources": "nolima"}[check]
    with pytest.raises(UserError, match=f"refused {first}"):
        validate(
            config, ROOT, check_score=checks["check_score"], check_sources=checks["check_sources"]
        )


def test_the_default_config_is_valid_without_importing_torch() -> None:
    code = (
        "import sys, yaml, pathlib\n"
        "from workflow_scripts.common.config import validate\n"
        "from workflow_scripts.common.layout import haystack_files\n"
        "from workflow_scripts.probes.sources import check_sources\n"
        "from workflow_scripts.scores.settings import check_score\n"
        "def check(name, row): check_sources(row, row['needles'], haystack_files(row), name)\n"
        "config = yaml.safe_load(open('config.yaml', encoding='utf-8'))\n"
        "root = pathlib.Path.cwd()\n"
        "validate(config, root, check_score=check_score, check_sources=check)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"mode": "scale"}, "mine: mode scale needs a factor"),
        ({"factor": 2}, r"mine\.factor: is for mode scale, not mean_query"),
        ({"mode": "zero_output", "site": "query"}, r"mine\.site: is for mode mean_query or"),
    ],
)
def test_a_selector_s_own_intervention_must_fit_its_mode(
    config: Config, row: Config, message: str
) -> None:
    config["selectors"]["mine"] = {"heads": ["0-0"], **row}
    with pytest.raises(UserError, match=message):
        checked(config)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"score": "lokos"}, "config: kv_plan.score: unknown score 'lokos'; did you mean 'locos'?"),
        (
            {"score": "locos", "budgets": [100]},
            "kv_plan.budgets.0: 100 is too large; the most is 99",
        ),
    ],
)
def test_a_wrong_kv_plan_is_named(config: Config, plan: Config, expected: str) -> None:
    assert expected in message(config | {"kv_plan": plan})


def test_a_kv_plan_needs_a_task_with_a_needle_in_a_haystack(config: Config) -> None:
    config["kv_plan"] = {"score": "locos"}
    assert checked(config)["kv_plan"]["budgets"] == [25, 50, 75]
    config["probes"]["nonliteral"]["needle"] = "removed"
    assert message(config).startswith("config: kv_plan: is checked on tasks with a needle")


def test_a_kv_plan_is_kept_off_the_probes_of_a_task(config: Config) -> None:
    config["scores"]["found"] = {"dataset": "nonliteral", "formula": "needle_phi"}
    checked(config)
    config["kv_plan"] = {"score": "found"}
    assert message(config).startswith("config: scores.found.dataset: 'nonliteral'")
