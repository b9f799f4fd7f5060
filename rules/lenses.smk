rule train_lens:
    input:
        texts=lambda wildcards: ancient(lens_texts(config, wildcards.model)),
        model=lambda wildcards: ancient(converted(wildcards.model, CONVERTED_FILES)),
    output:
        made("{model}/lenses/trained/{key}.safetensors"),
    log:
        "results/{model}/logs/train_lens/{key}.log",
    benchmark:
        "results/{model}/benchmarks/train_lens/{key}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: model_threads
    resources:
        mem_mb=model_memory,
        runtime=240,
        gpu=model_gpus,
    params:
        spec=lambda wildcards: spec_of_key(
            lens_spec(config, wildcards.model), wildcards.key
        ),
    script:
        "../workflow_scripts/lenses/train_lens.py"


rule fetch_lens:
    input:
        model=lambda wildcards: ancient(converted(wildcards.model, CONVERTED_FILES)),
    output:
        made("{model}/lenses/fetched/{key}.safetensors"),
    log:
        "results/{model}/logs/fetch_lens/{key}.log",
    benchmark:
        "results/{model}/benchmarks/fetch_lens/{key}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        spec=lambda wildcards: spec_of_key(
            lens_spec(config, wildcards.model), wildcards.key
        ),
    script:
        "../workflow_scripts/lenses/fetch_lens.py"
