"""Runs that have no siblings -> further runs in the store, by having the app's own processes repeat them.

The app records what it does there as it always does. Before a run is repeated its trajectory is in the store: whatever
becomes of it, it is not begun a second time. It has the user and the session of its original, and an id that is made
from the original's (`replay_id`), so that it is erased, and deleted by retention, together with it.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from threading import Lock
from typing import Any, Literal

from art_patch._lib.ids import MOST_REPLAYS, replay_id
from art_patch.grouping import REPLAYED, Grouping, Replay, ReplayConfig, choose_replays, offer_of
from art_patch.pipeline.cycle_run import Cycle
from art_patch.replay import AppProcesses, RunLost, question_of
from art_patch.store import Store
from art_patch.types import REPLAY, TrajectoryInfo

_Outcome = Literal["ended", "raised", "lost"]


def replay(run: Cycle, grouping: Grouping) -> tuple[str, ...]:
    """Repeat runs without siblings; return the trajectories that ended, which are whole now.

    What goes wrong in the app ends one run and not the cycle. An exception of the user's function is how that run
    ended: its trajectory says so, and it is a sibling like the others.

    Args:
        run: the cycle.
        grouping: what became of the runs; those without siblings are repeated.
    """
    config = run.config.replay
    if config is None:
        return ()
    lonely = [*grouping.waiting, *grouping.others]
    metrics: dict[str, Any] = {"runs": len(lonely)}
    run.metrics["replay"] = metrics
    mode = run.store.ledger.route().mode
    if mode not in (None, "route"):
        # The mode in the store overrules the app processes' own: upstream would answer, for money and in vain.
        metrics["left"] = {f"the mode is {mode}, not route": len(lonely)}
        return ()
    ids = [replay_id(one.id, n) for one in lonely if offer_of(one) for n in range(1, MOST_REPLAYS + 1)]
    made = run.store.read.known(ids)
    replays, left = choose_replays(
        lonely, config, keys=grouping.keys, was_made=lambda of, number: replay_id(of, number) in made
    )
    run.progress("replay", 0, len(replays))
    work = _Work(run.store, config, left)
    counts: Counter[_Outcome] = Counter()
    ended: list[str] = []
    with ThreadPoolExecutor(config.concurrency, thread_name_prefix="art-patch-replay") as pool:
        # Those of one function together, because a process knows one.
        asked = {pool.submit(work.do, one): one for one in sorted(replays, key=lambda one: (one.target, one.redacted))}
        try:
            for done, future in enumerate(as_completed(asked), 1):
                outcome = future.result()
                if outcome is not None:
                    counts[outcome] += 1
                    if outcome != "lost":
                        ended.append(replay_id(asked[future].original.id, asked[future].number))
                run.progress("replay", done, len(replays), f"{len(ended)} runs")
        except BaseException:
            work.stop()
            raise
        finally:
            work.end()
    metrics |= {"replayed": len(ended), "raised": counts["raised"], "lost": counts["lost"], "left": left}
    return tuple(ended)


def replay_info(one: Replay, at: float) -> TrajectoryInfo:
    """Return the trajectory of a re-run: its original's, as far as it says whose it is and of what task."""
    source = one.original.info
    # All the rest of the metadata stays: the user's checks may look there for what the right answer is.
    metadata = {name: value for name, value in source.metadata.items() if name != REPLAY}
    return replace(
        source,
        id=replay_id(source.id, one.number),
        started_at=at,
        origin="explicit",
        ended_at=None,
        tags=(*(tag for tag in source.tags if tag != REPLAYED), REPLAYED),
        metadata={**metadata, "replay_of": source.id},
        error=None,
    )


class _Work:
    """What one cycle repeats."""

    def __init__(self, store: Store, config: ReplayConfig, left: dict[str, int]) -> None:
        """Note in `left` why runs could not be repeated."""
        self._store = store
        self._config = config
        self._left = left
        self._lock = Lock()  # the store has one writer
        self._processes = AppProcesses(config)

    def do(self, one: Replay) -> _Outcome | None:
        """Repeat a run; `None` if it was not begun."""
        try:
            process = self._processes.take(one.target, redacted=one.redacted)
        except RunLost as error:
            self._leave(f"{one.target}: {error}")
            return None
        info = replay_info(one, time.time())
        with self._lock:
            erased = not self._store.read.known([one.original.id])
            if not erased:
                self._store.write([info])
        if erased:
            self._processes.give_back(process)
            self._leave("erased meanwhile")
            return None
        try:
            answer = process.ask(question_of(one, info), self._config.timeout_s)
        except RunLost as error:
            process.kill()
            with self._lock:
                self._store.write([replace(info, error=f"it was run again: {error}")])
            return "lost"
        self._processes.give_back(process)
        if not answer["written"]:
            return "lost"
        return "raised" if answer["raised"] else "ended"

    def stop(self) -> None:
        """Begin nothing more, and end what goes on now."""
        self._processes.stop()

    def end(self) -> None:
        """Let the processes that wait end."""
        self._processes.end()

    def _leave(self, reason: str) -> None:
        with self._lock:
            self._left[reason] = self._left.get(reason, 0) + 1
