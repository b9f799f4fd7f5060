"""Compare the heads that a model finds in bfloat16 with those it finds in float32.

    python -m benchmarks.agreement MODEL_FOLDER

Prints a row of a Markdown table: how many of the 20 best heads by LOCOS differ, and the rank
correlation over all heads. Run from the project's folder, with its environment.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.measure import FORMULAS, capture, make_probes, stored
from workflow_scripts.common.models import Source, load_model
from workflow_scripts.scores.pooling import pool_heads
from workflow_scripts.scores.score import score_shards
from workflow_scripts.scores.settings import parse_score

TOP = 20
MOST_SWAPS = 2


def locos(folder: str, dtype: str, length: int, size: int) -> tuple[NDArray[np.float64], int]:
    """Return the LOCOS score of every head, flat, and how many probes passed the gate."""
    lm = load_model(Source(folder), dtype=dtype, device="cpu")
    probes = make_probes(folder, length, size)
    results = capture(lm, probes)
    settings = parse_score("locos", {"dataset": "benchmark", "formula": FORMULAS["locos"]})
    with stored(lm, probes, results) as path:
        values = pool_heads(score_shards([path], settings).probes, settings.pool)
    return values.ravel(), sum(result.status == "passed" for result in results)


def main() -> None:
    """Print the agreement of both dtypes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--size", type=int, default=80)
    arguments = parser.parse_args()
    (full, full_passed), (half, half_passed) = (
        locos(arguments.model, dtype, arguments.length, arguments.size)
        for dtype in ("float32", "bfloat16")
    )
    best, other = (set(np.argsort(-values)[:TOP].tolist()) for values in (full, half))
    swaps = TOP - len(best & other)
    print("| probes passed, fp32 / bf16 | of the top 20, swapped | target | Spearman, all heads |")
    print("|---|---|---|---|")
    print(
        f"| {full_passed} / {half_passed} of {arguments.size} | {swaps} | at most {MOST_SWAPS} "
        f"| {spearmanr(full, half).statistic:.4f} |"
    )


if __name__ == "__main__":
    main()
