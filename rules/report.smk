rule count_passes:
    input:
        shards=lambda wildcards: ancient(detection_shards(wildcards.model)),
        probes=lambda wildcards: ancient(
            [task_probes(wildcards.model, task) for task in sorted(config["tasks"])]
        ),
        generations=lambda wildcards: ancient(
            unablated_of(wildcards.model, config["tasks"])
        ),
    output:
        report(
            "results/{model}/pass_rates.parquet",
            caption=caption("pass_rates_table"),
            category="Probes",
            labels={"model": "{model}", "figure": "table: pass rates"},
        ),
    log:
        "results/{model}/logs/count_passes.log",
    benchmark:
        "results/{model}/benchmarks/count_passes.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=canonical_json(task_metrics(config)),
        code=code_of("report/count_passes.py"),
    script:
        "../workflow_scripts/report/count_passes.py"


rule draw_figures:
    input:
        unpack(figure_tables),
    output:
        svg=[shown(figure) for figure in FIGURES],
        png=[f"results/{{model}}/figures/{figure.name}.png" for figure in FIGURES],
    log:
        "results/{model}/logs/draw_figures.log",
    benchmark:
        "results/{model}/benchmarks/draw_figures.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=20,
    params:
        spec=canonical_json(
            {"figures": figures_spec(config), "metrics": task_metrics(config)}
        ),
        code=code_of("report/draw_figures.py"),
    script:
        "../workflow_scripts/report/draw_figures.py"


rule write_page:
    input:
        ablation="results/{model}/ablation.parquet",
        significance="results/{model}/significance.parquet",
        heads="results/{model}/heads.parquet",
        pass_rates="results/{model}/pass_rates.parquet",
        figures=[f"results/{{model}}/figures/{figure.name}.svg" for figure in FIGURES],
        selection="results/{model}/selection.parquet",
        generations=lambda wildcards: ancient(generations_of(wildcards.model)),
        probes=lambda wildcards: ancient(
            [task_probes(wildcards.model, task) for task in sorted(config["tasks"])]
        ),
        kv_check=(["results/{model}/kv_check.parquet"] if "kv_plan" in config else []),
        citation="CITATION.cff",
    output:
        report(
            "results/{model}/report.html",
            caption=caption("report"),
            category="Report",
            labels={"model": "{model}", "figure": "page"},
        ),
    log:
        "results/{model}/logs/write_page.log",
    benchmark:
        "results/{model}/benchmarks/write_page.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=lambda wildcards: canonical_json(report_spec(config, wildcards.model)),
        templates=templates_digest(),
        code=code_of("report/write_page.py"),
    script:
        "../workflow_scripts/report/write_page.py"


rule compare_models:
    input:
        ablation=expand("results/{model}/ablation.parquet", model=config["models"]),
        heads=expand("results/{model}/heads.parquet", model=config["models"]),
    output:
        report(
            "results/compare.html",
            caption=caption("compare"),
            category="Report",
            labels={"model": "all", "figure": "page: models side by side"},
        ),
    log:
        "results/logs/compare_models.log",
    benchmark:
        "results/benchmarks/compare_models.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        spec=canonical_json(
            {"models": sorted(config["models"]), "tasks": task_metrics(config)}
        ),
        templates=templates_digest(),
        code=code_of("report/compare_models.py"),
    script:
        "../workflow_scripts/report/compare_models.py"
