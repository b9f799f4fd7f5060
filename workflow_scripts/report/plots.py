"""Drawing: each function takes tables and returns a matplotlib figure.

Colours are those of Okabe and Ito (2008) and ColorBrewer's RdBu, which colour-blind readers can tell
apart; curves differ in marker and dash too, so that they survive a black and white print. Artists
that carry data have a gid, which becomes the id of their group in the SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import NDArray

from workflow_scripts.ablation.metrics import LOSS
from workflow_scripts.report import series
from workflow_scripts.report.catalogue import main_score
from workflow_scripts.report.series import TOP, Curve, Floats, Rates

METRICS = {
    "accuracy": "accuracy (share of probes)",
    "exact_match": "exact match (share of probes)",
    "contains": "contains the answer (share of probes)",
    "rouge1_recall": "ROUGE-1 recall",
    "rouge_l_f1": "ROUGE-L F1",
    LOSS: "loss (nats a token; lower is better)",
}
"""Labels of the metrics that tasks are judged by."""

UNITS = {"locos": "logits", "dla": "logits", "alpha_spatial": "attention weight"}
"""Units of the scores whose formula has one; others are labelled by name alone."""

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_DASHES = {"top": "-", None: "-", "bottom": ":", "smallest": "-."}
_RANDOM_LOOKS = (("#777777", "-"), ("#9a7b2f", "--"), ("#333333", ":"))

_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so measures are the same everywhere
    "font.size": 9,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",  # text stays text: small files, found by search
    "svg.hashsalt": "locos",  # ids hang on the content alone
}


@contextmanager
def style() -> Iterator[None]:
    """Draw and save in the project's style."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def save(figure: Figure, path: Path | BytesIO, kind: str) -> None:
    """Write a figure as "svg" or "png", without a date: same figure, same bytes."""
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(path, format=kind, dpi=200, metadata=metadata)


def svg(figure: Figure) -> bytes:
    """Return a figure as SVG."""
    buffer = BytesIO()
    save(figure, buffer, "svg")
    return buffer.getvalue()


def ablation(table: pl.DataFrame, task: str) -> Figure:
    """Draw a task's own metric, and ROUGE-L F1 of answers, against the number of ablated heads."""
    own = series.metric_of(table, task)
    metrics = [own] if own == LOSS else list(dict.fromkeys((own, "rouge_l_f1")))
    figure = Figure(figsize=(8.4, 3.6))
    panels = figure.subplots(1, len(metrics), sharex=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        baseline, curves = series.ablation_curves(table, task, metric)
        draw_curves(axes, baseline, curves)
        axes.set_ylabel(METRICS[metric])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def dissociation(table: pl.DataFrame, metrics: pl.DataFrame, control: str) -> Figure:
    """Draw DS(k) of every target task against a control task, and the control task's own metric."""
    rows = table.filter(control=control)
    targets = rows["target"].unique().sort().to_list()
    metric = rows["control_metric"][0]
    figure = Figure(figsize=(4.2 * (1 + len(targets)), 3.6))
    *panels, last = figure.subplots(1, 1 + len(targets))
    for axes, target in zip(panels, targets, strict=True):
        draw_curves(axes, 0.0, series.dissociation_curves(table, target, control))
        axes.set_ylabel(f"dissociation score, {target} less {control}")
        axes.autoscale(axis="y")  # scores may lie below zero
    draw_curves(last, *series.ablation_curves(metrics, control, metric))
    last.set_ylabel(f"{control}: {METRICS[metric]}")
    figure.legend(*last.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_curves(axes: Axes, baseline: float, curves: Sequence[Curve]) -> None:
    """Draw curves with their intervals, random heads as a band, the baseline dashed."""
    axes.axhline(baseline, color="black", lw=1, ls="--", gid="baseline", label="nothing ablated")
    drawn = [curve for curve in curves if curve.random]
    for curve, (colour, dash) in zip(drawn, cycle(_RANDOM_LOOKS), strict=False):
        band: dict[str, Any] = {
            "color": colour,
            "alpha": 0.25,
            "lw": 0,
            "gid": _gid("band", curve.label),
        }
        axes.fill_between(curve.k, curve.low, curve.high, **band)
        label = f"{curve.label} (range of seeds)"
        look: dict[str, Any] = {
            "color": colour,
            "ls": dash,
            "marker": "|",
            "gid": _gid("curve", curve.label),
            "label": label,
        }
        axes.plot(curve.k, curve.value, **look)
    chosen = [curve for curve in curves if not curve.random]
    selectors = dict.fromkeys(curve.selector for curve in chosen)
    looks = dict(zip(selectors, _looks(), strict=False))
    # A little to the side, so that intervals at the same k do not hide each other.
    shifts = np.exp(np.linspace(-0.03, 0.03, max(2, len(chosen))))
    for curve, shift in zip(chosen, shifts, strict=False):
        look = looks[curve.selector] | {"label": curve.label, "ls": _DASHES[curve.end]}
        if curve.end not in (None, "top"):
            look["mfc"] = "white"
        _plot_intervals(axes, curve.k * shift, curve, curve.label, look)
    if curves:
        _heads_axis(axes, sorted({int(k) for curve in curves for k in curve.k}))


def tasks(table: pl.DataFrame) -> Figure:
    """Draw every task's own metric when the top heads of each selector are ablated.

    Losses share no axis with answers: they are drawn only where there is nothing else.
    """
    answered = table.filter(pl.col("judged_by") != LOSS)
    names = (table if answered.is_empty() else answered)["task"].unique().sort().to_list()
    metrics = {task: series.metric_of(table, task) for task in names}
    found = {task: series.ablation_curves(table, task, metrics[task]) for task in names}
    curves = found[names[0]][1]
    labels = [c.label for c in curves if c.end in (None, "top") and not c.random]
    labels = labels or [curves[0].label]
    figure = Figure(figsize=(max(4.2, 3.4 * len(labels)), 3.4))
    panels = figure.subplots(1, len(labels), sharey=True, squeeze=False)[0]
    for axes, label in zip(panels, labels, strict=True):
        for (task, (baseline, curves)), look in zip(found.items(), _looks(), strict=False):
            curve = next(curve for curve in curves if curve.label == label)
            _plot_intervals(axes, curve.k, curve, f"{task} {label}", look | {"label": task})
            dashed: dict[str, Any] = {
                "color": look["color"],
                "lw": 1,
                "ls": "--",
                "gid": _gid("baseline", task, label),
            }
            axes.axhline(baseline, **dashed)
        axes.set_title(label, fontsize=9)
        _heads_axis(axes, [int(k) for k in curve.k])
    panels[0].set_ylabel(
        " or ".join(dict.fromkeys(METRICS[m].split(" (")[0] for m in metrics.values()))
    )
    legend = panels[0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=min(4, len(names)))
    return figure


def heatmap(heads: pl.DataFrame, score: str) -> Figure:
    """Draw a score of every head, its `TOP` best heads outlined."""
    figure = _grid(series.head_grid(heads, score), score, "query head")
    for layer, head in series.best_heads(heads, score):
        figure.axes[0].add_patch(
            mpl.patches.Rectangle(
                (layer - 0.5, head - 0.5),
                1,
                1,
                fill=False,
                ec="black",
                lw=1.2,
                gid=_gid("best", f"{layer}-{head}"),
            )
        )
    return figure


def kv_groups(heads: pl.DataFrame, score: str) -> Figure:
    """Draw the mean of a score over the heads of each KV group."""
    return _grid(series.group_grid(heads, score), score, "KV group", "mean of ")


def _grid(values: Floats, score: str, unit: str, prefix: str = "") -> Figure:
    """Draw an array of shape (layer, head), red above zero and blue below."""
    layers, heads = values.shape
    figure = Figure(figsize=(min(12, 2.4 + 0.19 * layers), min(10, 1.5 + 0.19 * heads)))
    axes = figure.subplots()
    limit = series.colour_limit(values)
    # Cells one by one as vectors; an image would be a bitmap inside the SVG.
    mesh = axes.pcolormesh(
        np.arange(layers + 1) - 0.5,
        np.arange(heads + 1) - 0.5,
        values.T,
        cmap="RdBu_r",
        norm=TwoSlopeNorm(0, -limit, limit),
        gid="cells",
    )
    extend = {(0, 0): "neither", (1, 0): "max", (0, 1): "min", (1, 1): "both"}
    beyond = (int(np.nanmax(values) > limit), int(np.nanmin(values) < -limit))
    # In two lines: the figure of few KV groups is low.
    label = (prefix + _with_unit(score)).replace(" (", "\n(")
    bar = _colour_bar(mesh, axes, label, extend=extend[beyond], pad=0.02)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("layer")
    axes.set_ylabel(unit)
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.invert_yaxis()
    return figure


def _colour_bar(mesh: QuadMesh, axes: Axes, label: str, **look: Any) -> Colorbar:
    """Draw the colours of a mesh beside it, as vectors too."""
    bar = mesh.figure.colorbar(mesh, ax=axes, label=label, shrink=0.9, aspect=14, **look)
    bar.solids.set(rasterized=False, edgecolor="face")  # type: ignore[union-attr]
    return bar


def layers(heads: pl.DataFrame) -> Figure:
    """Draw how many of the best heads of each score lie in each layer."""
    scores = heads["score"].unique().sort().to_list()
    figure = Figure(figsize=(6.4, 0.9 + 1.05 * len(scores)))
    panels = figure.subplots(len(scores), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, score, colour in zip(panels, scores, cycle(_COLOURS), strict=False):
        counts = series.layer_counts(heads, score)
        for layer, bar in enumerate(axes.bar(range(len(counts)), counts, color=colour)):
            bar.set_gid(_gid("bar", score, str(layer)))
        axes.set_ylabel("heads")
        axes.set_title(score, fontsize=9, loc="left")
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    panels[-1].set_xlabel("layer")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def overlap(heads: pl.DataFrame) -> Figure:
    """Draw the Jaccard index of the best heads of each two scores."""
    scores = heads["score"].unique().sort().to_list()
    shares = series.overlap(heads, scores)
    size = 1.9 + 0.62 * len(scores)
    figure = Figure(figsize=(size + 1.2, size))
    axes = figure.subplots()
    mesh = axes.pcolormesh(shares, cmap="viridis", norm=Normalize(0, 1), gid="cells")
    for (row, column), share in np.ndenumerate(shares):
        axes.text(
            *(column + 0.5, row + 0.5),
            f"{share:.2f}",
            ha="center",
            va="center",
            color="black" if share > 0.6 else "white",
            gid=_gid("share", scores[row], scores[column]),
        )
    places = np.arange(len(scores)) + 0.5
    axes.set_xticks(places, scores, rotation=30, ha="right")
    axes.set_yticks(places, scores)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.grid(visible=False)
    _colour_bar(mesh, axes, f"Jaccard index of the top {TOP} heads")
    return figure


def scatter(heads: pl.DataFrame, score: str) -> Figure:
    """Draw the main score of every head against another one, with the best heads of both named."""
    main = main_score(heads["score"].unique().to_list())
    x, y = series.head_grid(heads, score), series.head_grid(heads, main)
    figure = Figure(figsize=(5.2, 4.2))
    axes = figure.subplots()
    # On a scale that is linear near zero and logarithmic beyond: few heads are far out, at both ends.
    for set_scale, values in ((axes.set_xscale, x), (axes.set_yscale, y)):
        set_scale("symlog", linthresh=_linear_part(values))
    axes.axhline(0, color="#999999", lw=0.8)
    axes.axvline(0, color="#999999", lw=0.8)
    axes.plot(x.ravel(), y.ravel(), "o", ms=3, color="#999999", alpha=0.6, mew=0, gid="heads")
    for name, colour, marker in ((score, _COLOURS[1], "s"), (main, _COLOURS[0], "o")):
        at = tuple(np.array(series.best_heads(heads, name)).T)
        axes.plot(
            *(x[at], y[at]),
            marker,
            ms=7 if marker == "s" else 4.5,
            mfc="none" if marker == "s" else colour,
            mec=colour,
            label=f"top {TOP} of {name}",
            gid=_gid("best", name),
        )
    best = {*series.best_heads(heads, score, 3), *series.best_heads(heads, main, 3)}
    _name_heads(axes, {(layer, head): (x[layer, head], y[layer, head]) for layer, head in best})
    axes.set_xlabel(_with_unit(score))
    axes.set_ylabel(_with_unit(main))
    axes.legend(loc="best")
    return figure


def _name_heads(axes: Axes, places: dict[tuple[int, int], tuple[float, float]]) -> None:
    """Name some heads at the right of the axes, one below the other: the best lie close together."""
    axes.get_xlim(), axes.get_ylim()  # settles the scales that the heights are taken from
    free = 1.0
    for (layer, head), place in sorted(places.items(), key=lambda item: (-item[1][1], item[0])):
        height = (axes.transData + axes.transAxes.inverted()).transform(place)[1]
        free = min(free, height)
        axes.annotate(
            f"{layer}-{head}",
            place,
            xytext=(1.04, free),
            textcoords="axes fraction",
            va="center",
            fontsize=7,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "#666666"},
        )
        free -= 0.055


def distribution(heads: pl.DataFrame, score: str) -> Figure:
    """Draw every head by rank, with the intervals of the best and of the worst."""
    rows = heads.filter(pl.col("score") == score).sort("rank")
    value, low, high = (rows[name].to_numpy() for name in ("value", "ci_low", "ci_high"))
    figure = Figure(figsize=(8.4, 3.2))
    whole, top, bottom = figure.subplots(1, 3, width_ratios=[2, 1.3, 1.3])
    whole.plot(np.arange(1, len(value) + 1), value, color=_COLOURS[0], gid="value")
    whole.axhline(0, color="#999999", lw=0.8)
    whole.set_yscale("symlog", linthresh=_linear_part(value))
    whole.set_xlabel("rank")
    whole.set_ylabel(_with_unit(score))
    names = [f"{layer}-{head}" for layer, head in rows.select("layer", "head").iter_rows()]
    ends = (
        (top, slice(TOP), "best heads", "o", _COLOURS[0]),
        (bottom, slice(-TOP, None), "worst heads", "v", _COLOURS[1]),
    )
    for axes, part, title, marker, colour in ends:
        shown = value[part]
        places = np.arange(len(shown))
        errors = _errors(shown, low[part], high[part])
        look: dict[str, Any] = {
            "fmt": marker,
            "ms": 4,
            "color": colour,
            "elinewidth": 1,
            "capsize": 2,
        }
        line, _, bars = axes.errorbar(shown, places, xerr=errors, **look)
        line.set_gid(_gid("curve", title))
        bars[0].set_gid(_gid("interval", title))
        axes.axvline(0, color="#999999", lw=0.8)
        axes.set_yticks(places, names[part], fontsize=7)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(UNITS.get(score, score))
        axes.xaxis.set_major_locator(MaxNLocator(4))
    return figure


def pass_rates(table: pl.DataFrame) -> Figure:
    """Draw the share of probes that the intact model answers, by length and by depth."""
    sets = list(table.select("role", "set").unique(maintain_order=True).iter_rows())
    figure = Figure(figsize=(8.4, 3.4))
    panels = figure.subplots(1, 2, sharey=True)
    columns = {"context_length": "length of the prompt (tokens)", "depth_percent": "depth (%)"}
    for axes, (column, label) in zip(panels, columns.items(), strict=True):
        for (role, name), look in zip(sets, _looks(), strict=False):
            rates = series.rates_by(table, name, role, column)
            kind, dash = ("detection", "--") if role == "detect" else ("task", "-")
            look |= {"ls": dash, "label": f"{name} ({kind})"}
            _plot_intervals(axes, rates.at, rates, f"{role} {name}", look)
        axes.set_xlabel(label)
        axes.set_ylim(-0.03, 1.03)
        places = table[column].drop_nulls().unique().sort().to_list()
        if len(places) <= 6:
            axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.margins(x=0.1)
    panels[0].set_ylabel("share of probes passed")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(sets))
    )
    return figure


def models_ablation(table: pl.DataFrame, task: str) -> Figure:
    """Draw the ablation curves of a task, a panel a model."""
    models = table["model"].unique(maintain_order=True).to_list()
    metric = series.metric_of(table, task)
    columns = min(3, len(models))
    rows = -(-len(models) // columns)
    figure = Figure(figsize=(1.2 + 3.2 * columns, 0.8 + 2.7 * rows))
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for axes, model in zip(panels, models, strict=False):
        of_model = table.filter(pl.col("model") == model)
        draw_curves(axes, *series.ablation_curves(of_model, task, metric))
        axes.set_title(model, fontsize=9)
        handles |= {
            label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    for axes in panels[len(models) :]:
        axes.remove()
    for axes in panels[::columns]:
        axes.set_ylabel(METRICS[metric])
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
    return figure


def models_layers(heads: pl.DataFrame, score: str) -> Figure:
    """Draw how deep the best heads of each model lie, layers as a share of the model's depth."""
    models = heads["model"].unique(maintain_order=True).to_list()
    figure = Figure(figsize=(6.4, 1.2 + 0.5 * len(models)))
    axes = figure.subplots()
    for place, model in enumerate(models):
        rows = heads.filter(pl.col("model") == model)
        counts = series.layer_counts(rows, score)
        layers = np.flatnonzero(counts)
        axes.scatter(
            layers / max(1, len(counts) - 1),
            np.full(len(layers), place),
            s=30 * counts[layers],
            color=_COLOURS[0],
            alpha=0.7,
            gid=_gid("layers", model),
        )
    axes.set_yticks(range(len(models)), models)
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel("depth of the layer (0 first, 1 last)")
    return figure


def _gid(*parts: str) -> str:
    """Return the id of an artist's group in the SVG."""
    return "-".join(parts).replace(" ", "-")


def _looks() -> Iterator[dict[str, Any]]:
    """Yield colours with markers that are told apart without colour, over and over."""
    for colour, marker in cycle(zip(_COLOURS, _MARKERS, strict=True)):
        yield {"color": colour, "marker": marker}


def _plot_intervals(
    axes: Axes, x: NDArray[Any], points: Curve | Rates, name: str, look: dict[str, Any]
) -> None:
    """Draw points with vertical intervals, as the groups curve-{name} and interval-{name}."""
    errors = _errors(points.value, points.low, points.high)
    look = look | {"ms": 4.5, "capsize": 2, "elinewidth": 0.8}
    line, _, bars = axes.errorbar(x, points.value, yerr=errors, **look)
    line.set_gid(_gid("curve", name))
    bars[0].set_gid(_gid("interval", name))


def _errors(value: Floats, low: Floats, high: Floats) -> Floats:
    """Return the lengths of error bars; rounding may put a value outside its interval."""
    return np.clip([value - low, high - value], 0, None)


def _heads_axis(axes: Axes, ks: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(min(ks) / 1.2, max(ks) * 1.2)
    axes.set_xlabel("k, heads ablated")
    axes.set_ylim(bottom=-0.03)


def _linear_part(values: Floats) -> float:
    """Return up to which value an axis of scores is linear: a power of ten that most heads are under."""
    middle = float(np.quantile(np.abs(values), 0.75)) or float(np.abs(values).max()) or 1.0
    return float(10 ** np.ceil(np.log10(middle)))


def _with_unit(score: str) -> str:
    return f"{score} ({UNITS[score]})" if score in UNITS else score


def draw(kind: str, subject: str | None, tables: Mapping[str, pl.DataFrame]) -> Figure:
    """Draw a figure of the catalogue.

    Parameters
    ----------
    kind, subject
        See `catalogue.Figure`.
    tables
        The tables of a model, by kind.
    """
    function, names = _KINDS[kind]
    read = [tables[name] for name in names]
    return function(*read) if subject is None else function(*read, subject)


_KINDS: dict[str, tuple[Callable[..., Figure], tuple[str, ...]]] = {
    "ablation": (ablation, ("ablation",)),
    "tasks": (tasks, ("ablation",)),
    "dissociation": (dissociation, ("dissociation", "ablation")),
    "heatmap": (heatmap, ("heads",)),
    "layers": (layers, ("heads",)),
    "overlap": (overlap, ("heads",)),
    "scatter": (scatter, ("heads",)),
    "distribution": (distribution, ("heads",)),
    "kv_groups": (kv_groups, ("heads",)),
    "pass_rates": (pass_rates, ("pass_rates",)),
}
"""Kind -> the function that draws it, and the tables that it takes."""
