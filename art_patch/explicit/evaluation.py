"""Models on the same scenarios, side by side: an earlier policy against a later one, or against a prompted model.

The unit is the scenario: its runs are not independent, so their mean counts once. Limits of a mean are those of the
normal approximation, 95 %; a difference from the first model is paired by scenario, and its lower bound is the gate's
(`art_patch.gate.bounds`), 95 % as well.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

from art_patch.errors import ConfigError
from art_patch.explicit.gather import gather_trajectory_groups
from art_patch.explicit.model import Model
from art_patch.explicit.trajectory import Trajectory
from art_patch.explicit.trajectory_group import TrajectoryGroup
from art_patch.gate.bounds import lower_bound

S = TypeVar("S")

_LEVEL = 0.95
_WITHIN_SE = 1.96


@dataclass(frozen=True, slots=True)
class Mean:
    """A figure's mean over scenarios.

    Attributes:
        value: the mean.
        within: the true one lies within this much of it with 95 % confidence; `nan` for a single scenario.
    """

    value: float
    within: float


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What one model came to.

    Attributes:
        model: its name.
        runs: that ended.
        raised: runs that did not.
        figures: mean of `reward` and of each metric.
        better_by: mean difference of the reward from the first model's, over scenarios that both have; `None` for the
            first.
        at_least: the true difference is above this with 95 % confidence; `None` with too few scenarios to say.
        groups: the runs, a group for each scenario.
    """

    model: str
    runs: int
    raised: int
    figures: Mapping[str, Mean]
    better_by: float | None = None
    at_least: float | None = None
    groups: Sequence[TrajectoryGroup] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What all came to, in the order in which they were given.

    Attributes:
        scenarios: how many.
        models: what each came to.
    """

    scenarios: int
    models: tuple[Evaluated, ...]

    def __getitem__(self, model: str) -> Evaluated:
        """Return what the model of this name came to.

        Raises:
            KeyError: it was not asked.
        """
        for each in self.models:
            if each.model == model:
                return each
        raise KeyError(model)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values; what cannot be said is `None`."""

        def number(value: float | None) -> float | None:
            return None if value is None or not math.isfinite(value) else value

        return {
            "scenarios": self.scenarios,
            "models": [
                {
                    "model": each.model,
                    "runs": each.runs,
                    "raised": each.raised,
                    "figures": {
                        name: {"mean": number(mean.value), "within": number(mean.within)}
                        for name, mean in each.figures.items()
                    },
                    "better_by": number(each.better_by),
                    "at_least": number(each.at_least),
                }
                for each in self.models
            ],
        }

    def table(self, *figures: str) -> str:
        """Return a table for people.

        Args:
            figures: columns; the reward and all metrics unless given.
        """
        from art_patch.explicit.evaluation_view import table

        return table(self, figures)

    def plot(
        self,
        path: str | Path,
        *,
        figure: str = "reward",
        title: str = "",
        curve: Sequence[tuple[int, float]] = (),
    ) -> Path:
        """Draw the models' means as bars, and beside them a curve over steps; needs matplotlib.

        Args:
            path: of the PNG.
            figure: that is drawn.
            title: above it.
            curve: (step, value), as `model.history` gives them; without it there are bars alone.

        Raises:
            ConfigError: matplotlib is not installed, or no model has the figure.
        """
        from art_patch.explicit.evaluation_view import plot

        return plot(self, Path(path), figure=figure, title=title, curve=curve)


async def evaluate(
    rollout: Callable[[Model[Any], S], Awaitable[Trajectory]],
    scenarios: Iterable[S],
    models: Sequence[Model[Any]],
    *,
    runs: int = 1,
    pbar_desc: str | None = "evaluate",
    max_exceptions: float = 0,
) -> Evaluation:
    """Let models run the same scenarios, and compare them with the first.

    Args:
        rollout: of a model and a scenario.
        scenarios: that none was trained on.
        models: to compare; `await model.checkpoint(step)` is an earlier policy, `Model(...)` another provider's.
        runs: of each scenario, by each model.
        pbar_desc: of the progress bar; `None` shows none.
        max_exceptions: how many rollouts may raise; below 1, which share of them. One more is raised.

    Raises:
        ConfigError: there is no scenario or no model, or two models have one name.
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
    first, *others = [
        (model.name, found[place * len(asked) : (place + 1) * len(asked)]) for place, model in enumerate(models)
    ]
    rest = (_evaluated(name, groups, against=first[1]) for name, groups in others)
    return Evaluation(len(asked), (_evaluated(*first), *rest))


def _evaluated(
    name: str, groups: Sequence[TrajectoryGroup], against: Sequence[TrajectoryGroup] | None = None
) -> Evaluated:
    runs = [run for group in groups for run in group]
    figures = ["reward", *dict.fromkeys(figure for run in runs for figure in run.metrics)]
    better_by = at_least = None
    if against is not None:
        pairs = zip(_by_scenario(groups, "reward"), _by_scenario(against, "reward"), strict=True)
        differences = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
        if differences:
            better_by = fmean(differences)
            bound = lower_bound(differences, _LEVEL)
            at_least = bound if math.isfinite(bound) else None
    return Evaluated(
        model=name,
        runs=len(runs),
        raised=sum(len(group.exceptions) for group in groups),
        figures={figure: _mean([v for v in _by_scenario(groups, figure) if v is not None]) for figure in figures},
        better_by=better_by,
        at_least=at_least,
        groups=tuple(groups),
    )


def _by_scenario(groups: Sequence[TrajectoryGroup], figure: str) -> list[float | None]:
    """The figure's mean in each group; `None` where no run has it."""
    means: list[float | None] = []
    for group in groups:
        given = [run.reward if figure == "reward" else run.metrics.get(figure) for run in group]
        values = [float(value) for value in given if value is not None and math.isfinite(value)]
        means.append(fmean(values) if values else None)
    return means


def _mean(values: Sequence[float]) -> Mean:
    if not values:
        return Mean(math.nan, math.nan)
    within = _WITHIN_SE * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(fmean(values), within)
