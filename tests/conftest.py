"""Figures of all processes in one table at the end of the run; and which files several processes begin with.

Where each process takes whole files, the one that takes a long file last keeps everybody waiting: so files with many
slow tests come first.
"""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("hypothesis"):  # not in the environments of other SDK versions
    from hypothesis import settings

    settings.register_profile("no deadline", deadline=None)  # no test asserts a time
    settings.load_profile("no deadline")


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest-xdist, which sorts files by how many tests they have, keep the order of the next function."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a process of pytest-xdist, put the files with most slow tests first, then those with most tests."""
    if not hasattr(config, "workerinput"):
        return
    tests: Counter[Path] = Counter(item.path for item in items)
    slow: Counter[Path] = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (-slow[item.path], -tests[item.path], item.path))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests recorded as `figure`: its name, what was measured, what was wanted."""
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
    terminalreporter.section("figures")
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, value, target in rows:
        terminalreporter.write_line(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {target}".rstrip())
