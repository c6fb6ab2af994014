"""Forming groups of siblings from trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from art_patch.grouping.askable import can_be_asked_again
from art_patch.grouping.embeddings import Embed, same_meaning
from art_patch.grouping.scenario import Task, given_scenario, is_held_out, spelling_of, task_key, task_of
from art_patch.grouping.spans import sibling_spans
from art_patch.grouping.wording import Word
from art_patch.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Grouping:
    """What became of the trajectories.

    Attributes:
        groups: in order of each scenario's oldest member, those of sibling spans last.
        left: why the others were not grouped, with how many.
        derived: attempts within a run, as trajectories of their own; in groups, and not in the store yet. The caller
            takes care that the run does not come again.
        waiting: trainable runs without a sibling, oldest first.
        others: runs in which nothing can be trained on, and whose prompts can be asked again: what upstream answered,
            what was sampled greedily. Those that no trainable run is a sibling of, oldest first.
        keys: scenario key of each run that waits and of each of the others. A run with a typo has the key of its task
            here, while `scenario_of` sees one text alone.
        embeddings: why the embedding model had no say where there is one: words alone decided.
    """

    groups: tuple[Group, ...]
    left: Mapping[str, int]
    derived: tuple[Trajectory, ...] = ()
    waiting: tuple[Trajectory, ...] = ()
    others: tuple[Trajectory, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    embeddings: str | None = None


@dataclass(slots=True)
class _Scenario:
    """A scenario's runs: those that can be trained on, and others whose prompts can be asked again."""

    key: str
    how: str
    siblings: list[Trajectory] = field(default_factory=list[Trajectory])
    others: list[Trajectory] = field(default_factory=list[Trajectory])


def form_groups(
    trajectories: Sequence[Trajectory],
    *,
    new_id: Callable[[], str],
    min_size: int = 2,
    max_size: int = 16,
    holdout_share: float = 0.2,
    singles: bool = False,
    across: bool = False,
    embed: Embed | None = None,
    similar: float = 0.95,
) -> Grouping:
    """Group siblings.

    Args:
        trajectories: settled ones that no group holds yet, oldest first.
        new_id: makes ids of groups, and of derived trajectories and their calls.
        min_size: fewer siblings than this wait for more.
        max_size: more siblings than this are split evenly, because a judge ranks few better than many.
        holdout_share: part of the scenarios that is kept for the gate.
        singles: a held-out scenario needs no siblings: the gate only asks its prompts again.
        across: the same words are the same task under other system prompts and other tools, too.
        embed: texts -> vectors; brings together what words alone do not (`embeddings.embed_with`). Where it raises
            `ConnectionError`, words alone decide.
        similar: least cosine of two texts that `embed` brings together, 0..1.
    """
    left: Counter[str] = Counter()
    texts = _Texts(trajectories, across=across, embed=embed, similar=similar)
    scenarios: dict[tuple[str, str], _Scenario] = {}
    for trajectory in trajectories:
        given = given_scenario(trajectory) or texts.scenario(trajectory)
        if given is None:
            left["no calls"] += 1
            continue
        scenario = scenarios.setdefault(given, _Scenario(*given))
        reason = _why_not(trajectory)
        if reason is None:
            scenario.siblings.append(trajectory)
            continue
        if any(map(can_be_asked_again, trajectory.calls)):
            scenario.others.append(trajectory)
        else:
            left[reason] += 1

    groups: list[Group] = []
    alone: list[tuple[_Scenario, Trajectory]] = []
    for scenario in scenarios.values():
        held_out = is_held_out(scenario.key, holdout_share)
        if len(scenario.siblings) >= min_size:
            for part in _split(scenario.siblings, max_size):
                how = texts.how(part) if scenario.how == "same_task" else scenario.how
                groups.append(Group(new_id(), scenario.key, how, tuple(part), held_out))
        elif singles and held_out:
            if prompts := (*scenario.siblings, *scenario.others):
                groups.append(Group(new_id(), scenario.key, "single", prompts, held_out))
        else:
            alone += [(scenario, trajectory) for trajectory in scenario.siblings]

    # A run that has siblings is compared with them as a whole; its spans would teach the same calls a second time.
    by_spans: list[Group] = []
    waiting: dict[str, str] = {}
    for scenario, trajectory in alone:
        found: list[Group] = []
        for name, attempts in sibling_spans(trajectory, new_id=new_id, is_useful=lambda t: _why_not(t) is None):
            if len(attempts) >= min_size:
                # On the side of the run's own scenario, whose prompts these are.
                held_out, key = is_held_out(scenario.key, holdout_share), f"{scenario.key}/{name}"
                parts = _split(attempts, max_size)
                found += [Group(new_id(), key, "sibling_spans", tuple(part), held_out) for part in parts]
        by_spans += found
        if found:
            left["its spans are siblings"] += 1
        else:
            left["waits for a sibling"] += 1
            waiting[trajectory.id] = scenario.key
    grouped = {trajectory.id for group in groups for trajectory in group.trajectories}
    others: dict[str, str] = {}
    for scenario in scenarios.values():
        for trajectory in scenario.others:
            if trajectory.id not in grouped:
                left[_why_not(trajectory) or ""] += 1
                if not scenario.siblings:
                    others[trajectory.id] = scenario.key
    return Grouping(
        groups=(*groups, *by_spans),
        left=dict(left),
        derived=tuple(trajectory for group in by_spans for trajectory in group.trajectories),
        waiting=tuple(t for t in trajectories if t.id in waiting),
        others=tuple(t for t in trajectories if t.id in others),
        keys=waiting | others,
        embeddings=texts.unheard,
    )


class _Texts:
    """What the runs' own words say of their scenarios, seen all together; runs with a key from the user are not in."""

    def __init__(
        self, trajectories: Sequence[Trajectory], *, across: bool, embed: Embed | None, similar: float
    ) -> None:
        """Read them."""
        self.unheard: str | None = None
        seen: dict[str, tuple[str, tuple[Word, ...]]] = {}
        self._tasks: dict[str, Task] = {
            trajectory.id: task_of(trajectory.calls[0], across=across, seen=seen)
            for trajectory in trajectories
            if trajectory.calls and given_scenario(trajectory) is None
        }
        spelling = spelling_of(self._tasks.values())
        keys = {task: task_key(task, spelling) for task in set(self._tasks.values())}
        self._keys = {key: keys[task] for key, task in self._tasks.items()}
        if embed is not None:
            counts = Counter(self._keys.values())
            # Of a scenario's wordings the one that sorts first speaks for it, whatever the order of the runs; of one
            # text in several cases that is the one with the names, so that the model judges less.
            tasks = {keys[task]: task for task in sorted(keys, key=lambda task: (task.text, task.words), reverse=True)}
            same: Mapping[str, str] = {}
            try:
                same = same_meaning(tasks, counts, embed, similar)
            except ConnectionError as error:
                self.unheard = str(error)
            self._keys = {key: same.get(scenario, scenario) for key, scenario in self._keys.items()}

    def scenario(self, trajectory: Trajectory) -> tuple[str, str] | None:
        """Return `(scenario key, how)`; `None` for a run without calls."""
        key = self._keys.get(trajectory.id)
        return None if key is None else (key, "same_task")

    def how(self, siblings: Sequence[Trajectory]) -> str:
        """Return `same_task` if they were all asked in the same words."""
        return "same_task" if len({self._tasks[t.id].text for t in siblings}) == 1 else "near_duplicate"


def _why_not(trajectory: Trajectory) -> str | None:
    """A trajectory that has nothing to train on is not worth the judge's money."""
    if not trajectory.calls:
        return "no calls"
    if any(call.untrainable is None for call in trajectory.calls):
        return None
    reasons = Counter(call.untrainable for call in trajectory.calls)
    return reasons.most_common(1)[0][0]


def _split(siblings: list[Trajectory], max_size: int) -> list[list[Trajectory]]:
    parts = -(-len(siblings) // max_size)
    size, extra = divmod(len(siblings), parts)
    cuts = [i * size + min(i, extra) for i in range(parts + 1)]
    return [siblings[a:b] for a, b in pairwise(cuts)]
