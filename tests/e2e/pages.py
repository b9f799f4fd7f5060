"""Pages made again from a finished run whose tables were changed, by the scripts themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl

from tests.workflow.snakemake_project import Project
from workflow_scripts.common.artifacts import read_provenance, write_table
from workflow_scripts.common.layout import converted_files, task_metrics
from workflow_scripts.report import compare_models, write_page, write_trace

HOSTILE = "<img src=x onerror=\"document.title='broken in'\"></script><!--"


class Inputs(SimpleNamespace):
    """The inputs of a rule, by attribute and by name."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def use_converted_model(project: Project) -> None:
    """Have the planted model come from a wheel, as the default model does, converted already."""

    def edit(config: dict[str, Any]) -> None:
        source = {"wheel": "planted==1.0", "sha256": "0" * 64, "file": "planted.gguf"}
        config["models"]["tiny"]["source"] = source
        planted = project.folder / "data/models/tiny"
        for name in converted_files(config, "tiny"):
            file = project.folder / config["store"] / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if (planted / file.name).exists():
                shutil.copy(planted / file.name, file)
            else:  # it has no chat template; this one adds nothing
                file.write_text("{{ messages[0].content }}", encoding="utf-8")

    project.edit_config(edit)


def add_trace(project: Project) -> None:
    """Add a document, in the words of the planted model, the trace of its answer, and a KV plan."""
    filler = (project.folder / "data/models/tiny/haystacks/filler_0.txt").read_text(
        encoding="utf-8"
    )
    before, after = filler.split(" . ")[:8], filler.split(" . ")[8:16]
    document = {
        "id": "kiasma",
        "document": " . ".join([*before, "Ivan Holm lives next to Kiasma", *after]) + " .",
        "question": "which character has been to Helsinki ? answer :",
        "answer": "Ivan Holm",
    }
    path = project.folder / "data/documents/kiasma.jsonl"
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")

    def edit(config: dict[str, Any]) -> None:
        datasets = config["probes"]
        datasets["removed"] = datasets["nonliteral"] | {"needle": "removed"}
        datasets["documents"] = {
            "format": "document",
            "needles": "data/documents/kiasma.jsonl",
            "template": "{haystack} {question}",
            "max_new_tokens": 4,
        }
        config["traces"] = {"kiasma": {"dataset": "documents", "probe": "kiasma"}}
        config["kv_plan"] = {"score": "locos", "context_length": 1000, "kept_tokens": 512}
        config["retrieval"] = {
            "score": "locos",
            "k": 3,
            "present": "nonliteral",
            "removed": "removed",
        }

    project.edit_config(edit)


def changed(source: Path, target: Path, *columns: pl.Expr) -> Path:
    """Write a table again with other columns, under its own provenance."""
    provenance = read_provenance(source)
    provenance.pop("versions")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_table(pl.read_parquet(source).with_columns(*columns), target, **provenance)
    return target


def report_page(project: Path, folder: Path) -> Path:
    """Write the report page with `HOSTILE` as every question and answer."""
    results, store = project / "results/tiny", project / "results/store/tiny"
    settings = json.loads(_spec(project))
    text = pl.lit(HOSTILE)
    generations = [
        changed(path, folder / path.relative_to(store), text.alias("text"))
        for path in sorted(store.glob("generations/*/*.parquet"))
    ]
    probes = []
    for task in sorted(settings["tasks"]):
        (path,) = store.glob(f"probes/{settings['tasks'][task]['dataset']}/*.parquet")
        probes.append(
            changed(path, folder / f"{task}.parquet", text.alias("question"), text.alias("answer"))
        )
    drawn = write_page.figures_of(**write_page.figures_spec(settings))
    tables = ("ablation", "significance", "heads", "pass_rates", "selection")
    write_page.main(
        SimpleNamespace(
            input=Inputs(
                **{kind: results / f"{kind}.parquet" for kind in tables},
                figures=[results / f"figures/{figure.name}.svg" for figure in drawn],
                generations=generations,
                probes=probes,
                kv_check=[results / "kv_check.parquet"],
                citation=project / "CITATION.cff",
            ),
            params=SimpleNamespace(spec=json.dumps(settings)),
            wildcards=SimpleNamespace(model="tiny"),
            output=[folder / "report.html"],
        )
    )
    return folder / "report.html"


def _spec(project: Path) -> str:
    import yaml

    config = yaml.safe_load((project / "config.yaml").read_text(encoding="utf-8"))
    for row in config["tasks"].values():
        row.setdefault("role", "control")
    return json.dumps(config)


def hostile_trace(project: Path, folder: Path) -> Path:
    """Write the page of the trace with `HOSTILE` as its question, answer and every source token."""
    results = project / "results/tiny"
    heads, tokens = (results / f"traces/kiasma.{kind}.parquet" for kind in ("heads", "tokens"))
    about = read_provenance(heads)
    about.pop("versions")
    about["question"], about["answer"] = HOSTILE, [HOSTILE] * len(about["answer"])
    about["probe"] |= {"generated_text": HOSTILE, "answer": HOSTILE}
    write_table(pl.read_parquet(heads), folder / "heads.parquet", **about)
    write_trace.main(
        SimpleNamespace(
            input=SimpleNamespace(
                heads=folder / "heads.parquet",
                tokens=changed(tokens, folder / "tokens.parquet", pl.lit(HOSTILE).alias("source")),
                probes=results / "retrieval/probes.parquet",
                auc=results / "retrieval/auc.parquet",
            ),
            wildcards=SimpleNamespace(model="tiny", trace="kiasma"),
            output=[folder / "trace.html"],
        )
    )
    return folder / "trace.html"


def compare_page(project: Path, folder: Path) -> Path:
    """Write the page of the planted model beside itself under another name, half as good."""
    inputs: dict[str, list[Path]] = {"ablation": [], "heads": []}
    spec = {"models": ["tiny", "half"], "tasks": task_metrics(json.loads(_spec(project)))}
    for kind, paths in inputs.items():
        source = project / f"results/tiny/{kind}.parquet"
        columns = [pl.lit("half").alias("model"), pl.col("value") / 2]
        paths += [source, changed(source, folder / f"{kind}.parquet", *columns)]
    compare_models.main(
        SimpleNamespace(
            input=SimpleNamespace(**inputs),
            params=SimpleNamespace(spec=json.dumps(spec)),
            output=[folder / "compare.html"],
        )
    )
    return folder / "compare.html"
