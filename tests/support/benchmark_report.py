"""How a benchmark reports: named metrics, their targets, one line of JSON or a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A figure and its limit."""

    figure: str
    at_least: float | None
    at_most: float | None
    means: str

    def is_met(self, value: float) -> bool:
        """Whether a figure is within it."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    @property
    def limit(self) -> str:
        """In words."""
        return f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"


def say(text: str) -> None:
    """Tell of progress."""
    print(text, file=sys.stderr, flush=True)


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of them lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def finish(metrics: Mapping[str, Any], targets: Sequence[Target], *, as_json: bool) -> None:
    """Print the metrics, rounded, and which targets were missed."""
    by_name = {target.figure: target for target in targets}
    rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in metrics.items()}
    missed = [name for name, target in by_name.items() if name in metrics and not target.is_met(metrics[name])]
    if as_json:
        print(json.dumps({**rounded, "missed": missed}))
        return
    for name, value in rounded.items():
        target = by_name.get(name)
        limit, means = (target.limit, target.means) if target else ("", "")
        print(f"{name:<28} {value!s:>12}  {limit:<10} {means}".rstrip())
    print("missed: " + (", ".join(missed) or "none"))
