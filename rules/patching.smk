rule patch:
    input:
        probes=lambda wildcards: ancient(
            probes_path(
                wildcards.model, config["patching"][wildcards.patching]["dataset"]
            )
        ),
        model=lambda wildcards: ancient(converted(wildcards.model, CONVERTED_FILES)),
    output:
        made("{model}/patching/{patching}/{key}.parquet"),
    log:
        "results/{model}/logs/patch/{patching}/{key}.log",
    benchmark:
        "results/{model}/benchmarks/patch/{patching}/{key}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: model_threads
    resources:
        mem_mb=model_memory,
        runtime=model_runtime,
        gpu=model_gpus,
    params:
        spec=lambda wildcards: spec_of_key(
            patching_spec(config, wildcards.model, wildcards.patching), wildcards.key
        ),
    script:
        "../workflow_scripts/patching/patch.py"
