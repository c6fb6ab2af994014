"""The records that are sent to trackers, the protocols of a tracker, and `feed`, which sends what a tracker lacks.

An `Episode` is a run of the agent with its reward: a row in the table of runs, whose tool calls are counted in the
table of tools. A `TrainingStep` is one policy with all metrics that the job recorded of it.

Items are sent page by page, and noted in the store's table `sent` after the tracker has received them. So a second
export sends only new and changed items; after an interruption it sends at most one page again, under the same ids.
"""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable
from urllib.parse import urlsplit

from art_patch import otel, policies
from art_patch.store import PAGE, Cursor, ExportNote, Filter, SentItem, Store
from art_patch.types import JSON, Policy, PolicyState, Trajectory

_BOOKKEEPING = frozenset({"checks", "config", "corrections_upto", "history", "job", "waits"})
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_DECIDED: Mapping[PolicyState, float] = {"champion": 1.0, "retired": 1.0, "rejected": 0.0}


@dataclass(frozen=True, slots=True)
class Episode:
    """A run of the agent with the reward that training uses; the reward is `None` if the run was not judged."""

    trajectory: Trajectory
    reward: float | None = None

    @property
    def ended_at(self) -> float:
        """End of the run in seconds since the epoch: the latest end of its block, its calls and its spans."""
        trajectory = self.trajectory
        # A run without a block has no end of its own, and a call can outlast the block: a stream that is read later.
        calls = (call.started_at + call.duration_ms / 1000 for call in trajectory.calls)
        spans = (span.ended_at or span.started_at for span in trajectory.spans)
        return max(trajectory.info.started_at, trajectory.info.ended_at or 0.0, *calls, *spans)

    @property
    def failed(self) -> bool:
        """Whether the run's `trajectory()` block or one of its calls ended with an error."""
        return self.trajectory.info.error is not None or any(call.status != "ok" for call in self.trajectory.calls)

    @property
    def actions(self) -> Counter[str]:
        """Number of times the model asked for each tool, by the tool's name."""
        return Counter(
            str(cast("Mapping[str, Any]", asked.get("function") or {}).get("name"))
            for call in self.trajectory.calls
            # The app goes on with the first choice; tools in the others were never called.
            for choice in call.choices[:1]
            for asked in cast("Sequence[Mapping[str, Any]]", choice.message.get("tool_calls") or ())
        )


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One policy with its metrics. All numbers are finite."""

    policy: Policy
    metrics: Mapping[str, float]  # by name, such as `train/kl_nats`, `gate/lower_bound`, `gate/won`, `reward/mean`
    history: tuple[Mapping[str, float], ...] = ()  # of each optimizer step of the policy's update, in order
    params: Mapping[str, str] = field(default_factory=dict[str, str])  # settings of the update, as text or JSON


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of data to write to a tracker, such as a span, a score or a metric."""

    key: str  # identifies the item among all items of this tracker
    digest: str  # of the content; an item whose key and digest were sent before is not sent again
    payload: Any  # the content, of the type that the tracker's `write` expects
    trajectory_id: str | None = None  # the run of the content, so that an erasure finds it; `None` for a policy's item


class Tracker(Protocol):
    """A service or directory that items are written to. It also is a `MetricTracker`, a `TraceTracker`, or both."""

    name: str  # the kind of tracker, such as `wandb`
    target: str  # the kind and the address, without secrets; the store's table `sent` names the tracker by it

    def write(self, items: Sequence[Item]) -> None:
        """Write items, and return once the tracker has received them; raises a `TrackerError` if it did not."""


@runtime_checkable
class MetricTracker(Tracker, Protocol):
    """A tracker that shows metrics of policies and of their updates."""

    def of_step(self, step: TrainingStep) -> Iterable[Item]:
        """Return the items to write for one policy."""
        ...


@runtime_checkable
class TraceTracker(Tracker, Protocol):
    """A tracker that shows runs of the agent. Runs are read from the store only for a tracker of this type."""

    def of_episode(self, episode: Episode) -> Iterable[Item]:
        """Return the items to write for one run of the agent."""
        ...


@runtime_checkable
class TableTracker(TraceTracker, Protocol):
    """A tracker that also shows tables with one row for each run of the agent and for each tool."""

    def of_episodes(self) -> Iterable[Item]:
        """Return the items for the tables. Called once, after `of_episode` was called with each run."""
        ...


def step_of(policy: Policy, rewards: Sequence[float] = ()) -> TrainingStep:
    """Return the training step of a policy; `rewards` are those of the runs in which it answered every call."""
    metrics = dict(_flat(policy.metrics, ""))
    if policy.parent is not None and policy.state in _DECIDED:
        # A retired policy was the champion once, so it won. The base model was never at the gate.
        metrics["gate/won"] = _DECIDED[policy.state]
    # Without rewards there is no mean; the count is left out with it.
    if rewards:
        metrics |= {"reward/mean": math.fsum(rewards) / len(rewards), "reward/runs": float(len(rewards))}
    train = cast("JSON", policy.metrics.get("train") or {})
    config = cast("JSON", train.get("config") or {})
    history = tuple(dict(_flat(one, "")) for one in cast("Sequence[JSON]", train.get("history") or ()))
    params = {key: value if isinstance(value, str) else json.dumps(value) for key, value in sorted(config.items())}
    return TrainingStep(policy, dict(sorted(metrics.items())), history, params)


def _flat(metrics: JSON, prefix: str) -> Iterable[tuple[str, float]]:
    for key, value in metrics.items():
        # Counts by reason have sentences for keys, which no tracker takes as a metric's name.
        if key in _BOOKKEEPING or not key.isidentifier():
            continue
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(cast("JSON", value), f"{name}/")
        # A metric that was not measured is left out: a curve then has a gap and not a wrong zero.
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def files_of(policy: Policy, *, weights: bool = False) -> list[Path]:
    """Return the manifest of a policy's adapter, or with `weights` all its files; empty if it has no manifest."""
    manifest = None if policy.path is None else Path(policy.path) / policies.MANIFEST
    if manifest is None or not manifest.is_file():
        return []
    if not weights:
        return [manifest]
    # No links: one could lead to any file of this machine.
    return sorted(file for file in manifest.parent.iterdir() if file.is_file() and not file.is_symlink())


def without_login(url: str) -> str:
    """Return a URL without user name and password, for messages and logs."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in parts.netloc else url


def trace_id_of(trajectory_id: str) -> str:
    """Return the OpenTelemetry trace id of a run, 32 hex digits: the run's own id if it is valid, else a hash of it."""
    own = trajectory_id.lower()
    # A trace id of zeros is invalid by OpenTelemetry's specification.
    return own if _TRACE_ID.fullmatch(own) and int(own, 16) else hash_of(trajectory_id, 16).hex()


def hash_of(text: str, size: int) -> bytes:
    """Return a hash of `size` bytes. Every process gets the same hash, so a second export makes the same ids."""
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


Cell: TypeAlias = str | float | bool | None

EPISODE_COLUMNS = (
    "trajectory", "name", "started", "duration_s", "policies", "calls", "prompt_tokens", "completion_tokens",
    "tool_calls", "reward", "failed", "error", "task", "session", "user", "tags",
)  # fmt: skip
CONTENT_COLUMNS = ("input", "output")  # messages of the last call, in the form of OpenTelemetry's GenAI conventions

ACTION_COLUMNS = ("tool", "times", "share", "runs", "results", "failed_results", "success_share", "mean_reward")
"""Results are spans of the kind `tool`, which a framework or the app reported. The mean reward is that of the runs that
asked for the tool. A share or mean of nothing is `None`."""


def episode_row(episode: Episode, *, content: bool) -> tuple[Cell, ...]:
    """Return the cells of a run in the order of `EPISODE_COLUMNS`; with `content` also those of `CONTENT_COLUMNS`."""
    info, calls = episode.trajectory.info, episode.trajectory.calls
    row = (
        info.id,
        info.name,
        datetime.fromtimestamp(info.started_at, UTC).isoformat(timespec="seconds"),
        round(episode.ended_at - info.started_at, 3),
        ", ".join(sorted({call.policy or "upstream" for call in calls})),
        len(calls),
        sum(call.prompt_tokens for call in calls),
        sum(call.completion_tokens for call in calls),
        episode.actions.total(),
        episode.reward,
        episode.failed,
        info.error or next((call.error for call in calls if call.error), None),
        info.scenario_key,
        info.session_id,
        info.user_id,
        ", ".join(info.tags),
    )
    if not content:
        return row
    if not calls:
        return (*row, None, None)
    said = (otel.input_messages(calls[-1]), otel.output_messages(calls[-1]))
    return (*row, *(json.dumps(some, ensure_ascii=False) for some in said))


class ActionTable:
    """Counts the agent's requests for tools, and the tools' results, over many runs."""

    def __init__(self) -> None:
        self._times, self._runs, self._results, self._failed = (Counter[str]() for _ in range(4))
        self._rewards: dict[str, list[float]] = defaultdict(list)

    def add(self, episode: Episode) -> None:
        """Count the tool requests and tool results of one run."""
        asked = episode.actions
        self._times.update(asked)
        self._runs.update(asked.keys())
        for name in asked if episode.reward is not None else ():
            self._rewards[name].append(episode.reward or 0.0)
        # A tool that was still at work when the run ended has no result.
        done = [span for span in episode.trajectory.spans if span.kind == "tool" and span.ended_at is not None]
        self._results.update(span.name for span in done)
        self._failed.update(span.name for span in done if span.error is not None)

    def rows(self) -> list[tuple[Cell, ...]]:
        """Return a row for each tool in the order of `ACTION_COLUMNS`, the most frequent tool first."""
        # Tools may have results without having been asked for by a model: the app called them itself.
        names = sorted({*self._times, *self._results}, key=lambda name: (-self._times[name], name))
        return [self._row(name) for name in names]

    def _row(self, name: str) -> tuple[Cell, ...]:
        times, total, runs = self._times[name], self._times.total(), self._runs[name]
        results, failed, rewards = self._results[name], self._failed[name], self._rewards.get(name)
        success = (results - failed) / results if results else None
        mean_reward = math.fsum(rewards) / len(rewards) if rewards else None
        return name, times, times / total if total else None, runs, results, failed, success, mean_reward


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
