"""Statistics of an agent's runs: how many succeeded, calls per run, the tools that they used, and their errors. Pure.

A run succeeded if nothing in it failed and its reward is at least `success_at`. A run that failed did not succeed,
whatever its reward. A run that neither failed nor has a reward is left out of the success rate.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from art_patch.trackers import Episode

MOST_ERRORS = 20  # number of error patterns that are returned

_LONGEST = 160  # characters of a pattern
# Quoted words; words of 8 or more characters with at least 3 digits, such as ids; numbers.
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|(?<![\w-])(?=(?:[\w-]*\d){3})[\w-]{8,}|\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Statistics of some runs. A rate or a mean is `None` if there are no runs to compute it from."""

    runs: int = 0
    judged: int = 0  # runs with a reward
    failed: int = 0  # runs in which the `trajectory()` block or a call failed
    succeeded: int = 0  # runs without a failure and with a reward of `success_at` or more
    success_rate: float | None = None  # `succeeded` as a share of the runs that failed or were judged
    mean_reward: float | None = None  # of the judged runs
    mean_steps: float | None = None  # model calls in a run


@dataclass(frozen=True, slots=True)
class Action:
    """A tool that the agent called."""

    name: str
    times: int  # calls in all runs
    runs: int  # runs with at least one call
    share: float  # `times` as a share of all tool calls, from 0 to 1


@dataclass(frozen=True, slots=True)
class ErrorPattern:
    """Errors that differ only in numbers, ids and quoted words, so they probably have one cause."""

    pattern: str  # the first line of the error, with `#` for each varying part
    times: int
    runs: int  # runs that had such an error
    example: str  # id of the newest such run


@dataclass(frozen=True, slots=True)
class Analytics:
    """All statistics of an agent's runs. Tools and errors are sorted, the most frequent first."""

    overall: Outcomes
    # Of the runs in which one policy, or `upstream`, answered all calls.
    by_policy: dict[str, Outcomes] = field(default_factory=dict[str, Outcomes])
    actions: tuple[Action, ...] = ()
    errors: tuple[ErrorPattern, ...] = ()  # at most `MOST_ERRORS`


@dataclass(frozen=True, slots=True)
class _RunOutcome:
    """The few facts that are kept of a run while all runs are read. A run itself may be megabytes."""

    policies: frozenset[str]
    reward: float | None
    failed: bool
    steps: int


def analyse(episodes: Iterable[Episode], *, success_at: float) -> Analytics:
    """Return the statistics of an agent's runs, given newest first; `success_at` is the least reward of a success."""
    seen: list[_RunOutcome] = []
    actions, action_runs = Counter[str](), Counter[str]()
    errors, error_runs = Counter[str](), Counter[str]()
    examples: dict[str, str] = {}
    for episode in episodes:
        calls = episode.trajectory.calls
        policies = frozenset(call.policy or "upstream" for call in calls)
        seen.append(_RunOutcome(policies, episode.reward, episode.failed, len(calls)))
        # Twice: `times` counts each error, `runs` each run once, however often the error came in it.
        asked, failures = episode.actions, Counter(map(pattern_of, _errors(episode)))
        actions.update(asked)
        action_runs.update(asked.keys())
        errors.update(failures)
        error_runs.update(failures.keys())
        for pattern in failures:
            # Episodes come newest first, so the first example stays.
            examples.setdefault(pattern, episode.trajectory.id)
    alone: dict[str, list[_RunOutcome]] = defaultdict(list)
    for one in seen:
        if len(one.policies) == 1:
            alone[next(iter(one.policies))].append(one)
    total = actions.total()
    return Analytics(
        _outcomes(seen, success_at),
        {policy: _outcomes(some, success_at) for policy, some in sorted(alone.items())},
        tuple(Action(name, times, action_runs[name], times / total) for name, times in _ranked(actions)),
        tuple(
            ErrorPattern(pattern, times, error_runs[pattern], examples[pattern])
            for pattern, times in _ranked(errors)[:MOST_ERRORS]
        ),
    )


def pattern_of(error: str) -> str:
    """Return an error's first line, with `#` for quoted words, ids and numbers: `KeyError: 'plum'` is `KeyError: #`."""
    # The first line alone: the others are a traceback, which differs with every change of the code.
    line = next(iter(error.strip().splitlines()), "")
    return _VARYING.sub("#", line)[:_LONGEST]


def _errors(episode: Episode) -> Iterable[str]:
    trajectory = episode.trajectory
    told = (trajectory.info.error, *(s.error for s in trajectory.spans), *(c.error for c in trajectory.calls))
    return filter(None, told)


def _outcomes(seen: Sequence[_RunOutcome], success_at: float) -> Outcomes:
    rewards = [one.reward for one in seen if one.reward is not None]
    failed = sum(one.failed for one in seen)
    succeeded = sum(not one.failed and one.reward is not None and one.reward >= success_at for one in seen)
    # A failed run counts as known: without it, an agent that always fails would have no success rate.
    known = sum(one.failed or one.reward is not None for one in seen)
    return Outcomes(
        runs=len(seen),
        judged=len(rewards),
        failed=failed,
        succeeded=succeeded,
        success_rate=succeeded / known if known else None,
        mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
        mean_steps=sum(one.steps for one in seen) / len(seen) if seen else None,
    )


def _ranked(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda one: (-one[1], one[0]))
