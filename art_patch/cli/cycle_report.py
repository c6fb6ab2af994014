"""How a cycle's report looks."""

from __future__ import annotations

from typing import Any, cast

from rich.text import Text

from art_patch.cli.output import answer, stdout

_LONG = ("history", "corrections_upto")
"""Figures that only the store and `--json` show."""


def say(report: dict[str, Any], *, as_json: bool) -> None:
    """Print the report of a cycle: what came of it, what is odd, and a line of figures a stage.

    Args:
        report: a `CycleReport` as a dictionary.
        as_json: all of it, as one line of JSON.
    """
    if as_json:
        answer(report)
        return
    console, figures = stdout(), dict(report.get("figures") or {})
    colour = {"promoted": "green", "rejected": "yellow"}.get(report["outcome"], "dim")
    console.print(f"[{colour}]{report['outcome']}[/] {report.get('candidate') or ''}: {report['reason']}")
    if odd := figures.pop("round_trips", None):
        console.print(odd["first"], style="yellow", markup=False)
    for stage, values in figures.items():
        shown = _shown({key: value for key, value in values.items() if key not in _LONG})
        console.print(Text.assemble("  ", (f"{stage:<6}", "dim"), " ", shown))


def _shown(figures: dict[str, Any]) -> str:
    """Return figures in one line; reasons with their counts in brackets, what is empty not at all."""
    return ", ".join(f"{key} {_value(value)}" for key, value in figures.items() if value is not None and value != {})


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"({_shown(cast('dict[str, Any]', value))})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
