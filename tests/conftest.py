"""The figures that tests have measured, in a table at the end of the run, whichever process ran the test."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what `tests/faults` recorded."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    rows = [
        value
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "figure"
    ]
    if not rows:
        return
    terminalreporter.section("fault figures")
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, value, target in rows:
        terminalreporter.write_line(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {target}".rstrip())
