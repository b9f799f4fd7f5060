"""The table of dissociation scores by hand: two tasks, a baseline of zero, a k that one task lacks."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from workflow_scripts.ablation.dissociate import dissociation_table
from workflow_scripts.ablation.selection import SCHEMA, UNABLATED
from workflow_scripts.ablation.statistics import relative_to
from workflow_scripts.ablation.tabulate import Answers
from workflow_scripts.common.errors import UserError

HOW = {"mode": "mean_query", "site": "q_proj", "factor": None, "calibration": "c"}
JUDGED = {
    "find": {"metric": "accuracy", "role": "target"},
    "know": {"metric": "exact_match", "role": "control"},
    "sums": {"metric": "exact_match", "role": "control"},
}
HEADS = {0: (), 1: ("1-0",), 2: ("1-0", "1-1")}
VALUES = {
    "find": {0: [1, 1, 1, 0], 1: [1, 1, 0, 0], 2: [0, 0, 0, 0]},
    "know": {0: [1, 1, 0, 0], 1: [1, 1, 0, 0]},
    "sums": {0: [0, 0], 1: [1, 0], 2: [0, 0]},
}


def table(judged: dict[str, dict[str, str]] = JUDGED) -> pl.DataFrame:
    rows = [
        {"task": task, "selector": "locos" if k else "none", "end": "top" if k else None, "k": k}
        | (HOW if k else UNABLATED)
        | {"heads": list(HEADS[k]), "key": "key"}
        for task, by_k in VALUES.items()
        for k in by_k
    ]
    answers = {
        (task, "key"): Answers(
            "p",
            "all",
            {HEADS[k]: [str(i) for i in range(len(v))] for k, v in by_k.items()},
            {HEADS[k]: {judged[task]["metric"]: np.array(v, float)} for k, v in by_k.items()},
        )
        for task, by_k in VALUES.items()
    }
    return dissociation_table("m", pl.DataFrame(rows, schema=SCHEMA), answers, judged, 1)


def test_a_score_is_what_the_target_loses_less_what_the_control_loses() -> None:
    row = table().filter(control="know", k=1).row(0, named=True)
    assert row["ds"] == pytest.approx(1 / 3)  # (3/4 - 2/4) / (3/4) - 0
    assert row["ci_low"] <= row["ds"] <= row["ci_high"]
    assert (row["target_metric"], row["control_metric"]) == ("accuracy", "exact_match")


def test_a_k_that_the_control_lacks_has_no_score_and_is_no_best_k() -> None:
    row = table().filter(control="know", k=2).row(0, named=True)
    assert (row["ds"], row["k_star"]) == (None, 1)
    assert row["reason"] == "the control task has no k = 2"


def test_a_baseline_of_zero_has_no_score_and_no_best_k() -> None:
    rows = table().filter(control="sums")
    assert rows["ds"].to_list() == [None, None]
    assert rows["k_star"].to_list() == [None, None]
    assert set(rows["reason"]) == {"the baseline of the control task is 0"}


def test_a_loss_as_control_has_no_score_and_says_why() -> None:
    judged = JUDGED | {"know": {"metric": "loss", "role": "control"}}
    rows = table(judged).filter(control="know")
    assert rows["ds"].to_list() == rows["k_star"].to_list() == [None, None]
    assert rows.filter(k=1)["reason"].to_list() == [
        "a loss is no share of right answers that could be lost"
    ]
    # The other control keeps its scores.
    assert set(table(judged).filter(control="sums")["reason"]) == {
        "the baseline of the control task is 0"
    }


def test_without_a_target_the_mend_is_named() -> None:
    controls = {task: row | {"role": "control"} for task, row in JUDGED.items()}
    with pytest.raises(UserError, match="none has role target; give one role: target"):
        table(controls)


def test_a_relative_value_is_over_the_baseline_of_the_same_probes() -> None:
    baseline, values = np.array([1.0, 1.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0, 0.0])
    value, low, high = relative_to(baseline, values, 1)
    assert value == pytest.approx(1 / 3)
    # No probe is right only when ablated, so no resample exceeds 1.
    assert low is not None and high is not None and 0 <= low <= value <= high <= 1
    assert relative_to(np.zeros(4), values, 1) == (None, None, None)
