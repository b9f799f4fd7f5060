"""Score formulas: SQL expressions over the columns of a row, evaluated by Polars.

A formula is arithmetic on one row (a step of one head); `check_formula` refuses everything else
before a job runs, so a config file cannot read files, aggregate over rows or run a query.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from workflow_scripts.common.errors import UserError

FUNCTIONS = frozenset(
    "abs ceil coalesce exp floor greatest if least ln log10 log2 nullif pow power round sign "
    "sqrt".split()
)
"""Scalar SQL functions that a formula may call."""

_KEYWORDS = frozenset("case when then else end and or not is null between".split())
_TOKEN = re.compile(
    r"\s+|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![A-Za-z_])"
    r"|(?P<word>[A-Za-z_]\w*)|(?P<operator><=|>=|<>|!=|[-+*/%(),<>=])"
)
_COMMENTS = ("--", "/*")

Array = NDArray[Any]


def check_formula(key: str, formula: str, columns: Sequence[str]) -> list[str]:
    """Check a formula and return the columns it names, sorted.

    Parameters
    ----------
    key
        Key of the formula in the config, for the message.
    formula
        An SQL expression.
    columns
        Known columns.

    Raises
    ------
    UserError
        If it names an unknown column or function, no column, or is no expression.
    """
    words = _words(key, formula)
    for word, called in words:
        if called and word.lower() not in FUNCTIONS | _KEYWORDS:
            raise UserError(
                f"{key}: function '{word}' is not allowed in a formula; allowed are "
                f"{', '.join(sorted(FUNCTIONS))}, over the columns {', '.join(columns)}"
            )
        if not called and word.lower() not in _KEYWORDS and word not in columns:
            raise UserError(f"{key}: unknown column '{word}'; known columns: {', '.join(columns)}")
    used = sorted({word for word, called in words if not called and word in columns})
    if not used:
        raise UserError(f"{key}: names no column; known columns: {', '.join(columns)}")
    try:
        evaluate(formula, {name: np.ones(2) for name in used})
    except pl.exceptions.PolarsError as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{key}: '{formula}' is not an SQL expression: {reason}") from None
    return used


def evaluate(formula: str, columns: Mapping[str, Array]) -> NDArray[np.float64]:
    """Evaluate a checked formula.

    Parameters
    ----------
    formula
        An SQL expression that `check_formula` accepts.
    columns
        Column name to values; all shapes broadcast against each other.

    Returns
    -------
    ndarray
        float64, of the broadcast shape; NaN where SQL gives null.
    """
    broadcast = np.broadcast_arrays(*columns.values())
    shape = broadcast[0].shape
    flat = (np.ascontiguousarray(values, np.float64).ravel() for values in broadcast)
    frame = pl.DataFrame(dict(zip(columns, flat, strict=True)))
    expression = pl.sql_expr(_with_float_literals(formula)).cast(pl.Float64)
    result = frame.select(expression.alias("value"))["value"]
    return result.fill_null(float("nan")).to_numpy().reshape(shape)


def _words(key: str, formula: str) -> list[tuple[str, bool]]:
    """Return each word of a formula and whether a parenthesis follows it, as in a call."""
    position, found, after_operand = 0, [], False
    comment = next((mark for mark in _COMMENTS if mark in formula), None)
    while position < len(formula) and comment is None:
        match = _TOKEN.match(formula, position)
        if match is None:
            break
        text = match[0].lower()
        operand = match["number"] or (match["word"] and text not in _KEYWORDS)
        if operand and after_operand:  # SQL would take the second for a name of the first
            break
        position = match.end()
        if match["word"]:
            found.append((match["word"], formula[position:].lstrip().startswith("(")))
        if not text.isspace():
            after_operand = bool(operand) or text in (")", "end", "null")
    if comment is not None or position < len(formula):
        rest = comment or formula[position:]
        raise UserError(f"{key}: '{rest}' is not allowed there in the formula '{formula}'")
    return found


def _with_float_literals(formula: str) -> str:
    """Write whole numbers as floats: SQL would divide 1 by 2 to 0."""

    def widen(match: re.Match[str]) -> str:
        number = match["number"]
        return f"{number}.0" if number and number.isdigit() else match[0]

    return _TOKEN.sub(widen, formula)
