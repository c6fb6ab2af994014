"""Held-out scenarios -> whole runs of candidate and champion, made by the app's own processes.

Each policy has processes and a scratch store of its own, whose route names that policy: an app goes where its store
says, so nothing else can send one to a policy that is not published. What is recorded there is in no place where
grouping, the canary, `art-patch report`, idle cycles or retention look. It is deleted as soon as it was read; what a
killed cycle left, the next one deletes, or an erasure.

A scenario is compared if every run of both came to its end with that policy's own answers; an exception of the user's
function is an end. One that was lost, overdue or answered by upstream leaves its scenario without a score, whoever's it
was: too many of those reject, so a candidate gains nothing by runs that do not end. Where the function cannot be had at
all, which no policy is to blame for, the scenario's turns are asked instead.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Self

from art_patch._lib.ids import new_id
from art_patch.gate import HeldOut, Repeated, Turn, speaks_of
from art_patch.grouping import Replay, ReplayConfig, choose_comparisons
from art_patch.pipeline.cycle_run import Cycle
from art_patch.pipeline.replay_runs import replay_info
from art_patch.pipeline.unfinished import GATE_RUNS
from art_patch.replay import AppProcesses, RunLost, question_of
from art_patch.store import Store, open_store
from art_patch.types import JSON, Policy, Trajectory

_DEADLINES = ("timeout_s", "first_token_timeout_s", "connect_timeout_s")
"""Settings of the app's that say when a call goes upstream."""


@dataclass(frozen=True, slots=True)
class Reruns:
    """What came of running held-out scenarios again.

    Attributes:
        repeated: those that both ran to the end.
        lost: a turn of each of those that were begun and have no score.
        erased: keys of those whose recorded run was erased meanwhile; they are not asked at all.
        metrics: for the ledger; `None` where nothing may be run again.
    """

    repeated: tuple[Repeated, ...] = ()
    lost: tuple[Turn, ...] = ()
    erased: frozenset[str] = frozenset()
    metrics: JSON | None = None

    @property
    def keys(self) -> frozenset[str]:
        """Of the scenarios whose turns are not asked."""
        return self.erased.union(turn.scenario_key for turn in (*(one.turn for one in self.repeated), *self.lost))


def rerun(run: Cycle, held_out: HeldOut, candidate: Policy, champion: Policy) -> Reruns:
    """Have both policies run held-out scenarios again, as many as the budget allows.

    Args:
        run: the cycle.
        held_out: what is asked.
        candidate: served by the engine.
        champion: served by the engine.
    """
    config, samples = run.config.replay, run.config.gate.run_samples
    if config is None:
        return Reruns()
    chosen, left = choose_comparisons(held_out.runs, config, samples=samples)
    if not chosen:
        return Reruns(metrics={"scenarios": 0, "left": left})
    with _scratch(run.adapters.parent) as directory:
        with (
            _Side.opened(run, config, candidate, directory / "candidate.db") as ours,
            _Side.opened(run, config, champion, directory / "champion.db") as theirs,
        ):
            made = _make(run, config.concurrency, chosen, (ours, theirs), samples)
    return _sorted(run, held_out, chosen, made, left)


def _sorted(
    run: Cycle, held_out: HeldOut, chosen: Mapping[str, Replay], made: Mapping[str, _Both], left: Mapping[str, int]
) -> Reruns:
    known = run.store.read.known([one.original.id for one in chosen.values()])
    turn_of = {turn.scenario_key: turn for turn in reversed(held_out.turns)}
    repeated: list[Repeated] = []
    lost: list[Turn] = []
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
            why_left[every[0].why] += 1
        elif sum(map(len, whole)) == len(every):
            repeated.append(Repeated(turn_of[key], whole[0], whole[1]))
        else:
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
    """One run: whole, or why not, and whether it was begun."""

    run: Trajectory | None
    why: str = ""
    begun: bool = True


_Both = tuple[list[_Made], list[_Made]]


def _make(
    run: Cycle, concurrency: int, chosen: Mapping[str, Replay], sides: tuple[_Side, _Side], samples: int
) -> dict[str, _Both]:
    """Every run, the policies one after the other and by turns the first."""
    lock = Lock()

    def make(one: Replay, side: _Side) -> _Made:
        with lock:
            erased = not run.store.read.known([one.original.id])
        return _Made(None, "erased meanwhile", begun=False) if erased else side.make(one, lock)

    # Those of one function together, because a process knows one.
    keys = sorted(chosen, key=lambda key: (chosen[key].target, chosen[key].redacted))
    order = [
        (key, which) for place, key in enumerate(keys) for n in range(samples) for which in _first((place + n) % 2)
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


def _first(which: int) -> tuple[int, int]:
    return which, 1 - which


class _Side:
    """A policy, and the processes of the app that know no other."""

    def __init__(self, store: Store, policy: Policy, config: ReplayConfig) -> None:
        self._store = store
        self._policy = policy
        self._timeout_s = config.timeout_s
        self.processes = AppProcesses(config)

    @classmethod
    @contextmanager
    def opened(cls, run: Cycle, config: ReplayConfig, policy: Policy, path: Path) -> Generator[Self]:
        """The policy with a store in which it serves, where the project's engine is."""
        url, route = f"sqlite:///{path}", run.store.ledger.route()
        store = open_store(url)
        store.ledger.add_base(policy.name, policy.base, policy.base_sha256, who=run.who)
        store.ledger.set_engine(route.base_url, key_file=route.key_file, who=run.who)
        # Nobody waits for these answers, and one that upstream gave because the machine was busy is no answer.
        patience = dict.fromkeys(_DEADLINES, f"{config.timeout_s:g}")
        side = cls(store, policy, replace(config, environment={**config.environment, **patience, "store": url}))
        try:
            yield side
        finally:
            side.processes.end()
            store.close()

    def make(self, one: Replay, lock: Lock) -> _Made:
        """Repeat a run once."""
        try:
            process = self.processes.take(one.target, redacted=one.redacted)
        except RunLost as error:
            return _Made(None, f"{one.target}: {error}", begun=False)
        info = replace(replay_info(one, time.time()), id=new_id())
        try:
            answer = process.ask(question_of(one, info), self._timeout_s)
        except RunLost as error:
            process.kill()
            return _Made(None, str(error))
        self.processes.give_back(process)
        with lock:
            found = self._store.read.trajectories([info.id]) if answer["written"] else ()
        if not found:
            return _Made(None, "nothing of it was recorded")
        if not speaks_of(found[0], self._policy.name):
            return _Made(None, "upstream answered in its place")
        return _Made(found[0])


@contextmanager
def _scratch(project: Path) -> Generator[Path]:
    """A directory of nobody else's, deleted at the end."""
    directory = (project / GATE_RUNS).absolute()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
