"""Sends to a tracker all items (runs, scores, policies) that were not sent to it before, page by page.

A page is noted in the store's table `sent` after the tracker has received it. So a second export sends only new and
changed items; after an interruption it sends at most one page again, under the same ids.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from art_patch.store import PAGE, Cursor, ExportNote, Filter, SentItem, Store
from art_patch.trackers.episodes import Episode, Item, MetricTracker, TableTracker, TraceTracker, Tracker, step_of
from art_patch.types import JSON, Policy

Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True, slots=True)
class Feeding:
    """The result of `feed`."""

    target: str  # the kind of the tracker and its address
    episodes: int  # number of runs that were read
    steps: int  # number of policies that were read
    written: int  # number of items
    already_there: int  # items that were not written, because the tracker has them from an earlier export


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
    """Write to the tracker all items that it does not have yet.

    Args:
        wanted: the filter that selects the runs; all policies are sent in any case.
        adapters: directory of the project's policies; an adapter elsewhere is not sent, even if the store names it.
        filters: the conditions of `wanted` by name; the audit log notes the names only.
        again: whether to write items that were sent before too, because the tracker has lost them.
    """
    seen = Counter[str]()
    with ExitStack() as stack:
        # The erasure of a user names all trackers that are noted here.
        names = (tracker.target, tracker.name)
        noting = store.transfers.note_export(*names, who=who, now=now, filters=filters, at_once=True)
        note: ExportNote | None = None

        def send(items: list[Item]) -> None:
            nonlocal note
            every = {item.key: item for item in items}  # the last item of a key wins, as it does at the tracker
            there = {} if again else store.sent.digests(tracker.target, list(every))
            new = [item for key, item in every.items() if there.get(key) != item.digest]
            seen.update(written=len(new), already=len(items) - len(new))
            if runs := [item.trajectory_id for item in new if item.trajectory_id is not None]:
                note = note or stack.enter_context(noting)
                note.add(runs)  # before they leave
            if new:
                tracker.write(new)
                # After the write, so that items which the tracker refused are sent again.
                sent = [SentItem(item.key, item.digest, item.trajectory_id) for item in new]
                store.sent.add(tracker.target, sent, now=now)

        if isinstance(tracker, TraceTracker):
            total = store.browse.count(wanted)
            for page in pages_of_episodes(store, wanted):
                send([item for episode in page for item in tracker.of_episode(episode)])
                seen.update(episodes=len(page))
                # More runs than were counted may be there by now.
                progress("send", min(seen["episodes"], total), total, f"{seen['written']} new")
        policies = [_with_files(policy, adapters) for policy in store.ledger.policies()]
        items = list[Item]()
        if isinstance(tracker, MetricTracker) and policies:
            rewards = _rewards(store)
            items += [item for p in policies for item in tracker.of_step(step_of(p, rewards.get(p.name, ())))]
        if isinstance(tracker, TableTracker):
            items += tracker.of_episodes()
        send(items)
    return Feeding(tracker.target, seen["episodes"], len(policies), seen["written"], seen["already"])


def _with_files(policy: Policy, adapters: Path) -> Policy:
    """Return the policy; without its path if the path is not the policy's own directory."""
    # A process that can write the store could put any directory there, and its files would be sent to the tracker.
    path = None if policy.path is None else Path(policy.path)
    own = path is not None and path.name == policy.name and path.parent.resolve() == adapters.resolve()
    return policy if own else replace(policy, path=None)


def pages_of_episodes(store: Store, wanted: Filter) -> Iterator[list[Episode]]:
    """Yield the selected runs page by page, newest first."""
    for ids in _pages(store, wanted):
        rewards = {one.id: one.reward for one in store.browse.summaries(ids)}
        yield [Episode(trajectory, rewards.get(trajectory.id)) for trajectory in store.read.trajectories(ids)]


def _pages(store: Store, wanted: Filter) -> Iterator[list[str]]:
    after: Cursor | None = None
    while found := store.browse.ids(wanted, after=after, limit=PAGE):
        after = found[-1]
        yield [key for _, key in found]


def _rewards(store: Store) -> dict[str, list[float]]:
    """Return for each policy the rewards of the runs in which it answered all calls."""
    found: dict[str, list[float]] = defaultdict(list)
    for ids in _pages(store, Filter()):
        for one in store.browse.summaries(ids):
            # A run that several policies answered says nothing of any one of them.
            if one.reward is not None and len(one.policies) == 1:
                found[one.policies[0]].append(one.reward)
    return found
