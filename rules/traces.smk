rule measure_retrieval:
    input:
        score=lambda wildcards: retrieval_score(wildcards.model),
        present=lambda wildcards: ancient(
            shards_of(wildcards.model, config["retrieval"]["present"])
        ),
        removed=lambda wildcards: ancient(
            shards_of(wildcards.model, config["retrieval"]["removed"])
        ),
    output:
        probes="results/{model}/retrieval/probes.parquet",
        auc="results/{model}/retrieval/auc.parquet",
    log:
        "results/{model}/logs/measure_retrieval.log",
    benchmark:
        "results/{model}/benchmarks/measure_retrieval.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        spec=lambda wildcards: canonical_json(retrieval_spec(config, wildcards.model)),
        code=code_of("traces/measure_retrieval.py"),
    script:
        "../workflow_scripts/traces/measure_retrieval.py"


rule take_apart:
    input:
        score=lambda wildcards: retrieval_score(wildcards.model),
        shards=lambda wildcards: ancient(
            shards_of(wildcards.model, config["traces"][wildcards.trace]["dataset"])
        ),
        model=lambda wildcards: ancient(converted(wildcards.model, TOKENIZER_FILES)),
    output:
        heads="results/{model}/traces/{trace}.heads.parquet",
        tokens="results/{model}/traces/{trace}.tokens.parquet",
    log:
        "results/{model}/logs/take_apart/{trace}.log",
    benchmark:
        "results/{model}/benchmarks/take_apart/{trace}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        spec=lambda wildcards: canonical_json(
            trace_spec(config, wildcards.model, wildcards.trace)
        ),
        code=code_of("traces/take_apart.py"),
    script:
        "../workflow_scripts/traces/take_apart.py"


rule write_trace:
    input:
        heads="results/{model}/traces/{trace}.heads.parquet",
        tokens="results/{model}/traces/{trace}.tokens.parquet",
        probes="results/{model}/retrieval/probes.parquet",
        auc="results/{model}/retrieval/auc.parquet",
    output:
        "results/{model}/traces/{trace}.html",
    log:
        "results/{model}/logs/write_trace/{trace}.log",
    benchmark:
        "results/{model}/benchmarks/write_trace/{trace}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        templates=templates_digest(),
        code=code_of("report/write_trace.py"),
    script:
        "../workflow_scripts/report/write_trace.py"
