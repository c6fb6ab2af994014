"""Compare models on the same scenarios: an earlier policy with a later one, or a trained model with a prompted one.

The statistical unit is the scenario: runs of one scenario are not independent, so their mean counts as one value. The
95 % confidence interval of a mean uses the normal approximation. The difference between a model and the first model is
paired by scenario; its 95 % lower bound is computed as in the gate (`art_patch.gate.lower_bound`).
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

from art_patch.errors import ConfigError
from art_patch.gate import lower_bound
from art_patch.rollouts.model import Model
from art_patch.rollouts.trajectory import Trajectory
from art_patch.rollouts.trajectory_group import TrajectoryGroup, gather_trajectory_groups

S = TypeVar("S")

_LEVEL = 0.95
_WITHIN_SE = 1.96

_FIRST, _OTHER = "#8a8f98", "#2563eb"  # told apart without colour vision, too: by lightness
_INK, _GRID = "#1f2937", "#e5e7eb"
_DPI = 150


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric's mean over scenarios; `nan` if no run has the metric."""

    value: float  # the mean of the scenarios' means
    within: float  # half the width of the 95 % confidence interval; `nan` for a single scenario


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The results of one model in an `Evaluation`."""

    model: str  # its name; `NAME@STEP` for a checkpoint
    runs: int  # number of runs that finished
    raised: int  # number of runs that raised an exception
    metrics: Mapping[str, Mean]  # by name; `reward` is one of them
    # Mean of this model's reward minus the first model's, over scenarios in which both have a reward, and its 95 %
    # lower bound. `None` for the first model, and with too few scenarios.
    better_by: float | None = None
    at_least: float | None = None
    groups: Sequence[TrajectoryGroup] = field(default=(), repr=False)  # the runs, a group for each scenario


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of `evaluate`, in the order in which the models were given; each model is compared with the first."""

    scenarios: int  # number of scenarios that every model ran
    models: tuple[Evaluated, ...]

    def __getitem__(self, model: str) -> Evaluated:
        """Return the results of the model of this name; raises a `KeyError` if it was not evaluated."""
        return {each.model: each for each in self.models}[model]

    def to_json(self) -> dict[str, Any]:
        """Return the results as a JSON object; a number that is unknown (`nan` or `None`) becomes `null`."""

        def number(value: float | None) -> float | None:
            return None if value is None or not math.isfinite(value) else value

        def model(each: Evaluated) -> dict[str, Any]:
            means = {name: {"mean": number(m.value), "within": number(m.within)} for name, m in each.metrics.items()}
            counts = {"model": each.model, "runs": each.runs, "raised": each.raised, "metrics": means}
            return counts | {"better_by": number(each.better_by), "at_least": number(each.at_least)}

        return {"scenarios": self.scenarios, "models": [model(each) for each in self.models]}

    def table(self, *metrics: str) -> str:
        """Return a text table with a row for each model, and columns for the given metrics or else for all."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        shown = list(metrics) or self._metrics()
        raised = any(each.raised for each in self.models)
        drawn = Table(box=SIMPLE_HEAD)
        drawn.add_column("model")
        for heading in ("runs", *(("raised",) if raised else ()), *shown, "better by", "at least"):
            drawn.add_column(heading, justify="right")
        for each in self.models:
            counts = [str(each.runs), *([str(each.raised)] if raised else [])]
            means = [_mean_text(each.metrics.get(name)) for name in shown]
            drawn.add_row(each.model, *counts, *means, _signed(each.better_by), _signed(each.at_least))
        # Wide enough for all columns: rich would cut cells to the width of the terminal.
        page = StringIO()
        Console(file=page, width=max(80, 22 * (len(shown) + 4)), color_system=None).print(drawn)
        lines = [line.rstrip() for line in page.getvalue().splitlines() if line.strip()]
        runs = "run" if self.scenarios == 1 else "runs"
        note = f"  {self.scenarios} scenarios; +- and `at least` are 95 % limits, {runs} of a scenario count once"
        return "\n".join([*lines, note])

    def _metrics(self) -> list[str]:
        # Models may have different metrics: all of them, in the order of their first appearance.
        return list(dict.fromkeys(name for each in self.models for name in each.metrics))

    def plot(
        self, path: str | Path, *, metric: str = "reward", title: str = "", curve: Sequence[tuple[int, float]] = ()
    ) -> Path:
        """Draw one metric to the PNG file `path`, which is returned: the models' means as bars, and a curve over steps.

        Args:
            title: title of the plot; the metric's name if empty.
            curve: (step, value) pairs, such as those of `model.history`, drawn beside the bars; empty for bars alone.

        Raises:
            ConfigError: matplotlib is not installed, or no model has the metric.
        """
        bars = [each for each in self.models if metric in each.metrics]
        if not bars:
            raise ConfigError(f"no model has a metric {metric!r}; there are: {', '.join(self._metrics())}")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ConfigError("a plot needs matplotlib; run: pip install matplotlib") from None
        # `Figure` and not pyplot, which opens a display and keeps every figure until it is closed.
        wide = 7.5 if curve else 2.5 + 0.9 * len(bars)
        page: Any = Figure(figsize=(wide, 3.6), layout="constrained")
        # Shared y axis, so that the curve and the bars can be compared by eye.
        axes: Any = page.subplots(1, 2 if curve else 1, sharey=bool(curve), width_ratios=[2, 1] if curve else None)
        left, right = axes if curve else (None, axes)
        if left is not None:
            left.plot(*zip(*curve, strict=True), color=_OTHER, linewidth=2, marker="o", markersize=4)
            left.set_title("training", color=_INK, fontsize=9)
            right.set_title("evaluation", color=_INK, fontsize=9)
            left.set_xlabel("step")
            left.xaxis.get_major_locator().set_params(integer=True)
            _quiet(left)
        (left or right).set_ylabel(metric)
        _draw_bars(right, bars, metric)
        _quiet(right)
        page.suptitle(title or metric, color=_INK, fontsize=11)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        page.savefig(target, dpi=_DPI)
        return target


async def evaluate(
    rollout: Callable[[Model[Any], S], Awaitable[Trajectory]],
    scenarios: Iterable[S],
    models: Sequence[Model[Any]],
    *,
    runs: int = 1,
    pbar_desc: str | None = "evaluate",
    max_exceptions: float = 0,
) -> Evaluation:
    """Run every model on the same scenarios, and compare each model with the first.

    Args:
        rollout: coroutine function that takes a model and a scenario, and returns the trajectory of one run.
        scenarios: scenarios that no model was trained on.
        models: models to compare, such as `await model.checkpoint(step)` for an earlier policy, or `Model(...)` for
            another provider's model.
        runs: number of runs of each scenario by each model.
        pbar_desc: as for `gather_trajectories`, like `max_exceptions`.

    Raises:
        ConfigError: no scenario or no model is given, or two models have the same name.
    """
    asked = list(scenarios)
    names = [model.name for model in models]
    if not asked or not models:
        raise ConfigError(f"{len(asked)} scenarios and {len(models)} models: nothing to evaluate; give one of each")
    if len(set(names)) < len(names):
        raise ConfigError(f"two models are named {max(names, key=names.count)!r}; give each a name of its own")
    found = await gather_trajectory_groups(
        (TrajectoryGroup(rollout(model, each) for _ in range(runs)) for model in models for each in asked),
        pbar_desc=pbar_desc,
        max_exceptions=max_exceptions,
    )
    # All groups ran in one gathering, model after model; here they are cut apart again.
    first, *others = [found[start : start + len(asked)] for start in range(0, len(found), len(asked))]
    rest = [_evaluated(name, groups, against=first) for name, groups in zip(names[1:], others, strict=True)]
    return Evaluation(len(asked), (_evaluated(names[0], first), *rest))


def _evaluated(
    name: str, groups: Sequence[TrajectoryGroup], against: Sequence[TrajectoryGroup] | None = None
) -> Evaluated:
    runs = [run for group in groups for run in group]
    metrics = ["reward", *dict.fromkeys(metric for run in runs for metric in run.metrics)]
    better_by = at_least = None
    if against is not None:
        pairs = zip(_by_scenario(groups, "reward"), _by_scenario(against, "reward"), strict=True)
        # A scenario counts only where both models have a reward, or the difference would depend on which runs raised.
        differences = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
        if differences:
            better_by = fmean(differences)
            # The bound is infinite where too few scenarios allow no claim.
            at_least = bound if math.isfinite(bound := lower_bound(differences, _LEVEL)) else None
    return Evaluated(
        model=name,
        runs=len(runs),
        raised=sum(len(group.exceptions) for group in groups),
        metrics={metric: _mean([v for v in _by_scenario(groups, metric) if v is not None]) for metric in metrics},
        better_by=better_by,
        at_least=at_least,
        groups=tuple(groups),
    )


def _by_scenario(groups: Sequence[TrajectoryGroup], metric: str) -> list[float | None]:
    """Return the metric's mean in each group; `None` where no run has it."""
    means: list[float | None] = []
    for group in groups:
        given = [run.reward if metric == "reward" else run.metrics.get(metric) for run in group]
        values = [float(value) for value in given if value is not None and math.isfinite(value)]
        means.append(fmean(values) if values else None)
    return means


def _mean(values: Sequence[float]) -> Mean:
    if not values:
        return Mean(math.nan, math.nan)
    # Half the width of the interval; one scenario has no spread to estimate it by.
    within = _WITHIN_SE * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(fmean(values), within)


def _draw_bars(axes: Any, bars: Sequence[Evaluated], metric: str) -> None:
    places = range(len(bars))
    means = [each.metrics[metric] for each in bars]
    within = [0.0 if math.isnan(mean.within) else mean.within for mean in means]
    colours = [_FIRST, *[_OTHER] * (len(bars) - 1)]
    axes.bar(places, [mean.value for mean in means], yerr=within, color=colours, width=0.6, capsize=3, ecolor=_INK)
    for place, mean, above in zip(places, means, within, strict=True):
        # Above the zero line in any case, where it does not cover the bar of a negative mean.
        at = {"xy": (place, max(0.0, mean.value + above)), "xytext": (0, 3), "textcoords": "offset points"}
        axes.annotate(f"{mean.value:.3g}", **at, ha="center", color=_INK, fontsize=9)
    axes.margins(y=0.12)
    axes.set_xticks(places, [each.model.replace("@", "\n@") for each in bars])  # names are long, bars are narrow


def _quiet(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9)


def _mean_text(mean: Mean | None) -> str:
    if mean is None or math.isnan(mean.value):
        return "-"
    return f"{mean.value:.3g}" if math.isnan(mean.within) else f"{mean.value:.3g} +- {mean.within:.2g}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3g}"
