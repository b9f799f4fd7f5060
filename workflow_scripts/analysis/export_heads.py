"""Write a score in the field's format for head files, JSON {"meta": ..., "scores": {...}}."""

import json
from typing import Any

from workflow_scripts.analysis.per_probe import ProbeScores, probe_values, read_per_probe
from workflow_scripts.common.artifacts import atomic_path
from workflow_scripts.common.script import run_script


def head_file(scores: ProbeScores) -> dict[str, Any]:
    """Return the content of a head file.

    "scores" maps "layer-head" to a value a probe (see `probe_values`), in the order of meta's
    "probes"; the mean of a list is the head's value, so a reader of the file finds our ranking.
    """
    values = probe_values(scores.probes, scores.pool)
    _, n_layers, n_heads = values.shape
    return {
        "meta": {
            "model": scores.model,
            "score": scores.score,
            "pool": scores.pool,
            "probes": [probe for _, probe in scores.ids],
        },
        "scores": {
            f"{layer}-{head}": values[:, layer, head].tolist()
            for layer in range(n_layers)
            for head in range(n_heads)
        },
    }


def main(snakemake: Any) -> None:
    """Write the head file of one score."""
    content = head_file(read_per_probe(snakemake.input[0]))
    with atomic_path(snakemake.output[0]) as temporary:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
