"""The figures show the numbers of the tables: values are read back from the SVG by its ticks."""

from __future__ import annotations

from io import BytesIO

import matplotlib
import numpy as np
import polars as pl
import pytest
from matplotlib.colors import to_hex
from report_tables import (
    ALPHA,
    DISSOCIATED,
    LITERAL,
    LOCOS,
    NONLITERAL,
    ablation_table,
    dissociation_table,
    heads_table,
    pass_rates_table,
)
from scipy.stats import binomtest, rankdata
from svg_reader import Picture, path_points, text_of

from workflow_scripts.report import plots
from workflow_scripts.report.catalogue import figures_of
from workflow_scripts.report.series import with_metrics

METRICS = {"literal": "accuracy", "nonliteral": "accuracy"}
ABLATION = with_metrics(ablation_table(), METRICS)
TABLES = {
    "ablation": ABLATION,
    "dissociation": dissociation_table(),
    "heads": heads_table(),
    "pass_rates": pass_rates_table(),
}
ROLES: dict[str, str | None] = {"literal": "control", "nonliteral": "target"}
FIGURES = figures_of(["locos", "alpha_spatial"], ROLES, ["locos", "random"])


def picture(kind: str, subject: str | None = None, **tables: pl.DataFrame) -> Picture:
    with plots.style():
        return Picture(plots.svg(plots.draw(kind, subject, TABLES | tables)))


def condition(values: dict, selector: str, end: str | None, k: int) -> tuple[float, float, float]:
    return values[selector, end, k, None]


@pytest.mark.parametrize(("panel", "scale"), [(0, 1.0), (1, 0.5)])
@pytest.mark.parametrize(
    ("selector", "end", "ks"),
    [("locos", "top", [1, 5]), ("locos", "bottom", [1, 5]), ("listed", None, [3])],
)
def test_a_curve_shows_value_and_interval_at_each_k(panel, scale, selector, end, ks):
    axes = picture("ablation", "nonliteral").panels()[panel]
    name = selector if end is None else f"{selector}-{end}"
    expected = np.array([condition(NONLITERAL, selector, end, k) for k in ks]) * scale
    at = axes.points(f"curve-{name}")
    np.testing.assert_allclose(axes.read("y", at[:, 1]), expected[:, 0], atol=1e-4)
    # Selectors stand a little to the side of each other.
    np.testing.assert_allclose(axes.read("x", at[:, 0], log=True), ks, rtol=0.04)
    ends = axes.points(f"interval-{name}")[:, 1].reshape(len(ks), 2)
    np.testing.assert_allclose(np.sort(axes.read("y", ends)), expected[:, 1:], atol=1e-4)


def test_random_heads_are_a_line_through_the_mean_in_a_band_over_the_seeds():
    axes = picture("ablation", "nonliteral").panels()[0]
    at = axes.points("curve-random")
    np.testing.assert_allclose(axes.read("y", at[:, 1]), [0.7, 0.55], atol=1e-4)
    band = axes.shape("band-random")
    corners = {
        (round(float(axes.read("x", x, log=True)), 2), round(float(axes.read("y", y)), 3))
        for x, y in band
    }
    assert {(1.0, 0.6), (1.0, 0.8), (5.0, 0.4), (5.0, 0.7)} == corners


def test_the_baseline_is_dashed_at_the_unablated_value():
    axes = picture("ablation", "nonliteral").panels()[0]
    np.testing.assert_allclose(axes.read("y", axes.points("baseline")[:, 1]), 0.8, atol=1e-4)
    (path,) = axes.paths("baseline")
    assert "stroke-dasharray" in path.get("style")


def test_the_tasks_stand_against_each_other_with_their_baselines():
    axes = picture("tasks").panels()[0]
    for task, values in (("literal", LITERAL), ("nonliteral", NONLITERAL)):
        expected = [condition(values, "locos", "top", k)[0] for k in (1, 5)]
        at = axes.points(f"curve-{task}-locos-top")[:, 1]
        np.testing.assert_allclose(axes.read("y", at), expected, atol=1e-4)
        baseline = axes.points(f"baseline-{task}-locos-top")[:, 1]
        np.testing.assert_allclose(
            axes.read("y", baseline), values["none", None, 0, None][0], atol=1e-4
        )


def judged_by(metric: str) -> pl.DataFrame:
    """Return the ablation table with the literal task judged by a metric, its accuracies so named."""
    named = pl.when(pl.col("task") == "literal", pl.col("metric") == "accuracy")
    renamed = ablation_table().with_columns(
        named.then(pl.lit(metric)).otherwise("metric").alias("metric")
    )
    return with_metrics(renamed, METRICS | {"literal": metric})


def test_each_task_is_drawn_by_its_own_metric():
    tables = {"ablation": judged_by("exact_match")}
    shown = picture("ablation", "literal", **tables)
    baseline = shown.panels()[0].points("baseline")[:, 1]
    np.testing.assert_allclose(shown.panels()[0].read("y", baseline), 0.9, atol=1e-4)
    assert {"exact match (share of probes)", "ROUGE-L F1"} <= set(shown.texts())
    assert "exact match or accuracy" in picture("tasks", **tables).texts()


def test_a_loss_has_a_panel_of_its_own_and_no_place_beside_the_other_tasks():
    tables = {"ablation": judged_by("loss")}
    shown = picture("ablation", "literal", **tables)
    assert len(shown.panels()) == 1
    assert "loss (nats a token; lower is better)" in shown.texts()
    beside = picture("tasks", **tables).panels()[0]
    assert len(beside.points("curve-nonliteral-locos-top")) == 2
    assert "curve-literal-locos-top" not in beside.by_id


@pytest.mark.parametrize("end", ["top", "bottom"])
def test_a_dissociation_curve_shows_score_and_interval_beside_the_control_task(end):
    scores, control = picture("dissociation", "literal").panels()
    expected = np.array([DISSOCIATED["locos", end, k, None] for k in (1, 5)])
    at = scores.points(f"curve-locos-{end}")
    np.testing.assert_allclose(scores.read("y", at[:, 1]), expected[:, 0], atol=1e-4)
    np.testing.assert_allclose(scores.read("x", at[:, 0], log=True), [1, 5], rtol=0.04)
    ends = scores.points(f"interval-locos-{end}")[:, 1].reshape(2, 2)
    np.testing.assert_allclose(np.sort(scores.read("y", ends)), expected[:, 1:], atol=1e-4)
    accuracy = [condition(LITERAL, "locos", end, k)[0] for k in (1, 5)]
    at = control.points(f"curve-locos-{end}")
    np.testing.assert_allclose(control.read("y", at[:, 1]), accuracy, atol=1e-4)
    baseline = control.read("y", control.points("baseline")[:, 1])
    np.testing.assert_allclose(baseline, LITERAL["none", None, 0, None][0], atol=1e-4)


def test_random_heads_dissociate_in_a_band_around_zero_and_undefined_scores_are_not_drawn():
    scores, _ = picture("dissociation", "literal").panels()
    at = scores.points("curve-random")
    np.testing.assert_allclose(scores.read("y", at[:, 1]), [0.0, 0.3], atol=1e-4)
    np.testing.assert_allclose(scores.read("y", scores.points("baseline")[:, 1]), 0, atol=1e-4)
    assert "curve-listed" not in scores.by_id


def expected_colour(value: float, limit: float) -> str:
    """RdBu reversed: blue at -limit, white at 0, red at +limit."""
    return to_hex(matplotlib.colormaps["RdBu_r"]((np.clip(value / limit, -1, 1) + 1) / 2))


@pytest.mark.parametrize(("score", "values"), [("locos", LOCOS), ("alpha_spatial", ALPHA)])
def test_a_heatmap_shows_every_head_in_the_colour_of_its_value(score, values):
    limit = np.quantile(np.abs(list(values.values())), 0.99)
    cells = picture("heatmap", score).panels()[0].cells("cells")
    assert cells == {head: expected_colour(value, limit) for head, value in values.items()}


def test_red_is_above_zero_and_blue_below_on_one_symmetric_scale():
    cells = picture("heatmap", "locos").panels()[0].cells("cells")

    def red_minus_blue(head):
        return int(cells[head][1:3], 16) - int(cells[head][5:7], 16)

    assert red_minus_blue((1, 0)) > 50
    assert red_minus_blue((1, 2)) < -50
    assert abs(red_minus_blue((0, 2))) < 5


def test_a_kv_group_shows_the_mean_of_its_heads():
    means = {(layer, group): 0.0 for layer in (0, 1) for group in (0, 1)}
    for (layer, head), value in LOCOS.items():
        means[layer, head // 2] += value / 2
    limit = np.quantile(np.abs(list(means.values())), 0.99)
    cells = picture("kv_groups", "locos").panels()[0].cells("cells")
    assert cells == {group: expected_colour(value, limit) for group, value in means.items()}


def test_layers_count_the_best_heads(monkeypatch):
    monkeypatch.setattr("workflow_scripts.report.series.layer_counts.__defaults__", (3,))
    alpha, locos = picture("layers").panels()
    # Best three of alpha_spatial: 1-2, 0-0, 0-3; of locos: 1-0, 1-1, 1-3.
    for axes, score, counts in ((alpha, "alpha_spatial", [2, 1]), (locos, "locos", [0, 3])):
        for layer, count in enumerate(counts):
            y = axes.read("y", axes.points(f"bar-{score}-{layer}")[:, 1])
            assert np.ptp(y) == pytest.approx(count, abs=1e-3)


def test_the_overlap_names_the_jaccard_index_of_the_best_heads(monkeypatch):
    monkeypatch.setattr("workflow_scripts.report.series.overlap.__defaults__", (4,))
    shown = picture("overlap")
    # Best four of alpha_spatial: 1-2, 0-0, 0-3, 1-0; of locos: 1-0, 1-1, 1-3, 0-0.
    # Two in common of six.
    expected = {("alpha_spatial", "locos"): "0.33", ("locos", "alpha_spatial"): "0.33"}
    expected |= {(score, score): "1.00" for score in ("alpha_spatial", "locos")}
    for (row, column), share in expected.items():
        assert text_of(shown.by_id[f"share-{row}-{column}"]) == share


def test_a_scatter_orders_all_heads_by_both_scores():
    axes = picture("scatter", "alpha_spatial").panels()[0]
    at = axes.markers("heads")
    heads = sorted(LOCOS)
    # Both axes bend but keep the order; y runs downwards in SVG.
    np.testing.assert_array_equal(rankdata(at[:, 0].round(3)), rankdata([ALPHA[h] for h in heads]))
    np.testing.assert_array_equal(rankdata(-at[:, 1].round(3)), rankdata([LOCOS[h] for h in heads]))


def test_the_distribution_names_the_heads_of_both_tails_with_their_intervals():
    _, best, worst = picture("distribution", "locos").panels()
    by_value = sorted(LOCOS, key=lambda head: -LOCOS[head])
    for axes, name in ((best, "best-heads"), (worst, "worst-heads")):
        labels = [label for _, label in axes.ticks("y")]
        assert labels == [f"{layer}-{head}" for layer, head in by_value]
        values = np.array([LOCOS[head] for head in by_value])
        np.testing.assert_allclose(
            axes.read("x", axes.markers(f"curve-{name}")[:, 0]), values, atol=2e-3
        )
        ends = axes.points(f"interval-{name}")[:, 0].reshape(-1, 2)
        expected = np.stack([values - 0.25, values + 0.5], 1)
        np.testing.assert_allclose(np.sort(axes.read("x", ends)), expected, atol=2e-3)


@pytest.mark.parametrize(
    ("panel", "counts"),
    [(0, {256: (5, 20), 512: (22, 40)}), (1, {0: (3, 30), 50: (24, 30)})],
    ids=["length", "depth"],
)
def test_pass_rates_show_shares_with_wilson_intervals(panel, counts):
    panels = picture("pass_rates").panels()
    left, axes = panels[0], panels[panel]  # they share the numbers of the left one
    at = axes.points("curve-detect-nolima")
    np.testing.assert_allclose(axes.read("x", at[:, 0]), list(counts), rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(
        left.read("y", at[:, 1]), [passed / n for passed, n in counts.values()], atol=1e-4
    )
    intervals = [binomtest(*both).proportion_ci(method="wilson") for both in counts.values()]
    ends = axes.points("interval-detect-nolima")[:, 1].reshape(-1, 2)
    np.testing.assert_allclose(np.sort(left.read("y", ends)), np.array(intervals), atol=1e-4)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_the_same_tables_give_the_same_bytes_without_a_date_or_a_bitmap(figure):
    with plots.style():
        first, second = (
            plots.svg(plots.draw(figure.kind, figure.subject, TABLES)) for _ in range(2)
        )
    assert first == second
    assert b"dc:date" not in first
    assert b"<image" not in first


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_every_figure_has_axes_with_labels_a_caption_and_a_png(figure):
    with plots.style():
        drawn = plots.draw(figure.kind, figure.subject, TABLES)
        png = BytesIO()
        plots.save(drawn, png, "png")
    assert png.getvalue().startswith(b"\x89PNG")
    if figure.kind != "overlap":  # its axes are the names of the scores
        assert any(axes.get_xlabel() for axes in drawn.axes)
    assert any(axes.get_ylabel() for axes in drawn.axes)
    assert len(figure.caption.read_text(encoding="utf-8")) > 40


def test_a_config_with_one_score_one_task_and_no_selector_still_has_its_figures():
    names = {figure.name for figure in figures_of(["wu"], {"facts": "target"}, [])}
    assert names == {"heatmap-wu", "layers", "distribution-wu", "kv_groups-wu", "pass_rates"}


def test_models_stand_side_by_side_each_with_its_own_curve():
    table = pl.concat([ablation_table("a"), ablation_table("b").with_columns(pl.col("value") / 2)])
    table = with_metrics(table, METRICS)
    with plots.style():
        panels = Picture(plots.svg(plots.models_ablation(table, "nonliteral"))).panels()
    for axes, scale in zip(panels, (1.0, 0.5), strict=True):
        at = axes.points("curve-locos-top")[:, 1]
        # Panels share an axis, whose numbers stand at the first.
        np.testing.assert_allclose(panels[0].read("y", at), np.array([0.5, 0.1]) * scale, atol=1e-4)


def test_each_model_has_the_depths_of_its_best_heads():
    deep = heads_table("b").with_columns(layer=4 * pl.col("layer"))
    with plots.style():
        drawn = plots.svg(plots.models_layers(pl.concat([heads_table("a"), deep]), "locos"))
    (axes,) = Picture(drawn).panels()
    for model, factor in (("a", 1), ("b", 4)):
        best = deep if factor == 4 else heads_table("a")
        rows = best.filter(pl.col("score") == "locos", pl.col("rank") <= 10)
        last = best["layer"].max()
        expected = sorted({layer / last for layer in rows["layer"]})
        circles = [path_points(path)[:, 0] for path in axes.paths(f"layers-{model}")]
        middles = [(x.min() + x.max()) / 2 for x in circles]
        np.testing.assert_allclose(np.sort(axes.read("x", middles)), expected, atol=1e-3)
