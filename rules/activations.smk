rule capture:
    input:
        probes=lambda wildcards: ancient(
            probes_path(wildcards.model, wildcards.dataset)
        ),
        model=lambda wildcards: ancient(converted(wildcards.model, CONVERTED_FILES)),
        lens=lambda wildcards: ancient(lens_of(wildcards.model)),
    output:
        shard=made("{model}/activations/{dataset}/{key}/{shard}.zarr.zip"),
        manifest=made("{model}/activations/{dataset}/{key}/{shard}.json"),
    log:
        "results/{model}/logs/capture/{dataset}/{key}/{shard}.log",
    benchmark:
        "results/{model}/benchmarks/capture/{dataset}/{key}/{shard}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: model_threads
    resources:
        mem_mb=model_memory,
        runtime=model_runtime,
        gpu=model_gpus,
    params:
        spec=lambda wildcards: spec_of_key(
            activations_spec(config, wildcards.model, wildcards.dataset), wildcards.key
        ),
    script:
        "../workflow_scripts/activations/capture.py"
