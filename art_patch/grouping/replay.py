"""Chooses runs without siblings that the app repeats: its own function is called again with the same arguments. Pure.

A replay repeats the whole run, tools included, whereas `resample` answers one turn again. So only runs are repeated
whose function the app marked as `replayable`, and each of them only a few times in all. Held-out runs get no siblings;
instead, both policies repeat them in each gate run.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from art_patch._lib.option import Option
from art_patch.grouping.resample import can_be_learned_from
from art_patch.types import COPIES, REPLAY, Trajectory, TrajectoryInfo

# Tag of a repeated run. Its metadata names the original in `replay_of`, and a repeated run is never repeated itself.
REPLAYED = "replayed"


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Settings for repeating recorded runs by calling the app's own function again."""

    # Repetitions of a run whose task has no other runs, at most 15; other runs of the task are subtracted. A run that
    # cannot be trained on is repeated once more.
    samples: int = 3
    max_runs: Annotated[  # of one cycle; the gate has a second budget of this size
        int,
        Option(name="replay-max", least=1, env=True, help="Largest number of replays in this cycle, and in its gate."),
    ] = 100
    timeout_s: Annotated[  # also for the import of its module
        float, Option(name="replay-timeout-s", least=1.0, env=True, help="Seconds that one replay may take.")
    ] = 300.0
    concurrency: int = 2  # processes at once
    python: Annotated[
        str | None, Option(name="replay-python", env=True, help="Python interpreter of your app. Default: this one.")
    ] = None
    # Settings by name (`project`, `home`, `store`) that the app's processes get beside the job's environment. Not in
    # the repr, because a store's URL may hold a password.
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


@dataclass(frozen=True, slots=True)
class Replay:
    """One planned repetition of a recorded run, with the function to call and its arguments."""

    original: Trajectory
    number: int  # which repetition in the run's life it is, from 1; 0 for a comparison of two policies
    target: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    redacted: bool = False  # the recorded run was redacted, so the repetition must be, too


def choose_replays(
    lonely: Sequence[Trajectory], config: ReplayConfig, *, keys: Mapping[str, str], was_made: Callable[[str, int], bool]
) -> tuple[tuple[Replay, ...], dict[str, int]]:
    """Choose the runs to repeat, tasks with the oldest runs first; also return reason -> number of runs left out.

    Args:
        lonely: runs without siblings, oldest first. None is held out: `form_groups(singles=True)` groups those.
        keys: trajectory id -> scenario key.
        was_made: returns whether an earlier cycle made this repetition, given the run's id and the repetition's number.
    """
    tasks: dict[str, list[Trajectory]] = defaultdict(list)
    for run in lonely:
        tasks[keys[run.id]].append(run)
    left: Counter[str] = Counter()
    chosen: list[Replay] = []
    for runs in tasks.values():
        offers = {run.id: offer for run in runs if (offer := offer_of(run)) is not None}
        left["no function to run again"] += len(runs) - len(offers)
        missing = config.samples + 1 - sum(map(can_be_learned_from, runs))
        # Number before run: each of the runs once, then each of them a second time.
        possible = [
            _replay(run, number, offer)
            for number in range(1, config.samples + 2)
            for run in runs
            if (offer := offers.get(run.id)) is not None
            if number <= config.samples or not can_be_learned_from(run)
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
    """Choose one run of each scenario for both policies to repeat; also return reason -> number of scenarios left out.

    `runs` has the runs of each scenario key, best first. Each policy repeats each chosen run `samples` times;
    `config.max_runs` limits the repetitions of both policies together.
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
            chosen[key] = _replay(found[0], 0, found[1])
    return chosen, dict(left)


def _replay(run: Trajectory, number: int, offer: Mapping[str, Any]) -> Replay:
    return Replay(run, number, offer["target"], offer["args"], offer["kwargs"], bool(offer.get("redacted")))


def offer_of(run: Trajectory) -> Mapping[str, Any] | None:
    """Return the function and arguments that the app recorded for repeating a run; `None` if it cannot be repeated."""
    offer: Any = run.info.metadata.get(REPLAY)
    if not isinstance(offer, Mapping) or "replay_of" in run.info.metadata:
        return None
    if run.info.origin == "imported":  # an importer of an earlier release kept what the file said
        return None
    kinds = {"target": str, "args": list, "kwargs": dict}
    return offer if all(isinstance(offer.get(name), kind) for name, kind in kinds.items()) else None
