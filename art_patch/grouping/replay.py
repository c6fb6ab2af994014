"""Siblings for a run that has none: the app's own function, called again with the same arguments. Pure.

Where `resample` answers one turn again, this repeats the whole run, tools included. So only runs are taken of which
the app's authors said, by `replayable`, that they may happen twice, and each is repeated a few times in its life.
Held-out ones make no siblings: each gate repeats them with both policies that it compares.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from art_patch.types import COPIES, REPLAY, Trajectory, TrajectoryInfo

REPLAYED = "replayed"
"""Tag of a re-run. Its metadata names the original in `replay_of`, and is not offered to be repeated itself."""


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """How runs are repeated.

    Attributes:
        samples: how often a run is repeated, at most 15, if its task has no other runs; those that it has are counted
            off. A run that cannot be learned from itself is repeated once more.
        max_runs: in one cycle; the budget. The gate has another of the same size.
        timeout_s: how long one may take, and the import of its module.
        concurrency: processes at once.
        python: interpreter of the app's environment; the job's own unless given.
        environment: settings by their names (`project`, `home`, `store`) that the app processes get beside the job's
            own environment. A store may hold a password, so they are not shown.
    """

    samples: int = 3
    max_runs: int = 100
    timeout_s: float = 300.0
    concurrency: int = 2
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


@dataclass(frozen=True, slots=True)
class Replay:
    """A run that is to be repeated, for the time `number` in its life, which begins with 1; 0 is for a comparison.

    `redacted`: what it recorded was, so what its re-run records has to be, too.
    """

    original: Trajectory
    number: int
    target: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    redacted: bool = False


def choose_replays(
    lonely: Sequence[Trajectory],
    config: ReplayConfig,
    *,
    keys: Mapping[str, str],
    was_made: Callable[[str, int], bool],
) -> tuple[tuple[Replay, ...], dict[str, int]]:
    """Return what to repeat, tasks with the oldest runs first, and why the other runs are not, with how many.

    Args:
        lonely: runs without siblings, oldest first. None of a held-out scenario is among them: the gate needs its
            prompts only, so `form_groups(singles=True)` has put them into groups.
        config: how.
        keys: scenario key of each.
        was_made: whether an earlier cycle has repeated the run of this id for the time of this number.
    """
    tasks: dict[str, list[Trajectory]] = defaultdict(list)
    for run in lonely:
        tasks[keys[run.id]].append(run)
    left: Counter[str] = Counter()
    chosen: list[Replay] = []
    for runs in tasks.values():
        offers = {run.id: offer for run in runs if (offer := offer_of(run)) is not None}
        left["no function to run again"] += len(runs) - len(offers)
        missing = config.samples + 1 - sum(map(_can_be_learned_from, runs))
        # Number before run: each of the runs once, then each of them a second time.
        possible = [
            Replay(run, number, offer["target"], offer["args"], offer["kwargs"], bool(offer.get("redacted")))
            for number in range(1, config.samples + 2)
            for run in runs
            if (offer := offers.get(run.id)) is not None
            if number <= config.samples or not _can_be_learned_from(run)
            if not was_made(run.id, number)
        ]
        its = possible[: max(missing, 0)]
        if len(chosen) + len(its) > config.max_runs:  # part of a task would make no group
            left["beyond the budget of this cycle"] += len(offers)
        elif its:
            chosen += its
        else:
            left["run again already"] += len(offers)
    return tuple(chosen), dict(+left)


def choose_comparisons(
    runs: Mapping[str, Sequence[TrajectoryInfo]], config: ReplayConfig, *, samples: int
) -> tuple[dict[str, Replay], dict[str, int]]:
    """Return which run stands for each scenario, repeated by two policies, and why other scenarios have none.

    Args:
        runs: of each scenario, those to choose from, the best first.
        config: how; its budget is for both policies together.
        samples: how often each policy repeats each.
    """
    left: Counter[str] = Counter()
    chosen: dict[str, Replay] = {}
    for key, its in runs.items():
        own = (Trajectory(info, ()) for info in its if info.origin not in COPIES)
        found = next(((run, offer) for run in own if (offer := offer_of(run)) is not None), None)
        if found is None:
            left["no function to run again"] += 1
        elif 2 * samples * (len(chosen) + 1) > config.max_runs:
            left["beyond the budget of this cycle"] += 1
        else:
            run, offer = found
            redacted = bool(offer.get("redacted"))
            chosen[key] = Replay(run, 0, offer["target"], offer["args"], offer["kwargs"], redacted)
    return chosen, dict(left)


def offer_of(run: Trajectory) -> Mapping[str, Any] | None:
    """Return what the app noted of the call that the run is; `None` if it cannot be repeated."""
    offer: Any = run.info.metadata.get(REPLAY)
    if not isinstance(offer, Mapping) or "replay_of" in run.info.metadata:
        return None
    if run.info.origin == "imported":  # an importer of an earlier release kept what the file said
        return None
    kinds = {"target": str, "args": list, "kwargs": dict}
    return offer if all(isinstance(offer.get(name), kind) for name, kind in kinds.items()) else None


def _can_be_learned_from(run: Trajectory) -> bool:
    return any(call.untrainable is None for call in run.calls)
