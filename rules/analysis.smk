TOP = config["analysis"].get("k", config["ablation"]["k"])
"""Sizes of the top k that are looked at."""

VIEWS = {
    "layers": {"k": TOP},
    "kv_groups": {"k": TOP},
    "distribution": {},
    "specificity": config["analysis"].get("specificity"),
    "consensus": {"k": TOP},
}
"""View of heads.parquet -> its settings; specificity has none until the config names two scores."""

CAUSAL = [score for score, row in config["scores"].items() if "patching" in row]
DETECTORS = [score for score in config["scores"] if score not in CAUSAL]
COMPARISONS = {
    "overlap": {
        "pairs": [
            [one, other]
            for one in sorted(config["scores"])
            for other in sorted(config["scores"])
            if one < other
        ],
        "measures": ["jaccard", "rbo"],
    },
    "agreement": {
        "pairs": [
            [one, causal] for one in sorted(DETECTORS) for causal in sorted(CAUSAL)
        ],
        "measures": ["spearman", "kendall", "jaccard"],
    },
}
"""Comparison -> the pairs of scores it is made of, and how they are compared."""

STEPWISE = [
    score
    for score, row in sorted(config["scores"].items())
    if "formula" in row and row.get("steps", "answer") == "answer"
]
SCORED = sorted(
    {row["dataset"] for row in config["scores"].values() if "dataset" in row}
)

POSSIBLE = [
    *(view for view, settings in VIEWS.items() if settings is not None),
    *(name for name, comparison in COMPARISONS.items() if comparison["pairs"]),
    *(["steps"] if STEPWISE else []),
    *(["provenance"] if SCORED else []),
]
"""The analyses that the present config has what it takes for."""

MISSING = {
    "specificity": "set analysis.specificity to a literal and a nonliteral score",
    "overlap": "name two scores or more",
    "agreement": "add a score with patching: and one without",
    "steps": "add a formula over answer steps",
    "provenance": "add a score with a dataset",
}


rule score_probes:
    input:
        evidence=lambda wildcards: ancient(
            evidence_of(wildcards.model, wildcards.score)
        ),
    output:
        "results/{model}/analysis/per_probe/{score}.parquet",
    log:
        "results/{model}/logs/score_probes/{score}.log",
    benchmark:
        "results/{model}/benchmarks/score_probes/{score}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        spec=lambda wildcards: canonical_json(
            score_spec(config, wildcards.model, wildcards.score)
        ),
        code=code_of("analysis/score_probes.py"),
    script:
        "../workflow_scripts/analysis/score_probes.py"


rule export_heads:
    input:
        "results/{model}/analysis/per_probe/{score}.parquet",
    output:
        "results/{model}/heads/{score}.json",
    log:
        "results/{model}/logs/export_heads/{score}.log",
    benchmark:
        "results/{model}/benchmarks/export_heads/{score}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        code=code_of("analysis/export_heads.py"),
    script:
        "../workflow_scripts/analysis/export_heads.py"


rule compare_scores:
    input:
        lambda wildcards: inputs_of_analysis(
            wildcards.comparison,
            expand(
                "results/{model}/analysis/per_probe/{score}.parquet",
                model=wildcards.model,
                score=sorted(sum(COMPARISONS[wildcards.comparison]["pairs"], [])),
            ),
        ),
    output:
        "results/{model}/analysis/{comparison}.parquet",
    log:
        "results/{model}/logs/analysis/{comparison}.log",
    benchmark:
        "results/{model}/benchmarks/analysis/{comparison}.tsv"
    wildcard_constraints:
        comparison=one_of(COMPARISONS),
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        spec=lambda wildcards: canonical_json(
            {
                **COMPARISONS[wildcards.comparison],
                "k": TOP,
                "seed": config["seed"],
            }
        ),
        code=code_of("analysis/compare_scores.py"),
    script:
        "../workflow_scripts/analysis/compare_scores.py"


rule view_heads:
    input:
        lambda wildcards: inputs_of_analysis(
            wildcards.view, f"results/{wildcards.model}/heads.parquet"
        ),
    output:
        "results/{model}/analysis/{view}.parquet",
    log:
        "results/{model}/logs/analysis/{view}.log",
    benchmark:
        "results/{model}/benchmarks/analysis/{view}.tsv"
    wildcard_constraints:
        view=one_of(VIEWS),
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=lambda wildcards: canonical_json(VIEWS[wildcards.view]),
        code=code_of("analysis/view_heads.py"),
    script:
        "../workflow_scripts/analysis/view_heads.py"


rule trace_steps:
    input:
        lambda wildcards: inputs_of_analysis("steps", []),
        unpack(
            lambda wildcards: {
                f"of_{score}": ancient(evidence_of(wildcards.model, score))
                for score in STEPWISE
            }
        ),
    output:
        "results/{model}/analysis/steps.parquet",
    log:
        "results/{model}/logs/analysis/steps.log",
    benchmark:
        "results/{model}/benchmarks/analysis/steps.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        spec=lambda wildcards: canonical_json(
            [score_spec(config, wildcards.model, score) for score in STEPWISE]
        ),
        code=code_of("analysis/trace_steps.py"),
    script:
        "../workflow_scripts/analysis/trace_steps.py"


rule trace_provenance:
    input:
        lambda wildcards: inputs_of_analysis("provenance", []),
        unpack(
            lambda wildcards: {
                f"of_{dataset}": ancient(shards_of(wildcards.model, dataset))
                for dataset in SCORED
            }
        ),
    output:
        "results/{model}/analysis/provenance.parquet",
    log:
        "results/{model}/logs/analysis/provenance.log",
    benchmark:
        "results/{model}/benchmarks/analysis/provenance.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        spec=lambda wildcards: canonical_json(
            {
                dataset: activations_spec(config, wildcards.model, dataset)
                for dataset in SCORED
            }
        ),
        code=code_of("analysis/trace_provenance.py"),
    script:
        "../workflow_scripts/analysis/trace_provenance.py"


localrules:
    analysis,


rule analysis:
    input:
        expand(
            "results/{model}/analysis/{analysis}.parquet",
            model=config["models"],
            analysis=POSSIBLE,
        ),
