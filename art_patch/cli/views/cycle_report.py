"""How a cycle's report looks."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from art_patch.cli.views.output import answer, stdout
from art_patch.cli.views.safe_text import one_line
from art_patch.pipeline import LONG, metrics_line

_COLOURS = {"promoted": "green", "rejected": "yellow", "waits for approval": "cyan", "canary": "cyan"}


def say(report: dict[str, Any], *, as_json: bool) -> None:
    """Print the report of a cycle: what came of it, what is odd, and a line of metrics a stage.

    Args:
        report: a `CycleReport` as a dictionary.
        as_json: all of it, as one line of JSON.
    """
    if as_json:
        answer(report)
        return
    console, metrics = stdout(), dict(report.get("metrics") or {})
    colour = _COLOURS.get(report["outcome"], "dim")
    console.print(f"[{colour}]{report['outcome']}[/] {report.get('candidate') or ''}: {report['reason']}")
    if odd := metrics.pop("round_trips", None):
        console.print(odd["first"], style="yellow", markup=False)
    for stage, values in metrics.items():
        shown = metrics_line({key: value for key, value in values.items() if key not in LONG})
        console.print(Text.assemble("  ", (f"{stage:<6}", "dim"), " ", one_line(shown)))
