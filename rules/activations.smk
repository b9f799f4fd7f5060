if config["activations"]["source"] == "archive":

    rule download:
        output:
            shard=made("{model}/activations/{dataset}/{key}/{shard}.zarr.zip"),
            manifest=made("{model}/activations/{dataset}/{key}/{shard}.json"),
        log:
            "results/{model}/logs/download/{dataset}/{key}/{shard}.log",
        benchmark:
            "results/{model}/benchmarks/download/{dataset}/{key}/{shard}.tsv"
        retries: 2
        conda:
            "../envs/cpu.yaml"
        threads: 1
        resources:
            mem_mb=500,
            runtime=240,
        params:
            spec=lambda wildcards: spec_of_key(
                activations_spec(config, wildcards.model, wildcards.dataset),
                wildcards.key,
            ),
        script:
            "../workflow_scripts/sharing/download.py"

else:

    for name, models, shards in capture_rules(config):

        rule:
            name:
                name
            input:
                probes=lambda wildcards: ancient(
                    probes_path(wildcards.model, wildcards.dataset)
                ),
                model=lambda wildcards: ancient(
                    converted(wildcards.model, CONVERTED_FILES)
                ),
                lens=lambda wildcards: ancient(lens_of(wildcards.model)),
            output:
                shards=[
                    made(f"{{model}}/activations/{{dataset}}/{{key}}/{shard}.zarr.zip")
                    for shard in shards
                ],
                manifests=[
                    made(f"{{model}}/activations/{{dataset}}/{{key}}/{shard}.json")
                    for shard in shards
                ],
            log:
                f"results/{{model}}/logs/capture/{{dataset}}/{{key}}/{shards[0]}.log",
            benchmark:
                f"results/{{model}}/benchmarks/capture/{{dataset}}/{{key}}/{shards[0]}.tsv"
            wildcard_constraints:
                model=one_of(models),
            conda:
                "../envs/cpu.yaml"
            threads: model_threads
            resources:
                mem_mb=model_memory,
                runtime=model_runtime,
                gpu=model_gpus,
            params:
                spec=lambda wildcards: spec_of_key(
                    activations_spec(config, wildcards.model, wildcards.dataset),
                    wildcards.key,
                ),
            script:
                "../workflow_scripts/activations/capture.py"
