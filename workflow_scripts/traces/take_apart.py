"""Take one answer of a captured dataset apart."""

import json
from typing import Any

from workflow_scripts.common.artifacts import read_table, write_table
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.models import load_tokenizer, source_of_rule
from workflow_scripts.common.script import run_script
from workflow_scripts.common.shards import open_shard
from workflow_scripts.scores.ranking import top_heads
from workflow_scripts.traces.retrieval import document_shares
from workflow_scripts.traces.trace import (
    answer_of,
    head_table,
    probe_index,
    question_of,
    token_pieces,
    token_table,
    writers,
)


def main(snakemake: Any) -> None:
    """Write what every head wrote, and what the chosen heads wrote from each source token."""
    spec = json.loads(snakemake.params.spec)
    best = top_heads(read_table(snakemake.input.score, kind="scores"), spec["k"])
    tokenizer = load_tokenizer(source_of_rule(snakemake))
    known: list[str] = []
    for path in snakemake.input.shards:
        with open_shard(path, spec=spec["activations"]["spec"]) as shard:
            index = probe_index(shard, spec["probe"])
            if index is None:
                known += [probe["probe_id"] for probe in shard.probes]
                continue
            heads = head_table(shard, index)
            probe = shard.probes[index]
            pieces = token_pieces(tokenizer, [*probe["input_ids"], *probe["generated_ids"]])
            tokens = token_table(shard, index, [*best, *writers(heads, spec["k"])], pieces)
            about = {
                "probe": probe,
                "question": question_of(probe, pieces),
                "answer": answer_of(probe, pieces),
                "share": document_shares(shard, best).get(index),
                "top_heads": best,
            }
            write_table(heads, snakemake.output.heads, kind="trace heads", spec=spec, **about)
            write_table(tokens, snakemake.output.tokens, kind="trace tokens", spec=spec)
            return
    raise UserError(
        f"config: traces.{snakemake.wildcards.trace}.probe: dataset {spec['dataset']} has no probe "
        f"'{spec['probe']}'; it has {', '.join(known[:5])}{' ...' if len(known) > 5 else ''}"
    )


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
