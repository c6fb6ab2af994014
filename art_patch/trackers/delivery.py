"""From the store to a tracker, what it does not have yet.

Items are sent page by page and noted in the store's table `sent` after the tracker took them. A second run sends
nothing; one that was cut short goes on, and sends at most one page again, under the same ids. Whose data left is noted
as an export, so that erasing a user names the tracker.

Runs are sent when they are at rest, because a tracker has no way to take a span back. Copies that the app never saw
are not sent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from art_patch.store import PAGE, Cursor, ExportNote, Filter, SentItem, Store
from art_patch.trackers.episodes import Episode, Item, Tracker, step_of
from art_patch.types import JSON, Policy

Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True, slots=True)
class Feeding:
    """What came of it.

    Attributes:
        target: the tracker and where it is.
        episodes: runs that were looked at.
        steps: policies that were looked at.
        written: items that were written.
        already_there: items that the tracker had.
    """

    target: str
    episodes: int
    steps: int
    written: int
    already_there: int


def feed(
    store: Store,
    tracker: Tracker,
    wanted: Filter,
    *,
    who: str,
    progress: Progress,
    now: float,
    adapters: Path,
    filters: JSON | None = None,
    again: bool = False,
) -> Feeding:
    """Write what the tracker does not have yet.

    Args:
        store: where from.
        tracker: where to.
        wanted: which runs; policies are told of in any case.
        who: for the ledger.
        progress: told how far it is.
        now: seconds since the epoch.
        adapters: where the project's policies lie; no files of a policy that the store says lies elsewhere are sent.
        filters: what was chosen, for the audit log.
        again: write also what the tracker was sent already, because it has lost it.

    Raises:
        TrackerError: the tracker cannot be reached, or refused.
        StoreError: the store cannot be read or written.
    """
    seen = Counter[str]()
    total = store.browse.count(wanted) if tracker.takes_episodes else 0
    with ExitStack() as stack:
        note: ExportNote | None = None
        for page in pages_of_episodes(store, wanted) if tracker.takes_episodes else ():
            items = [item for episode in page for item in tracker.of_episode(episode)]
            new = _new(store, tracker, items, again)
            if new and note is None:
                kept = store.transfers.note_export(
                    tracker.target, tracker.name, who=who, now=now, filters=filters, at_once=True
                )
                note = stack.enter_context(kept)
            if new and note is not None:
                note.add(item.trajectory_id for item in new if item.trajectory_id is not None)
                _write(store, tracker, new, now)
            seen.update(episodes=len(page), written=len(new), already=len(items) - len(new))
            progress("send", min(seen["episodes"], total), total, f"{seen['written']} new")
        policies = [_with_files(policy, adapters) for policy in store.ledger.policies()]
        rewards = _rewards(store) if policies else {}
        items = [item for p in policies for item in tracker.of_step(step_of(p, rewards.get(p.name, ())))]
        items += tracker.of_episodes()
        new = _new(store, tracker, items, again)
        _write(store, tracker, new, now)
        seen.update(written=len(new), already=len(items) - len(new))
    return Feeding(tracker.target, seen["episodes"], len(policies), seen["written"], seen["already"])


def _with_files(policy: Policy, adapters: Path) -> Policy:
    """Return the policy; without its path unless that is its own: whoever may write the store may write any."""
    path = None if policy.path is None else Path(policy.path)
    own = path is not None and path.name == policy.name and path.parent.resolve() == adapters.resolve()
    return policy if own else replace(policy, path=None)


def pages_of_episodes(store: Store, wanted: Filter) -> Iterator[list[Episode]]:
    """Return the matching runs, newest first, a page at a time."""
    for ids in _pages(store, wanted):
        rewards = {one.id: one.reward for one in store.browse.summaries(ids)}
        yield [Episode(trajectory, rewards.get(trajectory.id)) for trajectory in store.read.trajectories(ids)]


def _pages(store: Store, wanted: Filter) -> Iterator[list[str]]:
    after: Cursor | None = None
    while found := store.browse.ids(wanted, after=after, limit=PAGE):
        after = found[-1]
        yield [key for _, key in found]


def _rewards(store: Store) -> dict[str, list[float]]:
    """Rewards of the runs that one policy answered alone, by that policy."""
    found: dict[str, list[float]] = defaultdict(list)
    for ids in _pages(store, Filter()):
        for one in store.browse.summaries(ids):
            if one.reward is not None and len(one.policies) == 1:
                found[one.policies[0]].append(one.reward)
    return found


def _new(store: Store, tracker: Tracker, items: Iterable[Item], again: bool) -> list[Item]:
    every = {item.key: item for item in items}
    there = {} if again else store.sent.digests(tracker.target, list(every))
    return [item for key, item in every.items() if there.get(key) != item.digest]


def _write(store: Store, tracker: Tracker, items: list[Item], now: float) -> None:
    if items:
        tracker.write(items)
        store.sent.add(tracker.target, [SentItem(one.key, one.digest, one.trajectory_id) for one in items], now=now)
