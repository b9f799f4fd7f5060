"""From generations to the ablation table, and from the table to the page."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from workflow_scripts.ablation import select_heads, show, tabulate
from workflow_scripts.ablation.compare import comparison_table
from workflow_scripts.ablation.generate import losses_table
from workflow_scripts.ablation.metrics import METRICS, measure
from workflow_scripts.ablation.selection import selection_table
from workflow_scripts.ablation.show import WIDTH, status_section, summary, table_lines
from workflow_scripts.ablation.tabulate import SCHEMA, ablation_table, read_answers
from workflow_scripts.common.artifacts import read_table, write_table
from workflow_scripts.common.digests import canonical_json, key_of
from workflow_scripts.common.errors import UserError

GRID = [(layer, head) for layer in range(3) for head in range(2)]
HOW = {"mode": "mean_query", "site": "q_proj", "factor": None, "calibration": "c"}
JUDGED = {"nonliteral": "accuracy", "literal": "accuracy"}

SPEC: dict[str, Any] = {
    "model": "m",
    "selectors": {
        "locos": {"score": "locos", "ends": ["top"]},
        "random": {"random": True, "seeds": [1, 2]},
        "mine": {"heads": ["0-0", "0-1", "1-0"]},
    },
    "k": [1, 2],
    "interventions": dict.fromkeys(("locos", "random", "mine"), HOW),
    "tasks": {
        task: {"probes": {"row": {"split": split}}}
        for task, split in (("nonliteral", "evaluate"), ("literal", "all"))
    },
    "heads": key_of({}),
    "seed": 42,
}
N_PROBES = {"nonliteral": 8, "literal": 6}


def heads_table() -> pl.DataFrame:
    """Return one score: 2-1 is best, then 2-0, and so on downwards."""
    rows = [
        {
            "model": "m",
            "score": "locos",
            "layer": layer,
            "head": head,
            "kv_group": 0,
            "value": float(2 * layer + head),
            "ci_low": 0.0,
            "ci_high": 9.0,
            "n_probes": 7,
            "n_steps": 9,
            "rank": 6 - 2 * layer - head,
        }
        for layer, head in GRID
    ]
    return pl.DataFrame(rows)


def answer_of(task: str, heads: list[str], probe: int) -> str:
    """Return what the make-believe model says: head 2-1 answers nonliteral, 0-0 every first probe."""
    if task == "nonliteral" and "2-1" in heads:
        return "" if probe % 2 else "Mary"
    if "0-0" in heads and probe == 0:
        return "Mary"
    return "Yuki" if probe < 6 else "nobody"


def write_generations(folder: Path, selection: pl.DataFrame) -> list[Path]:
    """Write the files that a selection asks for, as the generation rule does."""
    paths = []
    for (task, key), rows in selection.group_by("task", "key", maintain_order=True):
        sets = {tuple(sorted(heads)) for heads in rows["heads"].to_list()}
        table = pl.DataFrame(
            [
                {
                    "heads": list(heads),
                    "mode": rows["mode"][0],
                    "site": rows["site"][0],
                    "probe_id": f"p{probe}",
                    "text": answer_of(task, list(heads), probe),
                }
                | measure(answer_of(task, list(heads), probe), probe, "Yuki", [], ["Mary"])
                for heads in sorted(sets)
                for probe in range(N_PROBES[task])
            ],
            schema_overrides={"heads": pl.List(pl.String)},
        )
        path = folder / task / f"{key}.parquet"
        write_table(table, path, kind="generations", spec=SPEC["tasks"][task] | {"key": key})
        paths.append(path)
    return paths


@pytest.fixture
def world(tmp_path: Path) -> SimpleNamespace:
    """Return a selection, its files of generations, and the ablation table made from them."""
    selection = selection_table(SPEC, heads_table())
    paths = write_generations(tmp_path / "generations", selection)
    answers = {(path.parent.name, path.stem): read_answers(path) for path in paths}
    table = ablation_table("m", selection, answers, 42)
    return SimpleNamespace(selection=selection, paths=paths, answers=answers, table=table)


def only(table: pl.DataFrame, **where: Any) -> dict[str, Any]:
    """Return the one row with the given values."""
    conditions = [
        pl.col(name).is_null() if value is None else pl.col(name) == value
        for name, value in where.items()
    ]
    found = table.filter(conditions)
    assert found.height == 1
    return found.row(0, named=True)


# --- the table


def test_the_table_has_the_columns_of_the_contract(world: SimpleNamespace) -> None:
    assert (
        world.table.columns
        == (
            "model task split selector end k seed mode site factor metric value ci_low ci_high "
            "baseline relative relative_low relative_high n_probes heads"
        ).split()
    )
    assert dict(world.table.schema) == SCHEMA


def test_there_is_a_row_for_every_condition_and_metric(world: SimpleNamespace) -> None:
    # A task: none, 2 of locos, 2 x 2 random, the list.
    assert world.table.height == 2 * (1 + 2 + 4 + 1) * len(METRICS)
    keys = world.table.select("task", "selector", "end", "k", "seed", "metric")
    assert keys.is_unique().all()


def test_values_are_means_over_the_probes_and_stand_beside_the_baseline(
    world: SimpleNamespace,
) -> None:
    row = only(world.table, task="nonliteral", selector="locos", k=1, metric="accuracy")
    assert (row["value"], row["baseline"], row["n_probes"]) == (0.0, 6 / 8, 8)
    assert row["heads"] == ["2-1"]
    # Every other probe is empty, the rest name Mary.
    assert (
        only(world.table, task="nonliteral", selector="locos", k=2, metric="empty")["value"] == 0.5
    )
    row = only(world.table, task="literal", selector="mine", metric="accuracy")
    assert (row["value"], row["baseline"], row["k"]) == (5 / 6, 1.0, 3)
    assert row["heads"] == ["0-0", "0-1", "1-0"]
    # Lengths are 0 to 7 tokens.
    assert only(world.table, task="nonliteral", selector="none", metric="length")["value"] == 3.5


def test_the_unablated_run_is_its_own_baseline(world: SimpleNamespace) -> None:
    none = world.table.filter(pl.col("selector") == "none")
    assert (none["value"] == none["baseline"]).all()
    assert none["heads"].to_list() == [[]] * none.height
    assert set(none["k"]) == {0}


def test_every_value_lies_in_its_interval_and_has_probes(world: SimpleNamespace) -> None:
    assert (world.table["n_probes"] > 0).all()
    assert (world.table["ci_low"] <= world.table["value"]).all()
    assert (world.table["value"] <= world.table["ci_high"]).all()


def test_the_split_is_that_of_the_answered_probes(world: SimpleNamespace) -> None:
    splits = world.table.select("task", "split").unique().sort("task").rows()
    assert splits == [("literal", "all"), ("nonliteral", "evaluate")]


def test_random_seeds_keep_rows_of_their_own(world: SimpleNamespace) -> None:
    rows = world.table.filter(
        (pl.col("selector") == "random") & (pl.col("metric") == "accuracy"), pl.col("k") == 2
    )
    assert sorted(rows["seed"]) == [1, 1, 2, 2]
    for row in rows.iter_rows(named=True):
        right = sum(
            answer_of(row["task"], row["heads"], probe) == "Yuki"
            for probe in range(N_PROBES[row["task"]])
        )
        assert row["value"] == right / N_PROBES[row["task"]]


def test_an_empty_file_is_named(world: SimpleNamespace) -> None:
    path = world.paths[0]
    write_table(pl.read_parquet(path).head(0), path, kind="generations", spec={})
    with pytest.raises(UserError, match=rf"{path.name}: holds no answers"):
        read_answers(path)


def test_a_file_that_lacks_a_condition_is_named_with_its_heads(world: SimpleNamespace) -> None:
    locos = world.selection.filter(pl.col("selector") == "locos").row(0, named=True)
    found = world.answers[locos["task"], locos["key"]]
    del found.values["2-1",]
    with pytest.raises(UserError, match=rf"{locos['key']}.parquet: lacks .* heads 2-1 ablated"):
        ablation_table("m", world.selection, world.answers, 42)


def test_answers_over_other_probes_are_refused(world: SimpleNamespace) -> None:
    locos = world.selection.filter(pl.col("selector") == "locos").row(0, named=True)
    world.answers[locos["task"], locos["key"]].probe_ids["2-1",].reverse()
    with pytest.raises(UserError, match=rf"{locos['key']}.parquet: answers other probes than"):
        ablation_table("m", world.selection, world.answers, 42)


# --- the scripts


def job(output: Path, **attributes: Any) -> SimpleNamespace:
    """Return a stand-in for the `snakemake` object."""
    return SimpleNamespace(output=[str(output)], wildcards=SimpleNamespace(model="m"), **attributes)


def run_stage(folder: Path, generations_reversed: bool = False) -> None:
    """Run the three scripts, with generations made in between."""
    heads = folder / "heads.parquet"
    counts = {"locos": {"passed": 7, "wrong": 3}}
    write_table(heads_table(), heads, kind="heads", spec={}, counts=counts)
    params = SimpleNamespace(spec=canonical_json(SPEC))
    selection = folder / "selection.parquet"
    inputs = SimpleNamespace(heads=str(heads))
    select_heads.main(job(selection, input=inputs, params=params))
    paths = write_generations(folder / "generations", read_table(selection, kind="selection"))
    if generations_reversed:
        paths.reverse()
    inputs = SimpleNamespace(selection=str(selection), generations=[str(path) for path in paths])
    ablation = folder / "ablation.parquet"
    spec = canonical_json({"seed": SPEC["seed"], "selection": SPEC})
    tabulate.main(job(ablation, input=inputs, params=SimpleNamespace(spec=spec)))
    inputs = SimpleNamespace(ablation=str(ablation), heads=str(heads))
    params = SimpleNamespace(spec=canonical_json(JUDGED))
    show.main(job(folder / "summary.md", input=inputs, params=params))


def test_the_scripts_give_the_same_bytes_whatever_the_order_of_their_input(
    tmp_path: Path,
) -> None:
    run_stage(tmp_path / "a")
    run_stage(tmp_path / "b", generations_reversed=True)
    for name in ("selection.parquet", "ablation.parquet", "summary.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_page_is_printed_as_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_stage(tmp_path)
    assert capsys.readouterr().out == (tmp_path / "summary.md").read_text(encoding="utf-8")


# --- the page


def page(table: pl.DataFrame, **metrics: str) -> str:
    counts = {"locos": {"passed": 7, "wrong": 3}}
    return summary("m", table, JUDGED | metrics, heads_table(), counts)


def row_of(text: str, task: str, label: str) -> list[str]:
    """Return the cells of a row of a task's table."""
    section = text.split(f"## {task}")[1].split("\n## ")[0]
    (line,) = (line for line in section.splitlines() if line.startswith(f"| {label} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_shows_values_with_intervals_by_k(world: SimpleNamespace) -> None:
    text = page(world.table)
    first = only(world.table, task="literal", selector="locos", k=1, metric="accuracy")
    assert (first["value"], first["ci_low"], first["ci_high"]) == (1.0, 1.0, 1.0)
    cells = row_of(text, "literal", "locos top")
    assert cells == ["locos top", "1.00 [1.00, 1.00]", "1.00 [1.00, 1.00]"]
    assert row_of(text, "literal", "heads")[1:] == ["k = 1", "k = 2"]
    assert "## literal: accuracy over 6 probes (split all)" in text
    assert "k heads ablated (mean_query at q_proj):" in text


def test_the_page_shows_the_baseline(world: SimpleNamespace) -> None:
    none = only(world.table, task="nonliteral", selector="none", metric="accuracy")
    expected = f"nothing ablated: .75 [.{100 * none['ci_low']:02.0f}, "
    assert expected in page(world.table).split("## nonliteral")[1]


def test_each_task_is_shown_by_its_own_metric(world: SimpleNamespace) -> None:
    none = only(world.table, task="literal", selector="none", metric="length")
    section = page(world.table, literal="length").split("## literal")[1].split("\n## ")[0]
    assert section.startswith(": length over 6 probes (split all)")
    assert f"nothing ablated: {none['value']:.2f} [" in section
    assert "## nonliteral: accuracy over" in page(world.table, literal="length")


@pytest.mark.parametrize(("baseline", "said"), [(0.0, True), (0.09, True), (0.1, False)])
def test_a_baseline_that_is_too_low_is_told(
    world: SimpleNamespace, baseline: float, said: bool
) -> None:
    intact = (pl.col("task") == "literal") & (pl.col("selector") == "none")
    value = pl.when(intact).then(baseline).otherwise(pl.col("value"))
    text = page(world.table.with_columns(value.alias("value")))
    assert ("Too low to say anything" in text.split("## literal")[1].split("\n## ")[0]) is said
    assert "Too low to say anything" not in text.split("## nonliteral")[1].split("\n## ")[0]


def test_random_heads_are_shown_as_a_mean_with_the_range_over_seeds() -> None:
    assert show._cell(pl.DataFrame({"value": [0.5, 0.75, 1.0]})) == ".75 (.50-1.00)"


def test_a_selector_with_a_number_of_heads_of_its_own_stands_below_the_table(
    world: SimpleNamespace,
) -> None:
    text = page(world.table)
    assert "- mine, 3 heads: .83 [" in text
    assert "k = 3" not in text


def test_an_accuracy_of_exactly_zero_is_explained(world: SimpleNamespace) -> None:
    text = page(world.table)
    explained = "- locos top, k = 1: never right; empty .50, another character .50, 4 tokens"
    assert explained in text.splitlines()
    # Random sets with head 2-1 are explained too, and nothing else is.
    zeros = world.table.filter((pl.col("metric") == "accuracy") & (pl.col("value") == 0))
    assert text.count("never right") == zeros.height


def test_an_accuracy_that_only_rounds_to_zero_is_not_called_zero(world: SimpleNamespace) -> None:
    is_zero = (pl.col("metric") == "accuracy") & (pl.col("value") == 0)
    value = pl.when(is_zero).then(0.001).otherwise(pl.col("value")).alias("value")
    text = page(world.table.with_columns(value))
    assert ".00 [" in text
    assert "never right" not in text


def test_the_page_lists_the_best_heads_and_the_statuses(world: SimpleNamespace) -> None:
    lines = page(world.table).splitlines()
    assert "- locos (7 probes; in 3 KV groups): 2-1, 2-0, 1-1, 1-0, 0-1, 0-0" in lines
    assert "- locos: 7 passed, 3 wrong (of 10)" in lines


def test_scores_with_the_same_statuses_share_a_line() -> None:
    same = {"passed": 2, "truncated": 1}
    lines = status_section({"b": same, "a": same, "c": {"passed": 1}})
    assert lines[2:] == ["- a, b: 2 passed, 1 truncated (of 3)", "- c: 1 passed (of 1)"]


def test_wide_tables_are_split_and_repeat_their_labels() -> None:
    header = ["heads", *(f"k = {k}" for k in range(9))]
    cells = [
        ["alpha_spatial bottom", *[".63 [.46, .80]"] * 9],
        ["random", *["1.00 [1.00, 1.00]"] * 9],
    ]
    lines = table_lines(header, cells)
    assert max(map(len, lines)) <= WIDTH
    shown = [cell.strip() for line in lines if "k = " in line for cell in line.split("|")]
    assert [name for name in shown if name.startswith("k = ")] == header[1:]
    assert sum(line.startswith("| alpha_spatial bottom |") for line in lines) == shown.count(
        "heads"
    )
    assert shown.count("heads") > 1


def test_a_loss_stands_in_every_table_as_it_is(tmp_path: Path) -> None:
    """Losses 2, 3, 4 intact and 3, 3, 6 ablated: the only metric of its task, and never too low."""
    spec = SPEC | {"selectors": {"mine": SPEC["selectors"]["mine"]}, "interventions": {"mine": HOW}}
    selection = selection_table(spec, heads_table()).filter(task="literal")
    answers = {}
    for heads, key, mode in selection.select("heads", "key", "mode").iter_rows():
        found = losses_table(
            pl.DataFrame({"probe_id": ["a", "b", "c"]}),
            {"mode": mode, "site": "q_proj", "factor": None, "calibration": None},
            [heads],
            [[3.0, 3.0, 6.0] if heads else [2.0, 3.0, 4.0]],
        )
        path = tmp_path / f"{key}.parquet"
        write_table(found, path, kind="generations", spec=SPEC["tasks"]["literal"])
        answers["literal", key] = read_answers(path)
    table = ablation_table("m", selection, answers, 1)
    assert table["metric"].to_list() == ["loss", "loss"]
    row = only(table, selector="mine")
    assert (row["value"], row["baseline"], row["relative"]) == (4.0, 3.0, 4 / 3)
    assert 1 <= row["relative_low"] <= row["relative"] <= row["relative_high"]
    compared = comparison_table("m", selection, answers, frozenset(), 1).filter(reference="none")
    assert (compared["metric"].to_list(), compared["difference"].to_list()) == (["loss"], [1.0])
    text = page(table, literal="loss")
    assert "## literal: loss (lower is better) over 3 probes" in text
    assert "nothing ablated: 3.00 [" in text
    assert row_of(text, "literal", "mine")[1].startswith("4.00 [")
    low = table.with_columns(pl.col("value") * 0)
    assert page(low, literal="loss").split("## Top")[0].count("Too low") == 0


def test_the_columns_of_a_table_are_aligned() -> None:
    lines = table_lines(["heads", "k = 1"], [["a", "long cell"], ["longer", ""]])
    bars = [[place for place, sign in enumerate(line) if sign == "|"] for line in lines if line]
    assert bars[0] == [0, 9, 21]
    assert all(bar == bars[0] for bar in bars)


def test_no_line_of_the_page_is_too_wide(world: SimpleNamespace) -> None:
    heads = heads_table()
    many = pl.concat([heads.with_columns(pl.lit(f"score_{n}").alias("score")) for n in range(12)])
    counts = {f"score_{n}": {"passed": 7, "wrong": 3} for n in range(12)}
    text = summary("m", world.table, JUDGED, many, counts)
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_task_with_nothing_ablated_still_has_its_baseline() -> None:
    spec = SPEC | {"selectors": {}}
    selection = selection_table(spec, heads_table())
    values = {metric: np.ones(4) for metric in METRICS}
    answers = {
        (task, key): tabulate.Answers("x", "all", {(): ["p"] * 4}, {(): values})
        for task, key in selection.select("task", "key").iter_rows()
    }
    text = page(ablation_table("m", selection, answers, 1))
    assert text.count("nothing ablated: 1.00 [1.00, 1.00]") == 2
    assert "k heads ablated" not in text
