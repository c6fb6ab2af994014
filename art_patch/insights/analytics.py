"""What came of an agent's runs: how many succeeded, what they took, which tools they asked for, how they failed. Pure.

A run succeeded if nothing in it failed and its reward is at least `success_at`. One that failed did not, whatever its
reward. One that neither failed nor was judged is unknown, and in no rate.

Errors are counted by their pattern: numbers, ids and quoted words are taken out, so that one cause is one line.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from art_patch.trackers import Episode

MOST_ERRORS = 20
"""How many patterns are told of, most frequent first."""

_LONGEST = 160
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|(?<![\w-])(?=(?:[\w-]*\d){3})[\w-]{8,}|\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What came of some runs; a rate or mean of nothing is `None`.

    Attributes:
        runs: how many.
        judged: that have a reward.
        failed: in which the block or a call failed.
        succeeded: see above.
        success_rate: of those that failed or were judged.
        mean_reward: of those that were judged.
        mean_steps: calls of the model a run.
    """

    runs: int = 0
    judged: int = 0
    failed: int = 0
    succeeded: int = 0
    success_rate: float | None = None
    mean_reward: float | None = None
    mean_steps: float | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """A tool that the agent asked for.

    Attributes:
        name: of the tool.
        times: it was asked for.
        runs: in which it was.
        share: of all that was asked for.
    """

    name: str
    times: int
    runs: int
    share: float


@dataclass(frozen=True, slots=True)
class ErrorPattern:
    """Errors that are one but for what varies.

    Attributes:
        pattern: the error, what varies taken out.
        times: it came.
        runs: in which it did.
        example: the newest of them that was looked at.
    """

    pattern: str
    times: int
    runs: int
    example: str


@dataclass(frozen=True, slots=True)
class Analytics:
    """All of it.

    Attributes:
        overall: of all runs.
        by_policy: of the runs that one policy, or `upstream`, answered alone.
        actions: most frequent first.
        errors: likewise, `MOST_ERRORS` at most.
    """

    overall: Outcomes
    by_policy: dict[str, Outcomes] = field(default_factory=dict[str, Outcomes])
    actions: tuple[Action, ...] = ()
    errors: tuple[ErrorPattern, ...] = ()


@dataclass(frozen=True, slots=True)
class _RunOutcome:
    """What is kept of a run."""

    policies: frozenset[str]
    reward: float | None
    failed: bool
    steps: int


def analyse(episodes: Iterable[Episode], *, success_at: float) -> Analytics:
    """Return what came of these runs. They are looked at one by one and not kept.

    Args:
        episodes: newest first.
        success_at: reward from which on a run succeeded.
    """
    seen: list[_RunOutcome] = []
    actions, action_runs = Counter[str](), Counter[str]()
    errors, error_runs = Counter[str](), Counter[str]()
    examples: dict[str, str] = {}
    for episode in episodes:
        calls = episode.trajectory.calls
        policies = frozenset(call.policy or "upstream" for call in calls)
        seen.append(_RunOutcome(policies, episode.reward, episode.failed, len(calls)))
        asked, failures = episode.actions, Counter(map(pattern_of, _errors(episode)))
        actions.update(asked)
        action_runs.update(asked.keys())
        errors.update(failures)
        error_runs.update(failures.keys())
        for pattern in failures:
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
    """Return an error without what varies: `KeyError: 'plum'` becomes `KeyError: #`."""
    line = next(iter(error.strip().splitlines()), "")
    return _VARYING.sub("#", line)[:_LONGEST]


def _errors(episode: Episode) -> Iterator[str]:
    trajectory = episode.trajectory
    told = (trajectory.info.error, *(s.error for s in trajectory.spans), *(c.error for c in trajectory.calls))
    yield from (error for error in told if error)


def _outcomes(seen: Sequence[_RunOutcome], success_at: float) -> Outcomes:
    rewards = [one.reward for one in seen if one.reward is not None]
    failed = sum(one.failed for one in seen)
    succeeded = sum(not one.failed and one.reward is not None and one.reward >= success_at for one in seen)
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
