rule tokenize_probes:
    input:
        needles=lambda wildcards: ancient(
            data_file(config["probes"][wildcards.dataset]["needles"])
        ),
        haystacks=lambda wildcards: [
            ancient(data_file(file))
            for file in haystack_files(config["probes"][wildcards.dataset])
        ],
        prompt=lambda wildcards: [
            ancient(local(file))
            for file in [config["probes"][wildcards.dataset].get("prompt")]
            if file is not None
        ],
        model=lambda wildcards: ancient(converted(wildcards.model, TOKENIZER_FILES)),
    output:
        made("{model}/probes/{dataset}/{key}.parquet"),
    log:
        "results/{model}/logs/tokenize_probes/{dataset}/{key}.log",
    benchmark:
        "results/{model}/benchmarks/tokenize_probes/{dataset}/{key}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=20,
    params:
        spec=lambda wildcards: spec_of_key(
            probes_spec(config, wildcards.model, wildcards.dataset), wildcards.key
        ),
    script:
        "../workflow_scripts/probes/tokenize_probes.py"


rule show_probes:
    input:
        lambda wildcards: ancient(probes_path(wildcards.model, wildcards.dataset)),
    output:
        "results/{model}/probes/{dataset}.parquet",
    log:
        "results/{model}/logs/show_probes/{dataset}.log",
    benchmark:
        "results/{model}/benchmarks/show_probes/{dataset}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=500,
        runtime=5,
    params:
        spec=lambda wildcards: key_of(
            probes_spec(config, wildcards.model, wildcards.dataset)
        ),
    shell:
        "cp {input:q} {output:q} 2> {log:q}"
