"""Code checks: the user's own functions that score one trajectory. Cycle and gate run them in addition to the judge.

A check takes a `Trajectory` (`info`, `calls` with messages and answers, `scores` so far) and returns one of these:

- a number or a boolean: it becomes the score, which is named like the function;
- a dict of such values: each key becomes the name of a score;
- `None`, or a dict with the value `None`: the check gives no score, or no score of that name.

A score must lie in 0..1, or in the range that the function declares as an attribute: `my_check.range = (-1, 1)`.

If a check raises, exceeds its time limit or returns anything else, the trajectory gets no score from it, and never a
zero: training would learn from it. Failures are counted by check and reason. A score's id is derived from trajectory,
check and a hash of the function's source. So a check that runs again replaces its scores, and a check whose code was
changed adds new scores, which count as the newest.
"""

import hashlib
import importlib
import inspect
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any, NamedTuple, cast

from art_patch._lib.ids import derived_id
from art_patch.errors import ConfigError
from art_patch.types import Score, Trajectory

SOURCE = "code"

# A check that hangs this often is not run again: Python cannot end a thread, so each hang costs one.
_GIVE_UP_AFTER = 3

Returned = float | bool | None | Mapping[str, float | bool | None]


@dataclass(frozen=True, slots=True)
class Check:
    """A user's function that scores a trajectory, with its name, its version and the range of its scores."""

    name: str  # of the function, and of its score unless it returns a dict
    function: Callable[[Trajectory], Returned]
    version: str  # hash of its source (`version_of`)
    lowest: float = 0.0  # no score is outside of lowest..highest
    highest: float = 1.0


class Checked(NamedTuple):
    """The result of `run_checks`."""

    scores: tuple[Score, ...]
    failures: dict[str, int]  # `check: reason` -> how often


class _Refused(Exception):
    """The reason why there is no score, in words that can be counted."""


class _Hung(_Refused):
    """The check took longer than it may."""


def load_checks(specs: Iterable[str]) -> tuple[Check, ...]:
    """Import the checks that a setting names as `module:function`; `ConfigError` if two have the same name."""
    checks = tuple(make_check(load_function(spec, what="check")) for spec in specs)
    for name, count in Counter(check.name for check in checks).items():
        if count > 1:
            raise ConfigError(f"two checks are named {name!r}, so their scores could not be told apart; rename one")
    return checks


def make_check(function: Callable[[Trajectory], Returned]) -> Check:
    """Return a function as a `Check`; `ConfigError` if its attribute `range` is not two numbers, the lower first."""
    name = getattr(function, "__name__", type(function).__name__)
    given: Any = getattr(function, "range", (0.0, 1.0))
    try:
        lowest, highest = (float(bound) for bound in given)
    except (TypeError, ValueError):
        lowest, highest = math.nan, math.nan
    if not lowest < highest:
        raise ConfigError(f"the range of check {name!r} is two numbers, the lower first, not {given!r}")
    return Check(name, function, version_of(function), lowest, highest)


def load_function(spec: str, *, what: str) -> Callable[..., Any]:
    """Import the function, such as a `check` (`what`), that a setting names as `module:function`, or `ConfigError`."""
    module_name, colon, path = spec.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"{what} {spec!r} names no function; write module:function")
    # The working directory is importable, as for `python -m`.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does while it is imported
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        why = f"there is no module {module_name!r}" if missing else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{what} {spec!r} cannot be imported ({why}); run the job where {module_name!r} can be, or set PYTHONPATH"
        ) from error
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise ConfigError(f"{what} {spec!r}: {module_name!r} has no function {path!r}; is it spelt right?")
    return cast("Callable[..., Any]", found)


def version_of(function: Callable[..., Any]) -> str:
    """Return 12 hex digits of the sha256 of a function's source, or of its name if there is no source."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', repr(type(function)))}"
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]


def run_checks(
    trajectories: Iterable[Trajectory], checks: Sequence[Check], *, timeout_s: float = 30.0, now: float | None = None
) -> Checked:
    """Run every check on every trajectory, each time for at most `timeout_s`; `now` is the time of the scores."""
    at = time.time() if now is None else now
    scores: list[Score] = []
    failures: Counter[str] = Counter()
    hung: Counter[str] = Counter()
    for trajectory in trajectories:
        for check in checks:
            if hung[check.name] >= _GIVE_UP_AFTER:
                failures[f"{check.name}: not run, it had hung {_GIVE_UP_AFTER} times"] += 1
                continue
            try:
                returned = _call(check, trajectory, timeout_s)
            except _Refused as reason:
                failures[f"{check.name}: {reason}"] += 1
                hung[check.name] += isinstance(reason, _Hung)
                continue
            for name, value in returned.items():
                if value is None:
                    continue
                try:
                    number = _number(check, value)
                except _Refused as reason:
                    failures[f"{check.name}: {reason}"] += 1
                    continue
                key = derived_id(SOURCE, trajectory.id, check.name, check.version, name)
                scores.append(Score(key, trajectory.id, name, number, SOURCE, at, rubric=check.version))
    return Checked(tuple(scores), dict(failures))


def _call(check: Check, trajectory: Trajectory, timeout_s: float) -> dict[str, Any]:
    """Return the check's answer, by the name of the score."""
    returned, failed = list[Any](), list[Exception]()

    def work() -> None:
        try:
            returned.append(check.function(trajectory))
        except Exception as error:  # the user's function
            failed.append(error)

    # A daemon thread, so that a check that hangs does not keep the job from ending.
    thread = Thread(target=work, name=f"art-patch-check-{check.name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        raise _Refused(f"raised {type(failed[0]).__name__}") from failed[0]
    if not returned:
        raise _Hung(f"took longer than {timeout_s:g} s") if thread.is_alive() else _Refused("ended its thread")
    answer = returned[0]
    if not isinstance(answer, Mapping):
        return {check.name: answer}
    given = dict(cast("Mapping[Any, Any]", answer))
    if not all(isinstance(name, str) and name for name in given):
        raise _Refused("returned a dict with a key that is no name")
    return given


def _number(check: Check, value: Any) -> float:
    if hasattr(value, "item") and not isinstance(value, int | float):
        value = value.item()  # numpy's and torch's numbers
    if not isinstance(value, int | float):
        raise _Refused(f"returned {type(value).__name__} instead of a number")
    if not math.isfinite(value):
        raise _Refused(f"returned {float(value)}")
    if not check.lowest <= value <= check.highest:
        raise _Refused(f"returned a number that is not in {check.lowest:g}..{check.highest:g}")
    return float(value)
