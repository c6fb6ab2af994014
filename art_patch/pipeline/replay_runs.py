"""Repeats whole runs with the app's own `replayable` functions, in separate processes that load the app's code.

`replay` makes siblings for runs that have none: the champion answers, and the app's process records as always. `rerun`
lets candidate and champion each repeat held-out scenarios for the gate. There each policy has a scratch store of its
own, in which it is the champion, because a process sends its calls to the policy that its store names; the real app
uses the project's store. Only the gate reads scratch stores, and they are deleted when it ends, or by the next cycle.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from art_patch import gate, grouping
from art_patch._lib.ids import MOST_REPLAYS, new_id, replay_id
from art_patch.pipeline.carry_over import GATE_RUNS
from art_patch.pipeline.cycle_run import Cycle
from art_patch.replay import AppProcesses, RunLost, question_of
from art_patch.store import Store, open_store
from art_patch.types import JSON, REPLAY, REPLAY_FROM, REPLAY_OF, Group, Policy, Trajectory, TrajectoryInfo

_Outcome = Literal["ended", "raised", "lost", "other way"]

_DEADLINES = ("timeout_s", "first_token_timeout_s", "connect_timeout_s")
"""Settings of the app after which it sends a call upstream."""


def replay(run: Cycle, found: grouping.Grouping) -> tuple[str, ...]:
    """Repeat the runs without siblings that the step `group` found; return the ids of the new, complete trajectories.

    If the user's function raises an exception, the run has ended normally: the trajectory records the exception and
    becomes a sibling. Other failures, such as a crash of the process, lose one run, and the cycle goes on.

    Runs that began at a turn are put into groups here, each with what followed this turn in the recorded run. The ids
    of these recorded runs are returned, too: they have siblings now, also if their repetitions are of an earlier cycle.
    """
    config = run.config.replay
    if config is None:
        return ()
    lonely = [*found.waiting, *found.others]
    metrics: dict[str, Any] = {"runs": len(lonely)}
    run.metrics["replay"] = metrics
    mode = run.store.ledger.route().mode
    if mode not in (None, "route"):
        # The mode in the store overrules the mode of app processes: upstream would answer and be paid for nothing.
        metrics["left"] = {f"the mode is {mode}, not route": len(lonely)}
        return ()
    # A replay has an id made from the original's id, so a run that was ever begun is found and never begun again. The
    # same ids let an erasure, or retention, delete the replays together with the original.
    ids = [replay_id(one.id, n) for one in lonely if grouping.offer_of(one) for n in range(1, MOST_REPLAYS + 1)]
    made = run.store.read.known(ids)
    corrected = run.store.evidence.corrected_calls([one.id for one in lonely])
    replays, left = grouping.choose_replays(
        lonely, config, keys=found.keys, was_made=lambda of, n: replay_id(of, n) in made, corrected=corrected
    )
    run.progress("replay", 0, len(replays))
    work = _Replays(run.store, config, left)
    counts: Counter[_Outcome] = Counter()
    ended: list[str] = []
    with ThreadPoolExecutor(config.concurrency, thread_name_prefix="art-patch-replay") as pool:
        # Sorted by function: an app process can run one function only.
        asked = {pool.submit(work.do, one): one for one in sorted(replays, key=lambda one: (one.target, one.redacted))}
        try:
            for done, future in enumerate(as_completed(asked), 1):
                outcome = future.result()
                if outcome is not None:
                    counts[outcome] += 1
                    if outcome in ("ended", "raised"):
                        ended.append(replay_id(asked[future].original.id, asked[future].number))
                run.progress("replay", done, len(replays), f"{len(ended)} runs")
        except BaseException:
            # Kills running processes too. Otherwise the pool would wait for the user's functions to end.
            work.processes.stop()
            raise
        finally:
            work.processes.end()
    metrics |= {"replayed": len(ended), "raised": counts["raised"], "lost": counts["lost"], "left": left}
    if config.begin != "start":
        branched = _keep_branches(run, lonely, found.keys, ids)
        metrics |= {"other_way": counts["other way"], "groups": len(branched)}
        ended += branched
    return tuple(ended)


def _keep_branches(
    run: Cycle, lonely: Sequence[Trajectory], keys: Mapping[str, str], replays: Sequence[str]
) -> list[str]:
    """Group each of these runs with those `replays` that began at one of its turns; return the ids of the runs.

    `replays` are the ids that replays of the runs have, of this cycle or one before.
    """
    repeated: dict[str | None, list[Trajectory]] = defaultdict(list)
    for again in run.store.read.ungrouped(settled_before=-math.inf, ended=replays):
        # A file of runs may have brought one of these ids, but says nothing of what it repeats.
        repeated[again.info.metadata.get(REPLAY_OF)].append(again)
    branched: list[str] = []
    for one in lonely:
        key = keys[one.id]
        group = grouping.branch_group(one, repeated[one.id], scenario_key=key, new_id=new_id)
        if group is not None:
            # The run itself goes into a group of its own, so that no later step or cycle makes siblings for it. First,
            # because a cycle that is killed in between must not leave it to be trained on a second time.
            run.store.ledger.add_groups([Group(new_id(), key, "single", (one,))], state="branched", now=run.now)
            copy = group.trajectories[0]
            run.store.write([copy.info, *copy.calls, *copy.scores])
            run.store.ledger.add_groups([group], now=run.now)
            branched.append(one.id)
    return branched


def _replay_info(one: grouping.Replay, at: float) -> TrajectoryInfo:
    """Return the record of a replay: the original's user, session, task and metadata under a new id."""
    source = one.original.info
    # The user's checks may look into the metadata for the right answer, so all but the offer of a replay stays.
    metadata = {name: value for name, value in source.metadata.items() if name != REPLAY}
    return replace(
        source,
        id=replay_id(source.id, one.number),
        started_at=at,
        origin="explicit",
        ended_at=None,
        tags=(*(tag for tag in source.tags if tag != grouping.REPLAYED), grouping.REPLAYED),
        metadata={**metadata, REPLAY_OF: source.id, **({} if one.turn is None else {REPLAY_FROM: one.turn.id})},
        error=None,
    )


class _Replays:
    """Repeats the runs of one cycle; its method `do` is called by several threads."""

    def __init__(self, store: Store, config: grouping.ReplayConfig, left: dict[str, int]) -> None:
        self._store = store
        self._left = left
        self._lock = Lock()  # the store allows one thread at a time
        self.processes = AppProcesses(config)

    def do(self, one: grouping.Replay) -> _Outcome | None:
        """Repeat a run; `None` if it was not begun."""
        try:
            process = self.processes.take(one.target, redacted=one.redacted)
        except RunLost as error:
            self._leave(f"{one.target}: {error}")
            return None
        info = _replay_info(one, time.time())
        with self._lock:
            if known := self._store.read.known([one.original.id]):
                # Before the run begins: whatever happens to it, it is not begun a second time.
                self._store.write([info])
        if not known:
            self.processes.give_back(process)
            self._leave("erased meanwhile")
            return None
        try:
            answer = self.processes.ask(process, question_of(one, info))
        except RunLost as error:
            with self._lock:
                self._store.write([replace(info, error=f"it was run again: {error}")])
            return "lost"
        if not answer["written"]:
            return "lost"
        if not answer["came_there"]:
            with self._lock:
                self._store.write([replace(info, error="it was run again: it came to no such turn")])
            return "other way"
        return "raised" if answer["raised"] else "ended"

    def _leave(self, reason: str) -> None:
        with self._lock:
            self._left[reason] = self._left.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class Reruns:
    """What both policies repeated; `lost` has a recorded turn of each scenario whose repetitions were not completed."""

    repeated: tuple[gate.Repeated, ...] = ()  # of these, both policies completed all repetitions
    lost: tuple[gate.Turn, ...] = ()
    erased: frozenset[str] = frozenset()  # scenarios whose recorded run was erased during the gate
    metrics: JSON | None = None  # for the ledger; `None` if replays are switched off

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the scenarios whose single turns the gate must not use: they were repeated, lost or erased."""
        return self.erased.union(turn.scenario_key for turn in (*(one.turn for one in self.repeated), *self.lost))


def rerun(run: Cycle, held_out: gate.HeldOut, candidate: Policy, champion: Policy) -> Reruns:
    """Let candidate and champion, which the engine serves, repeat as many held-out scenarios as `max_runs` allows."""
    config, samples = run.config.replay, run.config.gate.run_samples
    if config is None:
        return Reruns()
    chosen, left = grouping.choose_comparisons(held_out.runs, config, samples=samples)
    if not chosen:
        return Reruns(metrics={"scenarios": 0, "left": left})
    with (
        _scratch(run.adapters.parent) as directory,
        _Side.opened(run, config, candidate, directory / "candidate.db") as ours,
        _Side.opened(run, config, champion, directory / "champion.db") as theirs,
    ):
        made = _make(run, config.concurrency, chosen, (ours, theirs), samples)
    return _sorted(run, held_out, chosen, made, left)


def _sorted(
    run: Cycle, held_out: gate.HeldOut, chosen: _Chosen, made: Mapping[str, _Both], left: Mapping[str, int]
) -> Reruns:
    # Looked up again after the runs: a user may have been erased while they went on.
    known = run.store.read.known([one.original.id for one in chosen.values()])
    turn_of = {turn.scenario_key: turn for turn in reversed(held_out.turns)}
    repeated: list[gate.Repeated] = []
    lost: list[gate.Turn] = []
    erased: set[str] = set()
    why_left, why_lost = Counter(left), Counter[str]()
    for key, one in chosen.items():
        both = made[key]
        every = [each for side in both for each in side]
        whole = [tuple(each.run for each in side if each.run is not None) for side in both]
        if one.original.id not in known:
            erased.add(key)
            why_left["erased meanwhile"] += 1
        elif not any(each.begun for each in every):
            # No policy is to blame for a function that cannot be loaded: the scenario's turns are asked instead.
            why_left[every[0].why] += 1
        elif sum(map(len, whole)) == len(every):
            repeated.append(gate.Repeated(turn_of[key], whole[0], whole[1]))
        else:
            # One lost run loses the scenario, whichever policy it was. Too many lost scenarios reject the candidate, so
            # a candidate gains nothing from runs that do not end.
            lost.append(turn_of[key])
            for who, side in zip(("candidate", "champion"), both, strict=True):
                why_lost.update(f"{who}: {each.why}" for each in side if each.run is None)
    metrics = {
        "scenarios": len(repeated),
        "runs": sum(len(one.runs) for one in repeated),
        "lost_scenarios": len(lost),
        "lost": dict(why_lost),
        "left": dict(why_left),
    }
    return Reruns(tuple(repeated), tuple(lost), frozenset(erased), metrics)


class _Made(NamedTuple):
    """One repeated run: the trajectory, or the reason why there is none, and whether it was begun."""

    run: Trajectory | None
    why: str = ""
    begun: bool = True


_Both = tuple[list[_Made], list[_Made]]
_Chosen: TypeAlias = "Mapping[str, grouping.Replay]"


def _make(run: Cycle, concurrency: int, chosen: _Chosen, sides: tuple[_Side, _Side], samples: int) -> dict[str, _Both]:
    """Return `samples` runs of each scenario by candidate and champion."""
    lock = Lock()

    def make(one: grouping.Replay, side: _Side) -> _Made:
        with lock:
            erased = not run.store.read.known([one.original.id])
        return _Made(None, "erased meanwhile", begun=False) if erased else side.make(one, lock)

    # Sorted by function, as in `replay`. Which policy is first alternates, because the second finds warm caches.
    keys = sorted(chosen, key=lambda key: (chosen[key].target, chosen[key].redacted))
    order = [
        (key, which)
        for place, key in enumerate(keys)
        for n in range(samples)
        for which in ((0, 1) if (place + n) % 2 == 0 else (1, 0))
    ]
    made: dict[str, _Both] = {key: ([], []) for key in keys}
    with ThreadPoolExecutor(concurrency, thread_name_prefix="art-patch-gate") as pool:
        asked = {pool.submit(make, chosen[key], sides[which]): (key, which) for key, which in order}
        try:
            for done, future in enumerate(as_completed(asked), 1):
                key, which = asked[future]
                made[key][which].append(future.result())
                run.progress("gate: runs", done, len(order))
        except BaseException:
            for side in sides:
                side.processes.stop()
            raise
    return made


@dataclass(frozen=True, slots=True)
class _Side:
    """One policy with its scratch store, and the app processes whose calls it answers."""

    store: Store
    policy: Policy
    processes: AppProcesses

    @classmethod
    @contextmanager
    def opened(cls, run: Cycle, config: grouping.ReplayConfig, policy: Policy, path: Path) -> Generator[Self]:
        """Open a scratch store in which the policy is champion, served by the project's engine."""
        url, route = f"sqlite:///{path}", run.store.ledger.route()
        store = open_store(url)
        # As a base: the ledger makes the first base of a store its champion, and apps call a champion only.
        store.ledger.add_base(policy.name, policy.base, policy.base_sha256, who=run.who)
        store.ledger.set_engine(route.base_url, key_file=route.key_file, who=run.who)
        # The app's own deadlines protect its users. Here they would only send calls of a busy machine upstream, and a
        # run with an answer of upstream is lost.
        patience = dict.fromkeys(_DEADLINES, f"{config.timeout_s:g}")
        processes = AppProcesses(replace(config, environment={**config.environment, **patience, "store": url}))
        try:
            yield cls(store, policy, processes)
        finally:
            processes.end()
            store.close()

    def make(self, one: grouping.Replay, lock: Lock) -> _Made:
        """Repeat a run once."""
        try:
            process = self.processes.take(one.target, redacted=one.redacted)
        except RunLost as error:
            return _Made(None, f"{one.target}: {error}", begun=False)
        # A new id, because both policies repeat the same run, several times.
        info = replace(_replay_info(one, time.time()), id=new_id())
        try:
            answer = self.processes.ask(process, question_of(one, info))
        except RunLost as error:
            return _Made(None, str(error))
        with lock:
            found = self.store.read.trajectories([info.id]) if answer["written"] else ()
        if not found:
            return _Made(None, "nothing of it was recorded")
        if not gate.speaks_of(found[0], self.policy.name):
            return _Made(None, "upstream answered in its place")
        return _Made(found[0])


@contextmanager
def _scratch(project: Path) -> Generator[Path]:
    """Give an empty directory for the gate's stores; delete it when the block ends."""
    directory = (project / GATE_RUNS).absolute()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
