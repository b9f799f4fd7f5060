"""Reads values back from a figure's SVG as a person does: by its ticks and their labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

SVG = "{http://www.w3.org/2000/svg}"
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


class Picture:
    """An SVG that matplotlib wrote with text as text."""

    def __init__(self, svg: bytes) -> None:
        self.root = ElementTree.fromstring(svg)
        self.by_id = {node.get("id"): node for node in self.root.iter() if node.get("id")}
        self.parents = {child: node for node in self.root.iter() for child in node}

    def texts(self) -> list[str]:
        return [text_of(node) for node in self.root.iter(f"{SVG}text")]

    def panels(self) -> list[Panel]:
        names = [name for name in self.by_id if re.fullmatch(r"axes_\d+", name)]
        return [Panel(self.by_id[name]) for name in names]


class Panel:
    """One pair of axes, with the scales that its tick labels imply."""

    def __init__(self, node: ElementTree.Element) -> None:
        self.node = node
        self.by_id = {child.get("id"): child for child in node.iter() if child.get("id")}

    def ticks(self, axis: str) -> list[tuple[float, str]]:
        """Return the position and label of every tick of axis "x" or "y"."""
        found = []
        for name, node in self.by_id.items():
            if re.fullmatch(rf"{axis}tick_\d+", name):
                use = next(node.iter(f"{SVG}use"))
                labels = [text_of(text) for text in node.iter(f"{SVG}text")]
                found.append((float(use.get(axis)), labels[0] if labels else ""))
        return found

    def read(self, axis: str, at: Any, *, log: bool = False) -> NDArray[np.float64]:
        """Return the values at positions, on a scale that is a straight line through the ticks."""
        ticks = self.ticks(axis)
        place = np.array([position for position, _ in ticks])
        value = np.array([float(label.replace("\N{MINUS SIGN}", "-")) for _, label in ticks])
        slope, offset = np.polyfit(place, np.log(value) if log else value, 1)
        read = slope * np.asarray(at, float) + offset
        return np.exp(read) if log else read

    def points(self, name: str) -> NDArray[np.float64]:
        """Return the points of all paths of a group, shape (n, 2)."""
        return np.concatenate([path_points(path) for path in self.paths(name)])

    def paths(self, name: str) -> Iterator[ElementTree.Element]:
        group = self.by_id[name]
        defs = {path for d in group.iter(f"{SVG}defs") for path in d.iter(f"{SVG}path")}
        return (path for path in group.iter(f"{SVG}path") if path not in defs)

    def markers(self, name: str) -> NDArray[np.float64]:
        """Return where the markers of a group stand, shape (n, 2)."""
        uses = self.by_id[name].iter(f"{SVG}use")
        return np.array([[float(use.get("x")), float(use.get("y"))] for use in uses])

    def shape(self, name: str) -> NDArray[np.float64]:
        """Return the corners of a filled shape, which stands aside and is used once, shape (n, 2)."""
        (path,) = (path for d in self.by_id[name].iter(f"{SVG}defs") for path in d)
        (use,) = self.by_id[name].iter(f"{SVG}use")
        return path_points(path) + np.array([use.get("x"), use.get("y")], float)

    def cells(self, name: str) -> dict[tuple[int, int], str]:
        """Return the colour of each cell of a mesh, by its whole-numbered column and row."""
        found = {}
        for path in self.paths(name):
            corners = path_points(path)
            centre = (corners.min(0) + corners.max(0)) / 2
            column, row = self.read("x", centre[0]), self.read("y", centre[1])
            found[round(float(column)), round(float(row))] = colour_of(path)
        return found


def path_points(path: ElementTree.Element) -> NDArray[np.float64]:
    numbers = [float(number) for number in _NUMBER.findall(path.get("d"))]
    return np.array(numbers).reshape(-1, 2)


def colour_of(node: ElementTree.Element) -> str:
    return re.search(r"fill: (#[0-9a-f]{6})", node.get("style"))[1]


def text_of(node: ElementTree.Element) -> str:
    return "".join(node.itertext()).strip()
