rule convert_gguf:
    output:
        expand(
            "{store}/{{model}}/model/{{key}}/{file}", store=STORE, file=CONVERTED_FILES
        ),
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
