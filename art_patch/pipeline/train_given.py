"""What is learned besides groups: upstream's good answers, and what people said that answers should have been.

Corrections are learned whatever became of their run, unless its scenario is held out. In a group that waits they go
with the group. Of all other runs the newest count that were said since the champion was trained: a LoRA that goes on
has learned the older ones, and to be told them again in each cycle would drive it away from where it began. A new LoRA
learns them all. So it is with runs in no group that got a reward from the app: upstream's answers in them are imitated
if it is high enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from art_patch.grouping import given_scenario, is_held_out, task_key, task_of
from art_patch.pipeline.cycle_run import Cycle, CycleConfig
from art_patch.pipeline.train_text import BaseText
from art_patch.rewards import rewards_G
from art_patch.training import Pair, Row, demonstrations, preferences
from art_patch.types import JSON, Correction, Group, Policy, Trajectory

Scored = Sequence[tuple[Group, Sequence[float | None]]]
"""Groups, each with its siblings' rewards."""

_NEWEST = 256  # runs: people correct a handful a day, and more would outweigh what the groups of a cycle say
_NEWEST_ALONE = 1_000
_UPTO = "corrections_upto"


@dataclass(frozen=True, slots=True)
class Given:
    """What is learned besides groups.

    Attributes:
        demonstrations: to be imitated.
        pairs: to be told apart.
        others: trajectories outside of the groups that these are of.
        metrics: what is not learned, and until when corrections are known.
    """

    demonstrations: tuple[Row, ...] = ()
    pairs: tuple[Pair, ...] = ()
    others: tuple[str, ...] = ()
    metrics: JSON = field(default_factory=dict[str, Any])


def given(run: Cycle, champion: Policy, text: BaseText, scored: Scored) -> Given:
    """Return what is given, as far as the config asks for it.

    Raises:
        ConfigError: it does, and the base has no chat template.
    """
    config = run.config.train
    since = 0.0 if config.start == "base" else champion.metrics.get("train", {}).get(_UPTO, 0.0)
    if config.imitate_from is None and config.prefer_from is None:
        return Given(metrics={_UPTO: since} if since else {})
    corrections, others, held_out = _corrections(run, scored, since)
    renderer = text.renderer()
    metrics: dict[str, Any] = {_UPTO: run.now}
    rows: tuple[Row, ...] = ()
    pairs: tuple[Pair, ...] = ()
    if config.imitate_from is not None:
        alone = _alone(run, since, config.imitate_from)
        shown = demonstrations(
            (*scored, *alone), corrections, renderer, least_reward=config.imitate_from, max_tokens=config.max_tokens
        )
        rows, metrics["not_imitated"] = shown.rows, dict(Counter(shown.left_out) + held_out)
        others += tuple(each.id for group, _ in alone for each in group.trajectories if each.id not in others)
    if config.prefer_from is not None:
        apart = preferences(scored, corrections, renderer, margin=config.prefer_from, max_tokens=config.max_tokens)
        pairs, metrics["not_preferred"] = apart.pairs, dict(Counter(apart.left_out) + held_out)
    return Given(rows, pairs, others, metrics)


def _corrections(
    run: Cycle, scored: Scored, since: float
) -> tuple[list[tuple[Trajectory, list[Correction]]], tuple[str, ...], Counter[str]]:
    """Corrected runs, those of them that are in no scored group, and how many of these are held out."""
    siblings = {each.id: each for group, _ in scored for each in group.trajectories}
    newest = run.store.corrected(since=since, limit=_NEWEST)
    found = run.store.read.trajectories([key for key in newest if key not in siblings])
    others = {each.id: each for each in found if not _is_held_out(each, run.config)}
    held_out = Counter({"held out for the gate": len(found) - len(others)})
    said = run.store.corrections([*siblings, *others])
    runs = siblings | others
    return [(runs[key], theirs) for key, theirs in said.items()], tuple(others), held_out


def _alone(run: Cycle, since: float, least_reward: float) -> list[tuple[Group, tuple[float | None, ...]]]:
    """Runs in no group whose reward is high enough, each as a group of its own, unless its scenario is held out."""
    found = run.store.read.trajectories(run.store.rewarded_alone(since=since, limit=_NEWEST_ALONE))
    groups = [Group(each.id, "", "single", (each,)) for each in found if not _is_held_out(each, run.config)]
    rewards = [rewards_G(group, combination=run.config.combination) for group in groups]
    return [
        (group, (reward,))
        for group, (reward,) in zip(groups, rewards, strict=True)
        if reward is not None and reward >= least_reward
    ]


def _is_held_out(run: Trajectory, config: CycleConfig) -> bool:
    """By its own key or words; the store tells of those that grouping has brought together with others."""
    scenario = given_scenario(run)
    if scenario is None and run.calls:
        scenario = task_key(task_of(run.calls[0], across=config.across)), "same_task"
    return scenario is not None and is_held_out(scenario[0], config.holdout_share)
