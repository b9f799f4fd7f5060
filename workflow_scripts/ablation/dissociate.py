"""Tell how much more each ablation costs on a target task than on the control tasks."""

import json
from collections.abc import Mapping
from typing import Any

import polars as pl

from workflow_scripts.ablation.metrics import LOSS
from workflow_scripts.ablation.selection import CONDITION, read_selection, sort_heads
from workflow_scripts.ablation.statistics import Dissociation, best_k, dissociation
from workflow_scripts.ablation.tabulate import Answers, read_all_answers
from workflow_scripts.common.artifacts import write_table
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.script import run_script

SERIES = ("selector", "end", "seed", "mode", "site", "factor")
"""What the conditions of one curve over k have in common."""

SCHEMA: dict[str, Any] = {
    "model": pl.String,
    "target": pl.String,
    "control": pl.String,
    "target_metric": pl.String,
    "control_metric": pl.String,
    **CONDITION,
    "ds": pl.Float64,
    "ci_low": pl.Float64,
    "ci_high": pl.Float64,
    "k_star": pl.Int32,
    "reason": pl.String,
}

Rows = list[dict[str, Any]]


def dissociation_table(
    model: str,
    selection: pl.DataFrame,
    answers: Mapping[tuple[str, str], Answers],
    judged: Mapping[str, Mapping[str, str]],
    seed: int,
) -> pl.DataFrame:
    """Return DS(k) of every condition, for each pair of a target and a control task.

    Parameters
    ----------
    selection
        The conditions.
    answers
        By task and key of the generations.
    judged
        By task, its metric and its role, target or control.
    seed
        Of the bootstrap.

    Returns
    -------
    polars.DataFrame
        `ds` with its interval (method, section 4). Where it is undefined it is null and `reason` says
        why. `k_star` is the k with the largest `ds` of the row's selector, end and seed.

    Raises
    ------
    UserError
        If no task is a target, or none a control.
    """
    roles = {role: [t for t, row in judged.items() if row["role"] == role] for role in _ROLES}
    for role, tasks in roles.items():
        if not tasks:
            raise UserError(f"config: tasks: none has role {role}; give one role: {role}")
    rows: Rows = []
    for target in sorted(roles["target"]):
        for control in sorted(roles["control"]):
            names = {"model": model, "target": target, "control": control}
            names |= {f"{role}_metric": judged[names[role]]["metric"] for role in _ROLES}
            rows += [names | row for row in _pair(selection, answers, names, seed)]
    return pl.DataFrame(rows, schema=SCHEMA)


_ROLES = ("target", "control")


def _pair(
    selection: pl.DataFrame,
    answers: Mapping[tuple[str, str], Answers],
    names: Mapping[str, str],
    seed: int,
) -> Rows:
    """Return the rows of one target and one control."""
    conditions = {role: selection.filter(task=names[role]).to_dicts() for role in _ROLES}

    def values(role: str, row: dict[str, Any]) -> Any:
        found = answers[names[role], row["key"]]
        return found.values[tuple(sort_heads(row["heads"]))][names[f"{role}_metric"]]

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("k", *SERIES))

    baselines = {
        role: values(role, next(row for row in conditions[role] if row["selector"] == "none"))
        for role in _ROLES
    }
    controls = {place(row): row for row in conditions["control"]}
    rows: Rows = []
    scores: dict[tuple[Any, ...], dict[int, Dissociation]] = {}
    for row in conditions["target"]:
        if row["selector"] == "none":
            continue
        other = controls.get(place(row))
        if other is None:
            score = Dissociation(None, reason=f"the control task has no k = {row['k']}")
        elif names["control_metric"] == LOSS:
            score = Dissociation(
                None, reason="a loss is no share of right answers that could be lost"
            )
        else:
            score = dissociation(
                baselines["target"],
                values("target", row),
                baselines["control"],
                values("control", other),
                seed,
            )
        scores.setdefault(place(row)[1:], {})[row["k"]] = score
        rows.append(
            {name: row[name] for name in ("k", *SERIES)}
            | {
                "ds": score.value,
                "ci_low": score.ci_low,
                "ci_high": score.ci_high,
                "reason": score.reason,
            }
        )
    return [row | {"k_star": best_k(scores[place(row)[1:]])} for row in rows]


def main(snakemake: Any) -> None:
    """Write the dissociation scores of a model."""
    spec = json.loads(snakemake.params.spec)
    selection = read_selection(snakemake.input.selection, spec["selection"])
    answers = read_all_answers(snakemake.input.generations, spec["selection"]["tasks"])
    table = dissociation_table(
        snakemake.wildcards.model, selection, answers, spec["judged"], spec["seed"]
    )
    write_table(table, snakemake.output[0], kind="dissociation", spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
