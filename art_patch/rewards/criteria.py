"""The rules that compute rewards, one of which a project chooses with `ART_PATCH_REWARD`. Pure.

Scores that the rule does not use are stored and shown, but do not change the reward.

- `ruler`, the default: the reward is the score named `reward` that the user or the user's code gave. If there is none,
  it is the RULER score that the judge gave in this group; if there is none either, there is no reward. The rule looks
  at one trajectory at a time. If only some siblings have a `reward`, the user's scale and RULER's 0..1 mix in one
  group: give rewards from 0 to 1, or give them to all siblings.
- `criteria`: the reward is a weighted mean of criteria. Each criterion has a weight, and a rule that computes a value
  from 0 to 1. A score named `reward` is not used. The default criteria are `accuracy` (0.4), `efficiency` (0.3),
  `completeness` (0.2) and `satisfaction` (0.1).
- `module:function`: a function of the user's computes the rewards. It takes a `Group` whose siblings hold all their
  scores, and returns for each sibling, in order, a finite number or `None`.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from statistics import fmean
from typing import Any, cast

from art_patch.errors import ConfigError
from art_patch.rewards.checks import load_function, version_of
from art_patch.rewards.combine import RULER, Combination, Criterion, judged_G, newest, satisfaction_G
from art_patch.trajectories import chosen_choice, main_call, transcript
from art_patch.types import COPIES, JSON, Group, Trajectory

# Siblings whose accuracy is at most this far below the best sibling's got equally far.
COMPARABLE = 0.1
# Below this accuracy a sibling has not solved the task, and saved effort is no merit.
REACHED = 0.5

_ENTRY = re.compile(r"(?P<name>[\w.-]+)=(?P<weight>\d+(?:\.\d*)?|\.\d+)(@(?P<rule>[\w.]+:[\w.]+))?")


def accuracy_G(group: Group) -> tuple[float | None, ...]:
    """Return each sibling's score of the check `accuracy` if it is in 0..1, else the judge's in this group."""
    checked = (newest(each, "accuracy", ("code",)) for each in group.trajectories)
    both = zip(checked, judged_G(group), strict=True)
    return tuple(check if check is not None and 0 <= check <= 1 else judge for check, judge in both)


def efficiency_G(group: Group) -> tuple[float | None, ...]:
    """Return how little effort each sibling needed, compared with the sibling that needed least.

    Three efforts are measured: tokens written by the model, calls, and tool calls. The value is the mean of `(least +
    1) / (own + 1)` over the three, so twice the least effort gives about 0.5. Tokens are left out if a server did not
    count them.

    Only siblings that did the task about equally well are compared: accuracy at least 0.5, and at most 0.1 below the
    best. The other siblings get 0, because a short wrong answer must not win. If no sibling reaches 0.5, all values are
    `None`.
    """
    accuracy = accuracy_G(group)
    best = max((value for value in accuracy if value is not None), default=0.0)
    if best < REACHED:
        return (None,) * len(accuracy)
    bar = max(REACHED, best - COMPARABLE) - 1e-9
    compared = [value is not None and value >= bar for value in accuracy]
    efforts = list(map(_efforts, group.trajectories))
    # Index 0 are the tokens. Prompt tokens are not counted: the number of calls stands for them.
    if not all(own[0] for own in compress(efforts, compared)):
        efforts = [own[1:] for own in efforts]
    least = [min(column) for column in zip(*compress(efforts, compared), strict=True)]
    saved = (fmean((low + 1) / (mine + 1) for low, mine in zip(least, own, strict=True)) for own in efforts)
    return tuple(
        None if value is None else effort if is_compared else 0.0
        for value, effort, is_compared in zip(accuracy, saved, compared, strict=True)
    )


def _efforts(trajectory: Trajectory) -> tuple[int, ...]:
    tools = 0
    for position, call in enumerate(trajectory.calls):
        used = chosen_choice(call, trajectory.calls[position + 1 :])
        tools += 0 if used is None else len(used.message.get("tool_calls") or ())
    return sum(call.completion_tokens for call in trajectory.calls), len(trajectory.calls), tools


def completeness_G(group: Group) -> tuple[float | None, ...]:
    """Return for each sibling whether its run was finished properly, from 0 to 1.

    The value is 0 if the run has no final answer, or its `trajectory()` block ended with an exception. Otherwise it is
    1, halved for each of these faults: the final answer was cut off (`finish_reason` is not `stop`); a call failed or
    was cancelled; a tool call has no result.

    If the sibling is only a single turn or a part of a run (`types.COPIES`), a final answer that calls a tool is no
    fault. A copy of a run from one of its turns on (`branch`) ends as the run did, so there it is one.
    """
    return tuple(map(_completeness, group.trajectories))


_PARTS = tuple(origin for origin in COPIES if origin != "branch")


def _completeness(trajectory: Trajectory) -> float:
    call = main_call(trajectory)
    if call is None or not call.choices or trajectory.info.error is not None:
        return 0.0
    *before, last = transcript(trajectory)
    goes_on = trajectory.info.origin in _PARTS and bool(last.get("tool_calls"))
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


DEFAULT_CRITERIA = (
    # Required, because a run that does nothing gets all the others for free.
    Criterion("accuracy", 0.4, accuracy_G, required=True, version="1"),
    Criterion("efficiency", 0.3, efficiency_G, version="1"),
    Criterion("completeness", 0.2, completeness_G, version="1"),
    Criterion("satisfaction", 0.1, satisfaction_G, version="1"),
)


def load_criteria(text: str | None) -> tuple[Criterion, ...]:
    """Return the default criteria, changed by a setting such as `accuracy=1,brevity=0.2@my_rules:brevity`.

    This example gives `accuracy` the weight 1 and adds a criterion that the function `brevity` in `my_rules` computes.
    A weight of 0 removes a criterion. Raises `ConfigError` if no criterion is left, or an entry cannot be parsed.
    """
    known = {criterion.name: criterion for criterion in DEFAULT_CRITERIA}
    for entry in filter(None, map(str.strip, (text or "").split(","))):
        match = _ENTRY.fullmatch(entry)
        if match is None or not math.isfinite(weight := float(match["weight"])):
            raise ConfigError(
                f"criterion {entry!r} cannot be read; write name=weight or name=weight@module:function, "
                "several separated by commas"
            )
        name = match["name"]
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
    """Return each sibling's weighted mean of the criteria, from 0 to 1, or `None` if it has no reward.

    A sibling has no reward if a required criterion has no value for it, or if no criterion has. A missing value of
    another criterion neither raises nor lowers the mean: its weight goes to the other criteria in proportion.
    """

    def mean(values: Sequence[float | None]) -> float | None:
        both = list(zip(criteria, values, strict=True))
        if any(one.required and one.weight > 0 and value is None for one, value in both):
            return None
        present = [(one.weight, value) for one, value in both if value is not None]
        whole = sum(weight for weight, _ in present)
        return sum(weight * value for weight, value in present) / whole if whole > 0 else None

    return tuple(map(mean, zip(*(criterion.values_G(group) for criterion in criteria), strict=True)))


def load_combination(name: str = "ruler", *, criteria: str | None = None) -> Combination:
    """Return the combination that the settings `reward` and `criteria` name; `ConfigError` if they are malformed."""
    if name == "ruler":
        return RULER
    if name == "criteria":
        chosen = load_criteria(criteria)
        weights = repr([(one.name, one.weight, one.version) for one in chosen])
        version = hashlib.sha256(weights.encode()).hexdigest()[:12]
        return Combination("criteria", lambda group: weighted_G(group, chosen), chosen, version)
    if ":" not in name:
        raise ConfigError(f"reward {name!r} is not ruler, criteria or module:function (ART_PATCH_REWARD)")
    rule = load_function(name, what="reward")
    return Combination(name, rule, version=version_of(rule))
