rule tokenize_probes:
    input:
        needles=lambda wildcards: ancient(
            config["probes"][wildcards.dataset]["needles"]
        ),
        haystacks=lambda wildcards: ancient(
            haystack_files(config["probes"][wildcards.dataset])
        ),
        tokenizer=lambda wildcards: ancient(converted(wildcards.model, TOKENIZER_FILES)),
    output:
        "results/{model}/probes/{dataset}.parquet",
    log:
        "results/{model}/logs/tokenize_probes/{dataset}.log",
    benchmark:
        "results/{model}/benchmarks/tokenize_probes/{dataset}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=20,
    params:
        spec=lambda wildcards: canonical_json(
            probes_spec(config, wildcards.model, wildcards.dataset)
        ),
        code=code_of("probes/tokenize_probes.py"),
    script:
        "../workflow_scripts/probes/tokenize_probes.py"
