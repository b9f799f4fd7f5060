checkpoint select_groups:
    input:
        score=lambda wildcards: kv_score(wildcards.model),
        renewed=lambda wildcards: renewed(
            f"results/{wildcards.model}/kv_selection.parquet",
            kv_selection_spec(config, wildcards.model),
        ),
    output:
        "results/{model}/kv_selection.parquet",
    log:
        "results/{model}/logs/select_groups.log",
    benchmark:
        "results/{model}/benchmarks/select_groups.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=lambda wildcards: canonical_json(
            kv_selection_spec(config, wildcards.model)
        ),
        code=code_of("kv_plan/select_groups.py"),
    script:
        "../workflow_scripts/kv_plan/select_groups.py"


use rule generate as generate_blinded with:
    input:
        selection=ancient("results/{model}/kv_selection.parquet"),
        probes=lambda wildcards: ancient(task_probes(wildcards.model, wildcards.task)),
        model=lambda wildcards: ancient(converted(wildcards.model, CONVERTED_FILES)),
    output:
        made("{model}/kv_generations/{task}/{key}.parquet"),
    log:
        "results/{model}/logs/generate_blinded/{task}/{key}.log",
    benchmark:
        "results/{model}/benchmarks/generate_blinded/{task}/{key}.tsv"


rule plan_cache:
    input:
        score=lambda wildcards: kv_score(wildcards.model),
        selection="results/{model}/kv_selection.parquet",
        blinded=lambda wildcards: ancient(kv_blinded(wildcards.model)),
        unablated=lambda wildcards: ancient(
            unablated_of(wildcards.model, kv_tasks(config))
        ),
        model=lambda wildcards: ancient(converted(wildcards.model, CONVERTED_FILES)),
        renewed=lambda wildcards: renewed(
            f"results/{wildcards.model}/kv_plan.parquet",
            kv_plan_spec(config, wildcards.model),
        ),
    output:
        plan=report(
            "results/{model}/kv_plan.parquet",
            caption="../workflow_scripts/report/captions/kv_plan_table.rst",
            category="KV plan",
            labels={"model": "{model}", "figure": "table: KV plan"},
        ),
        check=report(
            "results/{model}/kv_check.parquet",
            caption="../workflow_scripts/report/captions/kv_check_table.rst",
            category="KV plan",
            labels={"model": "{model}", "figure": "table: KV plan, checked"},
        ),
    log:
        "results/{model}/logs/plan_cache.log",
    benchmark:
        "results/{model}/benchmarks/plan_cache.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=lambda wildcards: canonical_json(kv_plan_spec(config, wildcards.model)),
        code=code_of("kv_plan/plan_cache.py"),
    script:
        "../workflow_scripts/kv_plan/plan_cache.py"
