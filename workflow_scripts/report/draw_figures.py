"""Draw the figures of a model."""

import json
from pathlib import Path
from typing import Any

from workflow_scripts.common.artifacts import atomic_path, read_table
from workflow_scripts.common.script import run_script
from workflow_scripts.report.catalogue import figures_of
from workflow_scripts.report.plots import draw, save, style
from workflow_scripts.report.series import with_metrics


def main(snakemake: Any) -> None:
    """Write every figure of the catalogue, as SVG and as PNG."""
    spec = json.loads(snakemake.params.spec)
    tables = {kind: read_table(path, kind=kind) for kind, path in snakemake.input.items()}
    folder = Path(snakemake.output.svg[0]).parent
    tables["ablation"] = with_metrics(tables["ablation"], spec["metrics"])
    with style():
        for figure in figures_of(**spec["figures"]):
            drawn = draw(figure.kind, figure.subject, tables)
            for suffix in ("svg", "png"):
                with atomic_path(folder / f"{figure.name}.{suffix}") as temporary:
                    save(drawn, temporary, suffix)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
