"""Which figures a config makes, under which names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

CAPTIONS = Path(__file__).with_name("captions")
"""A text a kind of figure, for the page and for `snakemake --report`."""


@dataclass(frozen=True)
class Figure:
    """A figure of a model.

    Attributes
    ----------
    kind
        Names the function that draws it and the caption.
    subject
        The score or task that it shows; None for a figure of several.
    category
        Where it stands on the page and in Snakemake's report.
    title
        Its heading.
    """

    kind: str
    subject: str | None
    category: str
    title: str

    @property
    def name(self) -> str:
        """The name of its files."""
        return self.kind if self.subject is None else f"{self.kind}-{self.subject}"

    @property
    def caption(self) -> Path:
        """The file of its caption."""
        return CAPTIONS / f"{self.kind}.rst"


def figures_of(
    scores: Iterable[str], roles: Mapping[str, str], selectors: Iterable[str]
) -> list[Figure]:
    """Return the figures that a config's rows make, in the order of the page.

    `roles` holds the role of each task. A figure is left out where there is nothing to compare or
    nothing was ablated.
    """
    scores, tasks = sorted(scores), sorted(roles)
    main = main_score(scores)
    others = [score for score in scores if score != main]
    ablated = tasks if any(True for _ in selectors) else []
    figures = [Figure("ablation", task, "Ablation", f"Ablation: {task}") for task in ablated]
    if len(ablated) > 1:
        figures.append(Figure("tasks", None, "Ablation", "The tasks against each other"))
    if "target" in roles.values():
        controls = [task for task in ablated if roles[task] == "control"]
        figures += [Figure("dissociation", c, "Ablation", f"Dissociation: {c}") for c in controls]
    figures += [Figure("heatmap", score, "Heads", f"Every head: {score}") for score in scores]
    figures.append(Figure("layers", None, "Heads", "Layers of the best heads"))
    if others:
        figures.append(Figure("overlap", None, "Heads", "Best heads that scores share"))
    figures += [Figure("scatter", score, "Heads", f"{main} against {score}") for score in others]
    figures += [Figure("distribution", score, "Heads", f"Both tails: {score}") for score in scores]
    figures += [Figure("kv_groups", score, "Heads", f"KV groups: {score}") for score in scores]
    figures.append(Figure("pass_rates", None, "Probes", "Probes passed, by length and depth"))
    return figures


def main_score(names: Iterable[str]) -> str:
    """Return the score or selector that is shown first: locos, or the first by name."""
    ordered = sorted(names)
    return "locos" if "locos" in ordered else ordered[0]
