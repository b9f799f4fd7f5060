"""LOCOS as a Snakemake workflow: probes -> activations -> scores -> ablation -> report."""
