"""The table of families: measured identity errors, shown at the end of every run that measured them."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = [
        (name, value)
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "identity error"
    ]
    if rows:
        terminalreporter.section("sum of phi against u . W_O z, largest relative error a family")
    for _, row in rows:
        terminalreporter.write_line(row)
