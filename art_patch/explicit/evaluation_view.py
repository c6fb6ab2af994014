"""An evaluation as people read it: a table, and a picture of bars beside the curve of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_patch.errors import ConfigError

if TYPE_CHECKING:
    from art_patch.explicit.evaluation import Evaluated, Evaluation, Mean

_FIRST, _OTHER = "#8a8f98", "#2563eb"  # told apart without colour vision, too: by lightness
_INK, _GRID = "#1f2937", "#e5e7eb"
_DPI = 150


def table(evaluation: Evaluation, figures: Sequence[str]) -> str:
    """Return the table; see `Evaluation.table`."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    shown = list(figures) or list(dict.fromkeys(name for each in evaluation.models for name in each.figures))
    raised = any(each.raised for each in evaluation.models)
    drawn = Table(box=SIMPLE_HEAD)
    drawn.add_column("model")
    for heading in ("runs", *(("raised",) if raised else ()), *shown, "better by", "at least"):
        drawn.add_column(heading, justify="right")
    for each in evaluation.models:
        counts = [str(each.runs), *([str(each.raised)] if raised else [])]
        means = [_mean(each.figures.get(name)) for name in shown]
        drawn.add_row(each.model, *counts, *means, _signed(each.better_by), _signed(each.at_least))
    console = Console(file=StringIO(), width=max(80, 22 * (len(shown) + 4)), color_system=None)
    console.print(drawn)
    rendered = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.rstrip() for line in rendered.splitlines() if line.strip()]
    runs = "run" if evaluation.scenarios == 1 else "runs"
    note = f"  {evaluation.scenarios} scenarios; +- and `at least` are 95 % limits, {runs} of a scenario count once"
    return "\n".join([*lines, note])


def plot(evaluation: Evaluation, path: Path, *, figure: str, title: str, curve: Sequence[tuple[int, float]]) -> Path:
    """Draw the picture; see `Evaluation.plot`."""
    bars = [each for each in evaluation.models if figure in each.figures]
    if not bars:
        known = ", ".join(dict.fromkeys(name for each in evaluation.models for name in each.figures))
        raise ConfigError(f"no model has a figure {figure!r}; there are: {known}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib; run: pip install matplotlib") from None
    # `Figure` itself and not pyplot: no display, no state that outlives it.
    wide = 7.5 if curve else 2.5 + 0.9 * len(bars)
    page: Any = Figure(figsize=(wide, 3.6), layout="constrained")
    axes: Any = page.subplots(1, 2 if curve else 1, sharey=bool(curve), width_ratios=[2, 1] if curve else None)
    left, right = axes if curve else (None, axes)
    if left is not None:
        steps, values = zip(*curve, strict=True)
        left.plot(steps, values, color=_OTHER, linewidth=2, marker="o", markersize=4)
        left.set_title("training", color=_INK, fontsize=9)
        right.set_title("evaluation", color=_INK, fontsize=9)
        left.set_xlabel("step")
        left.set_ylabel(figure)
        left.xaxis.get_major_locator().set_params(integer=True)
    else:
        right.set_ylabel(figure)
    _draw_bars(right, bars, figure)
    for each in (left, right):
        if each is not None:
            _quiet(each)
    page.suptitle(title or figure, color=_INK, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.savefig(path, dpi=_DPI)
    return path


def _draw_bars(axes: Any, bars: Sequence[Evaluated], figure: str) -> None:
    places = range(len(bars))
    means = [each.figures[figure] for each in bars]
    within = [0.0 if math.isnan(mean.within) else mean.within for mean in means]
    colours = [_FIRST, *[_OTHER] * (len(bars) - 1)]
    axes.bar(places, [mean.value for mean in means], yerr=within, color=colours, width=0.6, capsize=3, ecolor=_INK)
    for place, mean, above in zip(places, means, within, strict=True):
        axes.annotate(
            f"{mean.value:.3g}",
            (place, max(0.0, mean.value + above)),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=_INK,
            fontsize=9,
        )
    axes.margins(y=0.12)
    axes.set_xticks(places, [each.model.replace("@", "\n@") for each in bars])  # names are long, bars are narrow


def _quiet(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9)


def _mean(mean: Mean | None) -> str:
    if mean is None or math.isnan(mean.value):
        return "-"
    return f"{mean.value:.3g}" if math.isnan(mean.within) else f"{mean.value:.3g} +- {mean.within:.2g}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3g}"
