"""Forms groups of siblings: from runs of one scenario, and from sibling spans within one run. Pure.

Sibling spans are attempts at one task within one run, such as best of n under one parent span. They have the same
parent, the same name and the same beginning: the first call of each has the same masked prompt. Spans of parallel work
on different tasks, and attempts that know of earlier ones, are no siblings, because they begin differently. Each
attempt becomes a trajectory of its own, with copies of the calls below its span.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from art_patch.grouping.lone_runs import can_be_asked_again, can_be_learned_from
from art_patch.grouping.scenario import (
    Embed,
    Task,
    digest,
    first_keys,
    given_scenario,
    is_held_out,
    is_user_held_out,
    same_meaning,
    task_key,
    task_keys,
    task_of,
    tools_key,
)
from art_patch.grouping.wording import Word, normalise
from art_patch.trajectories import number_tool_calls
from art_patch.types import REPLAY_FROM, REPLAY_OF, Call, Group, KnownScenario, SpanInfo, Trajectory, TrajectoryInfo

# Keys of wordings and scenarios -> where those belong that were seen before.
Known = Callable[[Collection[str]], Mapping[str, KnownScenario]]


@dataclass(frozen=True, slots=True)
class Grouping:
    """The result of `form_groups`: the groups of siblings, and the runs that are in no group, each with a reason."""

    groups: tuple[Group, ...]  # by each scenario's oldest member; groups of sibling spans last
    left: Mapping[str, int]  # reason -> number of trajectories that were not grouped
    # Attempts within a run, as trajectories of their own, which are in groups. The caller must store them, and make
    # sure that the run is not grouped again.
    derived: tuple[Trajectory, ...] = ()
    waiting: tuple[Trajectory, ...] = ()  # trainable runs without a sibling, oldest first
    # Runs that cannot be trained on, but whose prompts can be asked again, and that no trainable run is a sibling of:
    # answers of upstream, greedy sampling. Oldest first.
    others: tuple[Trajectory, ...] = ()
    # Scenario key of each run in `waiting` and `others`. A run with a typo has the key of its task here, whereas
    # `scenario_of` sees its text alone.
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    embeddings: str | None = None  # why the embedding model was not used, if there is one
    # Wording key -> (scenario key, held out), of all texts. The caller must keep what is new, and pass it as `known`.
    wordings: Mapping[str, tuple[str, bool]] = field(default_factory=dict[str, tuple[str, bool]])


@dataclass(slots=True)
class _Scenario:
    """The runs of one scenario: trainable ones, and others whose prompts can be asked again."""

    key: str
    how: str
    held_out: bool
    siblings: list[Trajectory] = field(default_factory=list[Trajectory])
    others: list[Trajectory] = field(default_factory=list[Trajectory])


def form_groups(
    trajectories: Sequence[Trajectory],
    *,
    new_id: Callable[[], str],
    min_size: int = 2,
    max_size: int = 16,
    holdout_share: float = 0.2,
    holdout_users: bool = False,
    singles: bool = False,
    across: bool = False,
    embed: Embed | None = None,
    known: Known = lambda keys: {},
) -> Grouping:
    """Put trajectories of one task into groups of siblings; report why other trajectories are in no group.

    Args:
        trajectories: finished trajectories that are in no group yet, oldest first.
        new_id: makes the ids of groups, of trajectories made from spans, and of the copied calls.
        min_size: smallest number of siblings in a group; fewer wait for more.
        max_size: largest number of siblings in a group; more are split evenly: a judge ranks few better than many.
        holdout_share: share of the scenarios that is held out for the gate.
        holdout_users: hold out this share of the users instead. A new scenario is on the side of the user of its oldest
            run; the runs of users on the other side are left out. A run without a user is on its scenario's side, which
            its key decides if no user does.
        singles: form a group of a held-out scenario even without siblings, because the gate needs its prompts only.
        across: ignore system prompts and tools: runs with the same words in the first user message have the same task.
        embed: returns one vector for each text (`embed_with`). Tasks whose vectors are similar enough count as one. If
            it raises `ConnectionError`, only the words are compared.
        known: returns where wordings and scenarios belong that were seen before. They never change sides.
    """
    texts = _Texts(trajectories, across, embed, known)
    scenarios, left = _by_scenario(trajectories, texts, holdout_share, holdout_users)
    groups: list[Group] = []
    alone: list[tuple[_Scenario, Trajectory]] = []
    for scenario in scenarios:
        held_out = scenario.held_out
        if len(scenario.siblings) >= min_size:
            for part in _split(scenario.siblings, max_size):
                how = texts.how(part) if scenario.how == "same_task" else scenario.how
                groups.append(Group(new_id(), scenario.key, how, tuple(part), held_out))
        elif singles and held_out:
            if prompts := (*scenario.siblings, *scenario.others):
                groups.append(Group(new_id(), scenario.key, "single", prompts, held_out))
        else:
            alone += [(scenario, trajectory) for trajectory in scenario.siblings]

    # Only runs without siblings: a run with siblings is compared as a whole, and its spans would repeat its calls.
    by_spans: list[Group] = []
    waiting: dict[str, str] = {}
    for scenario, trajectory in alone:
        found: list[Group] = []
        for name, attempts in sibling_spans(trajectory, new_id=new_id, is_useful=lambda t: _why_not(t) is None):
            if len(attempts) >= min_size:
                # On the side of the run's own scenario, whose prompts these are.
                held_out, key = scenario.held_out, f"{scenario.key}/{name}"
                parts = _split(attempts, max_size)
                found += [Group(new_id(), key, "sibling_spans", tuple(part), held_out) for part in parts]
        by_spans += found
        if found:
            left["its spans are siblings"] += 1
        else:
            left["waits for a sibling"] += 1
            waiting[trajectory.id] = scenario.key
    grouped = {trajectory.id for group in groups for trajectory in group.trajectories}
    ungrouped = [(each, run) for each in scenarios for run in each.others if run.id not in grouped]
    left.update(_why_not(run) or "" for _, run in ungrouped)
    others = {run.id: scenario.key for scenario, run in ungrouped if not scenario.siblings}
    return Grouping(
        groups=(*groups, *by_spans),
        left=dict(left),
        derived=tuple(trajectory for group in by_spans for trajectory in group.trajectories),
        waiting=tuple(t for t in trajectories if t.id in waiting),
        others=tuple(t for t in trajectories if t.id in others),
        keys=waiting | others,
        embeddings=texts.unheard,
        wordings=texts.wordings({one.key: one.held_out for one in scenarios}),
    )


def _by_scenario(
    trajectories: Sequence[Trajectory], texts: "_Texts", holdout_share: float, holdout_users: bool
) -> tuple[Sequence[_Scenario], Counter[str]]:
    """Return the scenarios with their runs, and reason -> number of runs that are in none."""
    left: Counter[str] = Counter()
    scenarios: dict[tuple[str, str], _Scenario] = {}
    for trajectory in trajectories:
        # `branch_group` compares it with the run that it began in. An app may use one of these words for its own.
        if {REPLAY_OF, REPLAY_FROM} <= trajectory.info.metadata.keys():
            left["began at a turn of another run"] += 1
            continue
        given = given_scenario(trajectory) or texts.scenario(trajectory)
        if given is None:
            left["no calls"] += 1
            continue
        user = trajectory.info.user_id if holdout_users else None
        of_user = None if user is None else is_user_held_out(user, holdout_share)
        if (scenario := scenarios.get(given)) is None:
            by_key = is_held_out(given[0], holdout_share)
            side = texts.sides.get(given[0], by_key if of_user is None else of_user)
            scenario = scenarios[given] = _Scenario(*given, side)
        if of_user is not None and of_user != scenario.held_out:
            left["its user is held out and its task is not, or the other way round"] += 1
        elif (reason := _why_not(trajectory)) is None:
            scenario.siblings.append(trajectory)
        elif any(map(can_be_asked_again, trajectory.calls)):
            scenario.others.append(trajectory)
        else:
            left[reason] += 1
    return list(scenarios.values()), left


class _Texts:
    """The scenarios of all runs without a user's key, by their texts."""

    # All texts are read together, because typos and embeddings need the other texts.
    def __init__(self, trajectories: Sequence[Trajectory], across: bool, embed: Embed | None, known: Known) -> None:
        self.unheard: str | None = None
        seen: dict[str, tuple[str, tuple[Word, ...]]] = {}
        self._tasks: dict[str, Task] = {
            trajectory.id: task_of(trajectory.calls[0], across=across, seen=seen)
            for trajectory in trajectories
            if trajectory.calls and given_scenario(trajectory) is None
        }
        keys = task_keys(self._tasks.values())
        same: Mapping[str, str] = {}
        if embed is not None:
            counts = Counter(keys[task] for task in self._tasks.values())
            # The wording that sorts first represents its scenario, so the order of the runs does not matter. Of one
            # text in several cases it is the one with names (`loose` is false), which the model may not judge.
            tasks = {keys[task]: task for task in sorted(keys, key=lambda task: (task.text, task.words), reverse=True)}
            try:
                same = same_meaning(tasks, counts, embed)
            except ConnectionError as error:
                self.unheard = str(error)
        own = {task: task_key(task) for task in keys}
        clusters: dict[str, str] = {}
        for task, key in keys.items():
            cluster = same.get(key, key)
            # The smaller one: a name is never corrected, and the same word elsewhere in lower case may be.
            clusters[own[task]] = min(cluster, clusters.get(own[task], cluster))
        given = {one[0] for one in map(given_scenario, trajectories) if one is not None}
        before = known({*clusters, *clusters.values(), *given})
        # Scenario key -> whether it is held out, of those that are known.
        self.sides = {one.scenario_key: one.held_out for one in before.values()}
        self._scenarios = first_keys(clusters, before)
        self._keys = {key: self._scenarios[own[task]] for key, task in self._tasks.items()}

    def wordings(self, held_out: Mapping[str, bool]) -> dict[str, tuple[str, bool]]:
        """Return wording key -> (scenario key, held out), for the wordings and for the scenarios' own keys."""
        scenarios = {**{key: key for key in self._scenarios.values()}, **self._scenarios}
        return {wording: (key, held_out[key]) for wording, key in scenarios.items()}

    def scenario(self, trajectory: Trajectory) -> tuple[str, str] | None:
        """Return (scenario key, how); `None` for a run without calls."""
        return None if (key := self._keys.get(trajectory.id)) is None else (key, "same_task")

    def how(self, siblings: Sequence[Trajectory]) -> str:
        """Return `same_task` if all siblings were asked in the same words, else `near_duplicate`."""
        return "same_task" if len({self._tasks[t.id].text for t in siblings}) == 1 else "near_duplicate"


def _why_not(trajectory: Trajectory) -> str | None:
    """Return why a run is not worth the judge's money: nothing in it can be trained on. `None` if something can."""
    if not trajectory.calls:
        return "no calls"
    if can_be_learned_from(trajectory):
        return None
    return Counter(call.untrainable for call in trajectory.calls).most_common(1)[0][0]


def _split(siblings: list[Trajectory], max_size: int) -> list[list[Trajectory]]:
    parts = -(-len(siblings) // max_size)
    size, extra = divmod(len(siblings), parts)
    cuts = [i * size + min(i, extra) for i in range(parts + 1)]
    return [siblings[a:b] for a, b in pairwise(cuts)]


# --- sibling spans ---


def sibling_spans(
    trajectory: Trajectory, *, new_id: Callable[[], str], is_useful: Callable[[Trajectory], bool]
) -> Iterator[tuple[str, list[Trajectory]]]:
    """Yield (span name and hash of the beginning, useful attempts) for each set of sibling spans; no call is in two."""
    inside = _calls_inside(trajectory)
    alike: dict[tuple[str | None, str, str], list[SpanInfo]] = defaultdict(list)
    for span in trajectory.spans:
        if calls := inside[span.id]:
            alike[span.parent_id, span.name, _beginning(calls[0])].append(span)
    used: set[str] = set()
    # Outer spans first: an inner span would repeat calls of theirs.
    for (_, name, beginning), spans in sorted(alike.items(), key=lambda item: -len(inside[item[1][0].parent_id or ""])):
        attempts = [
            (attempt, {call.id for call in inside[span.id]})
            for span in spans
            if is_useful(attempt := _derived(trajectory.info, span, inside[span.id], new_id))
        ]
        if len(attempts) >= 2 and not any(used & ids for _, ids in attempts):
            used.update(*(ids for _, ids in attempts))
            yield f"{name}#{beginning}", [attempt for attempt, _ in attempts]


def _calls_inside(trajectory: Trajectory) -> dict[str, list[Call]]:
    """Return span id -> the calls below the span, in order; `""` has all calls."""
    parents = {span.id: span.parent_id for span in trajectory.spans}
    inside: dict[str, list[Call]] = defaultdict(list)
    for call in trajectory.calls:
        inside[""].append(call)
        above, seen = call.span_id, set[str]()
        while above is not None and above not in seen:  # a loop is possible in what other tools wrote
            seen.add(above)
            inside[above].append(call)
            above = parents.get(above)
    return inside


def _beginning(call: Call) -> str:
    prompt = json.dumps(number_tool_calls(call.messages), sort_keys=True, ensure_ascii=False, default=repr)
    return digest([normalise(prompt), tools_key(call)])[:16]


def _derived(source: TrajectoryInfo, span: SpanInfo, calls: list[Call], new_id: Callable[[], str]) -> Trajectory:
    key = new_id()
    theirs = {name: getattr(source, name) for name in ("session_id", "user_id", "tags")}
    info = TrajectoryInfo(key, span.started_at, "span", ended_at=span.ended_at, name=span.name, **theirs)
    copies = (replace(c, id=new_id(), trajectory_id=key, span_id=None, shadow_of=c.id) for c in calls)
    return Trajectory(info, tuple(copies))
