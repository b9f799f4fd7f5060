"""The report page: what its template is filled with."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import polars as pl
import yaml

from workflow_scripts.report.catalogue import Figure, main_score
from workflow_scripts.report.plots import UNITS
from workflow_scripts.report.series import TOP, colour_limit

TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, *, folder: Path = TEMPLATES, **values: Any) -> str:
    """Fill a template; every value is escaped, so texts of probes stay texts."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["words"] = lambda name: name.replace("_", " ")
    environment.filters["share"] = lambda value: _with_minus(f"{value:.2f}")
    environment.filters["mib"] = lambda value: f"{value / 2**20:,.1f} MiB"
    environment.filters["percent"] = lambda value: _with_minus(f"{100 * value:.1f} %")
    return environment.get_template(template).render(values)


def _with_minus(number: str) -> str:
    return number.replace("-", "\N{MINUS SIGN}")


def head_data(heads: pl.DataFrame) -> dict[str, Any]:
    """Return what the page's script shows of the heads, as JSON values.

    Returns
    -------
    dict
        `heads`: [layer, head, KV group] of each, by layer and head; `scores`: by name, its unit,
        where its colours end, and [value, ci_low, ci_high, rank] of each head in the same order.
    """
    scores = heads["score"].unique().sort().to_list()
    parts = {
        score: heads.filter(pl.col("score") == score).sort("layer", "head") for score in scores
    }
    return {
        "main": main_score(scores),
        "top": TOP,
        "heads": [list(row) for row in parts[scores[0]].select("layer", "head", "kv_group").rows()],
        "scores": {
            score: {
                "unit": UNITS.get(score, ""),
                "limit": colour_limit(part["value"].to_numpy()),
                "rows": [
                    [float(f"{number:.6g}") for number in row[:3]] + [row[3]]
                    for row in part.select("value", "ci_low", "ci_high", "rank").iter_rows()
                ],
            }
            for score, part in parts.items()
        },
    }


def figure_data(figures: Iterable[Figure], drawn: Iterable[bytes]) -> list[dict[str, str]]:
    """Return the figures of a page from their SVGs, each as a data URI.

    In an `img`, an SVG keeps its ids to itself and runs no script.
    """
    return [
        {
            "kind": figure.kind,
            "category": figure.category,
            "title": figure.title,
            "caption": figure.caption.read_text(encoding="utf-8").strip(),
            "source": "data:image/svg+xml;base64," + base64.b64encode(svg).decode(),
        }
        for figure, svg in zip(figures, drawn, strict=True)
    ]


def citation(path: str | Path) -> dict[str, str]:
    """Return how to cite: the software, and the paper as a sentence and as BibTeX.

    Parameters
    ----------
    path
        A CITATION.cff whose first reference is the paper.
    """
    software = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    paper = software["references"][0]
    authors = paper["authors"]
    names = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in authors)
    key = f"{authors[0]['family-names'].lower()}{paper['year']}"
    fields = {
        "title": paper["title"],
        "author": names,
        "year": paper["year"],
        "url": paper["url"],
    }
    body = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items())
    return {
        "software": f"{software['title']}, version {software['version']}",
        "paper": f"{', '.join(author['family-names'] for author in authors)} ({paper['year']}). "
        f"{paper['title']}. {paper['url']}",
        "bibtex": f"@misc{{{key},\n{body}\n}}",
    }


def settings_text(spec: Mapping[str, Any]) -> str:
    """Return settings as YAML, sorted."""
    text: str = yaml.safe_dump(dict(spec), sort_keys=True, allow_unicode=True, width=100)
    return text
