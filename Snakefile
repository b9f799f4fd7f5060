"""LOCOS: which attention heads carry meaning from the context into the answer?

probes -> activations -> scores -> ablation. Read rules/common.smk for the paths, README.md for the use.
"""

from snakemake.utils import min_version

min_version("9.20")


configfile: "config.yaml"


include: "rules/common.smk"


wildcard_constraints:
    model=one_of(config["models"]),
    dataset=one_of(config["probes"]),
    score=one_of(config["scores"]),
    patching=one_of(config["patching"]),
    task=one_of(config["tasks"]),
    trace=one_of(config["traces"]),
    key="[0-9a-f]{16}",
    shard="[0-9]{3}-of-[0-9]{3}",


localrules:
    all,


rule all:
    default_target: True
    input:
        expand(
            "results/{model}/{page}",
            model=config["models"],
            page=["summary.md", "report.html"],
        ),


include: "rules/data.smk"
include: "rules/models.smk"
include: "rules/probes.smk"
include: "rules/lenses.smk"
include: "rules/activations.smk"
include: "rules/patching.smk"
include: "rules/scores.smk"
include: "rules/ablation.smk"
include: "rules/kv_plan.smk"
include: "rules/sharing.smk"
include: "rules/report.smk"
include: "rules/traces.smk"
include: "rules/estimate.smk"
include: "rules/analysis.smk"
