rule score:
    input:
        evidence=lambda wildcards: ancient(
            evidence_of(wildcards.model, wildcards.score)
        ),
    output:
        "results/{model}/scores/{score}.parquet",
    log:
        "results/{model}/logs/score/{score}.log",
    benchmark:
        "results/{model}/benchmarks/score/{score}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        spec=lambda wildcards: canonical_json(
            score_spec(config, wildcards.model, wildcards.score)
        ),
        code=code_of("scores/score.py"),
    script:
        "../workflow_scripts/scores/score.py"


rule collect_heads:
    input:
        scores=expand(
            "results/{{model}}/scores/{score}.parquet", score=config["scores"]
        ),
    output:
        report(
            "results/{model}/heads.parquet",
            caption="../workflow_scripts/report/captions/heads_table.rst",
            category="Heads",
            labels={"model": "{model}", "figure": "table: heads"},
        ),
    log:
        "results/{model}/logs/collect_heads.log",
    benchmark:
        "results/{model}/benchmarks/collect_heads.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=canonical_json(sorted(config["scores"])),
        code=code_of("scores/collect_heads.py"),
    script:
        "../workflow_scripts/scores/collect_heads.py"
