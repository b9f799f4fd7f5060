"""Small tables of results, written down by hand."""

from __future__ import annotations

import polars as pl

from workflow_scripts.ablation.compare import SCHEMA as SIGNIFICANCE
from workflow_scripts.ablation.dissociate import SCHEMA as DISSOCIATION
from workflow_scripts.ablation.tabulate import SCHEMA as ABLATION

# Accuracy with its interval by condition: (selector, end, k, seed) -> value, low, high.
NONLITERAL = {
    ("none", None, 0, None): (0.8, 0.7, 0.9),
    ("locos", "top", 1, None): (0.5, 0.35, 0.6),
    ("locos", "top", 5, None): (0.1, 0.0, 0.25),
    ("locos", "bottom", 1, None): (0.75, 0.7, 0.85),
    ("locos", "bottom", 5, None): (0.7, 0.6, 0.8),
    ("listed", None, 3, None): (0.3, 0.2, 0.45),
    ("random", None, 1, 42): (0.8, 0.7, 0.9),
    ("random", None, 1, 43): (0.6, 0.5, 0.7),
    ("random", None, 5, 42): (0.7, 0.6, 0.8),
    ("random", None, 5, 43): (0.4, 0.3, 0.5),
}
LITERAL = {key: (min(1, v + 0.1), low, 1.0) for key, (v, low, high) in NONLITERAL.items()}


def ablation_table(model: str = "m") -> pl.DataFrame:
    rows = [
        {
            "model": model,
            "task": task,
            "split": "evaluate",
            "selector": selector,
            "end": end,
            "k": k,
            "seed": seed,
            "mode": "none" if selector == "none" else "mean_query",
            "site": "none" if selector == "none" else "q_proj",
            "metric": metric,
            "value": value * scale,
            "ci_low": low * scale,
            "ci_high": high * scale,
            "baseline": values["none", None, 0, None][0] * scale,
            "n_probes": 30,
            "heads": [f"0-{head}" for head in range(k)],
        }
        for task, values in (("literal", LITERAL), ("nonliteral", NONLITERAL))
        for (selector, end, k, seed), (value, low, high) in values.items()
        for metric, scale in (("accuracy", 1.0), ("rouge_l_f1", 0.5))
    ]
    return pl.DataFrame(rows, schema=ABLATION)


def significance_table(p_holm: dict[int, float | None]) -> pl.DataFrame:
    """Comparisons of locos top with random heads, by k; differences as in `NONLITERAL`."""
    difference = {1: 0.5 - 0.7, 5: 0.1 - 0.55}
    rows = [
        {
            "model": "m",
            "task": task,
            "metric": "accuracy",
            "selector": "locos",
            "end": "top",
            "k": k,
            "seed": None,
            "reference": "random",
            "difference": None if p is None else difference[k],
            "ci_low": None if p is None else difference[k] - 0.15,
            "ci_high": None if p is None else difference[k] + 0.1,
            "p_value": p,
            "p_holm": p,
            "reason": None,
        }
        for task in ("literal", "nonliteral")
        for k, p in p_holm.items()
    ]
    return pl.DataFrame(rows, schema=SIGNIFICANCE)


# DS(k) of nonliteral against literal; at k = 3 the control's baseline is 0.
DISSOCIATED = {
    ("locos", "top", 1, None): (0.2, -0.1, 0.4),
    ("locos", "top", 5, None): (0.6, 0.3, 0.8),
    ("locos", "bottom", 1, None): (-0.3, -0.5, 0.1),
    ("locos", "bottom", 5, None): (0.1, -0.2, 0.2),
    ("listed", None, 3, None): (None, None, None),
    ("random", None, 1, 42): (0.1, -0.1, 0.2),
    ("random", None, 1, 43): (-0.1, -0.3, 0.2),
    ("random", None, 5, 42): (0.2, 0.0, 0.4),
    ("random", None, 5, 43): (0.4, 0.1, 0.5),
}


def dissociation_table() -> pl.DataFrame:
    rows = [
        {
            "model": "m",
            "target": "nonliteral",
            "control": "literal",
            "target_metric": "accuracy",
            "control_metric": "accuracy",
            "selector": selector,
            "end": end,
            "k": k,
            "seed": seed,
            "ds": ds,
            "ci_low": low,
            "ci_high": high,
        }
        for (selector, end, k, seed), (ds, low, high) in DISSOCIATED.items()
    ]
    return pl.DataFrame(rows, schema=DISSOCIATION)


# Two layers of four heads, two heads a KV group: value by (layer, head).
LOCOS = {
    **{(0, 0): 0.1, (0, 1): -0.2, (0, 2): 0.0, (0, 3): 0.05},
    **{(1, 0): 4.0, (1, 1): 2.0, (1, 2): -3.0, (1, 3): 0.3},
}
ALPHA = {
    **{(0, 0): 0.4, (0, 1): 0.01, (0, 2): 0.02, (0, 3): 0.3},
    **{(1, 0): 0.2, (1, 1): 0.1, (1, 2): 0.5, (1, 3): -0.02},
}


def heads_table(model: str = "m") -> pl.DataFrame:
    rows = []
    for score, values in (("alpha_spatial", ALPHA), ("locos", LOCOS)):
        order = sorted(values, key=lambda head: -values[head])
        rows += [
            {
                "model": model,
                "score": score,
                "layer": layer,
                "head": head,
                "kv_group": head // 2,
                "value": value,
                "ci_low": value - 0.25,
                "ci_high": value + 0.5,
                "n_probes": 9,
                "n_steps": 11,
                "rank": order.index((layer, head)) + 1,
            }
            for (layer, head), value in values.items()
        ]
    ints = ("layer", "head", "kv_group", "n_probes", "n_steps", "rank")
    return pl.DataFrame(rows).with_columns(pl.col(ints).cast(pl.Int32)).sort("score", "rank")


def pass_rates_table() -> pl.DataFrame:
    rows = [
        ("nolima", "detect", 256, 0.0, 10, 1),
        ("nolima", "detect", 256, 50.0, 10, 4),
        ("nolima", "detect", 512, 0.0, 20, 2),
        ("nolima", "detect", 512, 50.0, 20, 20),
        ("nonliteral", "task", 256, 0.0, 8, 0),
        ("nonliteral", "task", 512, 50.0, 8, 6),
        ("facts", "task", None, None, 12, 9),
    ]
    columns = ["set", "role", "context_length", "depth_percent", "n_probes", "n_passed"]
    return pl.DataFrame(rows, schema=columns, orient="row")
