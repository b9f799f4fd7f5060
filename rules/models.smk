rule convert_gguf:
    output:
        [made(f"{{model}}/model/{{key}}/{name}") for name in CONVERTED_FILES],
    log:
        "results/{model}/logs/convert_gguf/{key}.log",
    benchmark:
        "results/{model}/benchmarks/convert_gguf/{key}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=20,
    params:
        spec=lambda wildcards: canonical_json(
            config["models"][wildcards.model]["source"]
        ),
    script:
        "../workflow_scripts/models/convert_gguf.py"


rule fetch_config:
    output:
        made("{model}/hub/{key}/config.json"),
    log:
        "results/{model}/logs/fetch_config/{key}.log",
    benchmark:
        "results/{model}/benchmarks/fetch_config/{key}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=lambda wildcards: canonical_json(
            config["models"][wildcards.model]["source"]
        ),
    script:
        "../workflow_scripts/models/fetch_config.py"
