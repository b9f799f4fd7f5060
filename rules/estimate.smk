rule estimate:
    output:
        "results/estimate.md",
    log:
        "results/logs/estimate.log",
    benchmark:
        "results/benchmarks/estimate.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        spec=canonical_json(config),
        code=code_of("estimate/estimate.py"),
    script:
        "../workflow_scripts/estimate/estimate.py"
