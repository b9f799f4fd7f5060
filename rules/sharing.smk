rule pack:
    input:
        artifacts=lambda wildcards: [
            stored(file)[0] for file in packed_files(wildcards.model)
        ],
        data=[local(file) for file in data_files(config)],
    output:
        "results/{model}/pack.zip",
    log:
        "results/{model}/logs/pack.log",
    benchmark:
        "results/{model}/benchmarks/pack.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=240,
    params:
        spec=lambda wildcards: canonical_json(
            {"artifacts": packed_files(wildcards.model), "config": config}
        ),
        code=code_of("sharing/pack.py"),
    script:
        "../workflow_scripts/sharing/pack.py"
