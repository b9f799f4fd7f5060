rule calibrate:
    input:
        probes=lambda wildcards: ancient(calibration_probes(wildcards.model)),
        model=lambda wildcards: ancient(converted(wildcards.model, CONVERTED_FILES)),
    output:
        made("{model}/calibration/{key}.parquet"),
    log:
        "results/{model}/logs/calibrate/{key}.log",
    benchmark:
        "results/{model}/benchmarks/calibrate/{key}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: model_threads
    resources:
        mem_mb=model_memory,
        runtime=model_runtime,
        gpu=model_gpus,
    params:
        spec=lambda wildcards: spec_of_key(
            calibration_spec(config, wildcards.model), wildcards.key
        ),
    script:
        "../workflow_scripts/ablation/calibrate.py"


checkpoint select_heads:
    input:
        heads="results/{model}/heads.parquet",
        renewed=lambda wildcards: renewed(
            f"results/{wildcards.model}/selection.parquet",
            selection_spec(config, wildcards.model),
        ),
    output:
        "results/{model}/selection.parquet",
    log:
        "results/{model}/logs/select_heads.log",
    benchmark:
        "results/{model}/benchmarks/select_heads.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=lambda wildcards: canonical_json(selection_spec(config, wildcards.model)),
        code=code_of("ablation/select_heads.py"),
    script:
        "../workflow_scripts/ablation/select_heads.py"


rule generate:
    input:
        selection=ancient("results/{model}/selection.parquet"),
        probes=lambda wildcards: ancient(task_probes(wildcards.model, wildcards.task)),
        calibration=lambda wildcards: ancient(
            calibration_of(wildcards.model, wildcards.key)
        ),
        model=lambda wildcards: ancient(converted(wildcards.model, CONVERTED_FILES)),
    output:
        made("{model}/generations/{task}/{key}.parquet"),
    log:
        "results/{model}/logs/generate/{task}/{key}.log",
    benchmark:
        "results/{model}/benchmarks/generate/{task}/{key}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: model_threads
    resources:
        mem_mb=model_memory,
        runtime=model_runtime,
        gpu=model_gpus,
    params:
        spec=lambda wildcards: canonical_json(
            generations_spec(config, wildcards.model, wildcards.task)
        ),
    script:
        "../workflow_scripts/ablation/generate.py"


rule ablation:
    input:
        selection="results/{model}/selection.parquet",
        generations=lambda wildcards: ancient(generations_of(wildcards.model)),
        renewed=lambda wildcards: renewed(
            f"results/{wildcards.model}/ablation.parquet",
            ablation_spec(config, wildcards.model),
        ),
    output:
        report(
            "results/{model}/ablation.parquet",
            caption="../workflow_scripts/report/captions/ablation_table.rst",
            category="Ablation",
            labels={"model": "{model}", "figure": "table: ablation"},
        ),
    log:
        "results/{model}/logs/ablation.log",
    benchmark:
        "results/{model}/benchmarks/ablation.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=lambda wildcards: canonical_json(ablation_spec(config, wildcards.model)),
        code=code_of("ablation/tabulate.py"),
    script:
        "../workflow_scripts/ablation/tabulate.py"


rule summary:
    input:
        ablation="results/{model}/ablation.parquet",
        heads="results/{model}/heads.parquet",
    output:
        "results/{model}/summary.md",
    log:
        "results/{model}/logs/summary.log",
    benchmark:
        "results/{model}/benchmarks/summary.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        spec=canonical_json(task_metrics(config)),
        code=code_of("ablation/show.py"),
    script:
        "../workflow_scripts/ablation/show.py"


rule compare:
    input:
        selection="results/{model}/selection.parquet",
        generations=lambda wildcards: ancient(generations_of(wildcards.model)),
        renewed=lambda wildcards: renewed(
            f"results/{wildcards.model}/significance.parquet",
            comparison_spec(config, wildcards.model),
        ),
    output:
        report(
            "results/{model}/significance.parquet",
            caption="../workflow_scripts/report/captions/significance_table.rst",
            category="Ablation",
            labels={"model": "{model}", "figure": "table: significance"},
        ),
    log:
        "results/{model}/logs/compare.log",
    benchmark:
        "results/{model}/benchmarks/compare.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=lambda wildcards: canonical_json(comparison_spec(config, wildcards.model)),
        code=code_of("ablation/compare.py"),
    script:
        "../workflow_scripts/ablation/compare.py"


rule dissociate:
    input:
        selection="results/{model}/selection.parquet",
        generations=lambda wildcards: ancient(generations_of(wildcards.model)),
        renewed=lambda wildcards: renewed(
            f"results/{wildcards.model}/dissociation.parquet",
            dissociation_spec(config, wildcards.model),
        ),
    output:
        "results/{model}/dissociation.parquet",
    log:
        "results/{model}/logs/dissociate.log",
    benchmark:
        "results/{model}/benchmarks/dissociate.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=lambda wildcards: canonical_json(
            dissociation_spec(config, wildcards.model)
        ),
        code=code_of("ablation/dissociate.py"),
    script:
        "../workflow_scripts/ablation/dissociate.py"
