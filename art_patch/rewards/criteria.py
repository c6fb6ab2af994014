"""Weighted criteria: each has a rule that gives every sibling of a group a value from 0 to 1, or none. Pure.

The four that hold unless a project says otherwise:

- `accuracy` (0.4): did it do what was asked? A code check of that name where there is one, else the judge's score in
  this group. Required: a sibling without it has no reward, because all the others can be had by doing nothing.
- `efficiency` (0.3): how little effort, among the siblings that got equally far. See `efficiency_G`.
- `completeness` (0.2): was it finished properly? See `completeness_G`.
- `satisfaction` (0.1): what people said. See `feedback.py`.

The reward is the mean weighted by the criteria that have a value. So what nobody said anything about costs nothing and
gains nothing: its weight goes to the others in proportion. Every value is kept beside the reward, as a score named
`criterion.NAME` with the version of its rule.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from art_patch.errors import ConfigError
from art_patch.rewards.checks import load_function, version_of
from art_patch.rewards.feedback import satisfaction_G
from art_patch.rewards.judge.ruler import SCORE_NAME, SCORE_SOURCE
from art_patch.rewards.latest_score import newest
from art_patch.trajectories import chosen_choice, main_call, transcript
from art_patch.types import COPIES, JSON, Group, Score, Trajectory

SOURCE = "criteria"
PREFIX = "criterion."

COMPARABLE = 0.1
"""Siblings whose accuracy is this close to the best one's got equally far."""
REACHED = 0.5
"""Below this accuracy nobody got anywhere, and effort that was spared is no merit."""

Rule = Callable[[Group], Sequence[float | None]]
"""Takes a group whose siblings hold all their scores; returns 0..1 or `None` for each of the G, in their order."""

_ENTRY = re.compile(r"(?P<name>[\w.-]+)=(?P<weight>[\d.]+)(@(?P<rule>[\w.]+:[\w.]+))?")


def accuracy_G(group: Group) -> tuple[float | None, ...]:
    """A code check named `accuracy` where it gave a value from 0 to 1, else the judge's score in this group."""
    checked = (newest(each, "accuracy", ("code",)) for each in group.trajectories)
    judged = (newest(each, SCORE_NAME, (SCORE_SOURCE,), group_id=group.id) for each in group.trajectories)
    return tuple(
        check if check is not None and 0 <= check <= 1 else judge for check, judge in zip(checked, judged, strict=True)
    )


def efficiency_G(group: Group) -> tuple[float | None, ...]:
    """How little effort each sibling took, compared with the one that took least.

    Three efforts are compared, each as `(least + 1) / (own + 1)`, and their mean is the value: tokens that the model
    wrote (prompts are paid by the next effort), calls, and tool calls. Twice the least in everything is about 0.5.
    Tokens are left out where a server did not count them.

    Only siblings that got equally far are compared: accuracy at least 0.5 and at most 0.1 below the best. The others
    get 0, whatever they spared: a lazy wrong answer must not win. If nobody reached 0.5, nobody has a value.
    """
    accuracy = accuracy_G(group)
    best = max((value for value in accuracy if value is not None), default=0.0)
    if best < REACHED:
        return (None,) * len(accuracy)
    bar = max(REACHED, best - COMPARABLE) - 1e-9
    compared = {
        each.id: _efforts(each)
        for each, value in zip(group.trajectories, accuracy, strict=True)
        if value is not None and value >= bar
    }
    counted = all(efforts[0] for efforts in compared.values())
    efforts = {key: values if counted else values[1:] for key, values in compared.items()}
    least = [min(column) for column in zip(*efforts.values(), strict=True)]

    def value_of(sibling: Trajectory) -> float:
        own = efforts.get(sibling.id)
        if own is None:
            return 0.0
        return sum((low + 1) / (mine + 1) for low, mine in zip(least, own, strict=True)) / len(least)

    return tuple(
        None if value is None else value_of(each) for each, value in zip(group.trajectories, accuracy, strict=True)
    )


def _efforts(trajectory: Trajectory) -> tuple[int, int, int]:
    """Return tokens written, calls, tool calls."""
    tools = 0
    for position, call in enumerate(trajectory.calls):
        used = chosen_choice(call, trajectory.calls[position + 1 :])
        tools += 0 if used is None else len(used.message.get("tool_calls") or ())
    return sum(call.completion_tokens for call in trajectory.calls), len(trajectory.calls), tools


def completeness_G(group: Group) -> tuple[float | None, ...]:
    """Whether each sibling was finished properly.

    0 if it has no last answer, or the `trajectory()` block ended with an exception. Else 1, halved for each of these:

    - the last answer did not come to its own end (`finish_reason` is not `stop`);
    - a call failed, was cancelled or was given up;
    - a tool was called and no result followed.

    For a single turn or a part of a run (`records.COPIES`) an answer that calls a tool is a last answer as good as any.
    """
    return tuple(map(_completeness, group.trajectories))


def _completeness(trajectory: Trajectory) -> float:
    call = main_call(trajectory)
    if call is None or not call.choices or trajectory.info.error is not None:
        return 0.0
    *before, last = transcript(trajectory)
    goes_on = trajectory.info.origin in COPIES and bool(last.get("tool_calls"))
    if not (goes_on or last.get("content") or last.get("refusal")):
        return 0.0
    finish = min(call.choices, key=lambda choice: choice.index).finish_reason
    faults = (
        finish not in (("stop", "tool_calls") if goes_on else ("stop",)),
        any(each.status != "ok" for each in trajectory.calls),
        _has_open_tool_call(before if goes_on else [*before, last]),
    )
    return 0.5 ** sum(faults)


def _has_open_tool_call(messages: Sequence[JSON]) -> bool:
    made = {
        cast("Mapping[str, Any]", call).get("id")
        for message in messages
        for call in message.get("tool_calls") or ()
        if isinstance(call, Mapping)
    }
    return bool(made - {message.get("tool_call_id") for message in messages} - {None})


@dataclass(frozen=True, slots=True)
class Criterion:
    """One thing that is valued.

    Attributes:
        name: what its scores are named after `criterion.`.
        weight: its part; parts need not add up to one.
        rule: gives the values.
        required: a sibling without a value has no reward at all.
        version: of the rule, kept with its values.
    """

    name: str
    weight: float
    rule: Rule
    required: bool = False
    version: str = ""

    def values_G(self, group: Group) -> tuple[float | None, ...]:
        """Return the values of a group whose siblings hold all their scores.

        Raises:
            ConfigError: the rule returned something else than one number from 0 to 1, or `None`, for each sibling.
        """
        values = tuple(self.rule(group))
        if len(values) != len(group.trajectories):
            raise ConfigError(
                f"the rule of criterion {self.name!r} gave {len(values)} values for {len(group.trajectories)} "
                "siblings; it must give one for each, in their order, None for none"
            )
        for value in values:
            if value is not None and not (math.isfinite(value) and 0 <= value <= 1):
                raise ConfigError(
                    f"the rule of criterion {self.name!r} gave {value}; values go from 0 to 1, or are None"
                )
        return values


DEFAULT_CRITERIA = (
    Criterion("accuracy", 0.4, accuracy_G, required=True, version="1"),
    Criterion("efficiency", 0.3, efficiency_G, version="1"),
    Criterion("completeness", 0.2, completeness_G, version="1"),
    Criterion("satisfaction", 0.1, satisfaction_G, version="1"),
)


def load_criteria(text: str | None) -> tuple[Criterion, ...]:
    """Return the criteria that a setting means: the default ones, changed by its `name=weight[@module:function]`.

    Raises:
        ConfigError: an entry is none, a criterion has no rule, or no weight is left.
    """
    known = {criterion.name: criterion for criterion in DEFAULT_CRITERIA}
    for entry in filter(None, map(str.strip, (text or "").split(","))):
        match = _ENTRY.fullmatch(entry)
        try:
            name, weight = (match["name"], float(match["weight"])) if match else ("", math.nan)
        except ValueError:
            name, weight = "", math.nan
        if match is None or not math.isfinite(weight):
            raise ConfigError(
                f"criterion {entry!r} cannot be read; write name=weight or name=weight@module:function, "
                "several separated by commas"
            )
        if match["rule"]:
            rule = load_function(match["rule"], what=f"criterion {name!r}")
            required = name in known and known[name].required
            known[name] = Criterion(name, weight, rule, required, version_of(rule))
        elif name in known:
            known[name] = replace(known[name], weight=weight)
        else:
            raise ConfigError(
                f"criterion {name!r} has no rule; write {name}={weight:g}@module:function, or one of {', '.join(known)}"
            )
    chosen = tuple(criterion for criterion in known.values() if criterion.weight > 0)
    if not chosen:
        raise ConfigError("no criterion has a weight above 0, so nothing could be rewarded")
    return chosen


def weighted_G(group: Group, criteria: Sequence[Criterion]) -> tuple[float | None, ...]:
    """Return the weighted mean for each sibling, 0..1; `None` where a required value is missing, or all are."""
    values = [criterion.values_G(group) for criterion in criteria]
    return tuple(_mean(criteria, of_one) for of_one in zip(*values, strict=True))


def _mean(criteria: Sequence[Criterion], values: Sequence[float | None]) -> float | None:
    if any(one.required and one.weight > 0 and value is None for one, value in zip(criteria, values, strict=True)):
        return None
    present = [(one.weight, value) for one, value in zip(criteria, values, strict=True) if value is not None]
    whole = sum(weight for weight, _ in present)
    return sum(weight * value for weight, value in present) / whole if whole > 0 else None


def criterion_scores(group: Group, criteria: Sequence[Criterion], *, now: float | None = None) -> tuple[Score, ...]:
    """Return every value as a score of this group; giving them again under the same rules replaces them.

    Args:
        group: siblings that hold all their scores.
        criteria: what is valued.
        now: `Score.at`; the present unless given.
    """
    at = time.time() if now is None else now
    return tuple(
        Score(
            _score_id(group.id, sibling.id, one), sibling.id, PREFIX + one.name, value, SOURCE, at,
            group_id=group.id, rubric=one.version,
        )
        for one in criteria
        for sibling, value in zip(group.trajectories, one.values_G(group), strict=True)
        if value is not None
    )  # fmt: skip


def _score_id(group_id: str, trajectory_id: str, criterion: Criterion) -> str:
    key = "\0".join((SOURCE, group_id, trajectory_id, criterion.name, criterion.version))
    return hashlib.sha256(key.encode("utf-8", "backslashreplace")).hexdigest()[:32]
