rule fetch_file:
    output:
        file=made("files/{key}/{file}"),
        origin=made("files/{key}/{file}.origin.json"),
    log:
        "results/logs/fetch_file/{key}/{file}.log",
    benchmark:
        "results/benchmarks/fetch_file/{key}/{file}.tsv"
    wildcard_constraints:
        file=one_of(source["file"] for source in remote_files(config).values()),
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=20,
    params:
        spec=lambda wildcards, output: canonical_json(remote_files(config)[output.file]),
    script:
        "../workflow_scripts/data/fetch_file.py"
