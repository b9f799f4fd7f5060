"""Write the page of a trace."""

from pathlib import Path
from typing import Any

from workflow_scripts.common.artifacts import atomic_path, read_provenance, read_table
from workflow_scripts.common.script import run_script
from workflow_scripts.report.page import render
from workflow_scripts.report.trace_page import reference_rows, signal_of, trace_data


def main(snakemake: Any) -> None:
    """Write traces/{trace}.html."""
    heads = read_table(snakemake.input.heads, kind="trace heads")
    tokens = read_table(snakemake.input.tokens, kind="trace tokens")
    probes = read_table(snakemake.input.probes, kind="retrieval probes")
    auc = read_table(snakemake.input.auc, kind="retrieval auc")
    about = read_provenance(snakemake.input.heads)
    probe, share = about["probe"], about["share"]
    signal = None if share is None else signal_of(share, probes, auc)
    page = render(
        "trace.html.j2",
        model=snakemake.wildcards.model,
        trace=snakemake.wildcards.trace,
        question=about["question"],
        said=probe["generated_text"].strip() or "(nothing)",
        expected=probe["answer"],
        score=about["spec"]["score"]["score"],
        k=about["spec"]["k"],
        signal=signal,
        reference=[] if signal is None else reference_rows(signal, probes),
        auc=auc.to_dicts(),
        data=trace_data(heads, tokens, about["answer"], about["top_heads"]),
    )
    with atomic_path(Path(snakemake.output[0])) as temporary:
        temporary.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
