"""The one rule that makes a trajectory's reward from the scores that stand side by side. Pure.

A project declares one combination (`ART_PATCH_REWARD`):

- `ruler`, unless it says otherwise: **a score named `reward` that a user or their code gave, else the RULER score of
  this very group, else none.** Other scores (`thumbs`, a criterion's, RULER's from another group) are kept and shown
  and do not enter. The rule looks at one trajectory at a time, so a group in which only some have a `reward` mixes the
  user's scale with RULER's 0..1: give rewards from 0 to 1, or give them to all siblings.
- `criteria`: the weighted mean of `criteria.py`, alone. A score named `reward` does not enter.
- `module:function`: a function of the user's. It takes a `records.Group` whose siblings hold all their scores, and
  returns a finite number or `None` for each, in their order.

Where there are several scores of a kind, the newest counts. `None` is no reward, and never zero.

What `ruler` gives can be read off the scores, so it is not kept. The others' results are, by `kept_scores`: a score
named `reward` of source `combined` for each sibling, and the values it was made of. `store/browse.py` shows the same in
SQL: what was combined in the trajectory's group, else the rule of `ruler`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from art_patch.errors import ConfigError
from art_patch.rewards.checks import load_function, version_of
from art_patch.rewards.criteria import Criterion, criterion_scores, load_criteria, weighted_G
from art_patch.rewards.judge.ruler import SCORE_NAME, SCORE_SOURCE
from art_patch.rewards.latest_score import newest, with_scores
from art_patch.types import Group, Score

REWARD_NAME = "reward"
REWARD_SOURCES = ("user", "code")
COMBINED = "combined"
"""Source of a reward that a combination made of other scores."""


@dataclass(frozen=True, slots=True)
class Combination:
    """How a project makes rewards.

    Attributes:
        name: `ruler`, `criteria` or `module:function`.
        rule: takes a group whose siblings hold all their scores.
        criteria: what the rule weighs, if it does.
        version: of the rule, kept with its results.
    """

    name: str
    rule: Callable[[Group], Sequence[float | None]]
    criteria: tuple[Criterion, ...] = ()
    version: str = "1"


def _given_or_ruler_G(group: Group) -> tuple[float | None, ...]:
    given = (newest(each, REWARD_NAME, REWARD_SOURCES) for each in group.trajectories)
    ruler = (newest(each, SCORE_NAME, (SCORE_SOURCE,), group_id=group.id) for each in group.trajectories)
    return tuple(judged if own is None else own for own, judged in zip(given, ruler, strict=True))


RULER = Combination("ruler", _given_or_ruler_G)


def weighted(criteria: Sequence[Criterion]) -> Combination:
    """Return the combination that weighs these criteria."""
    whole = tuple(criteria)
    version = hashlib.sha256(repr([(one.name, one.weight, one.version) for one in whole]).encode()).hexdigest()[:12]
    return Combination("criteria", lambda group: weighted_G(group, whole), whole, version)


def load_combination(name: str = "ruler", *, criteria: str | None = None) -> Combination:
    """Return the combination that the settings `reward` and `criteria` mean.

    Raises:
        ConfigError: it is not known, a function cannot be imported, or the criteria cannot be read.
    """
    if name == "ruler":
        return RULER
    if name == "criteria":
        return weighted(load_criteria(criteria))
    if ":" not in name:
        raise ConfigError(f"reward {name!r} is not ruler, criteria or module:function (ART_PATCH_REWARD)")
    rule = load_function(name, what="reward")
    return Combination(name, rule, version=version_of(rule))


def rewards_G(
    group: Group, scores: Iterable[Score] = (), *, combination: Combination | str = RULER
) -> tuple[float | None, ...]:
    """Return the reward of each of the G siblings, in the order of `group.trajectories`.

    Args:
        group: siblings, with the scores that were stored with them.
        scores: further scores, such as those that were just given; those of other trajectories are passed over.
        combination: the project's, or its name.

    Returns:
        One finite number each; `None` where a sibling has no reward. `None` is never to be read as zero.

    Raises:
        ConfigError: a function of the user's returned something else, or the name is not known.
    """
    if isinstance(combination, str):
        combination = load_combination(combination)
    rewards = tuple(combination.rule(with_scores(group, scores)))
    if len(rewards) != len(group.trajectories):
        raise ConfigError(
            f"reward {combination.name!r} gave {len(rewards)} numbers for {len(group.trajectories)} siblings; "
            "it must give one for each, in their order, None for none"
        )
    for reward in rewards:
        if reward is not None and not math.isfinite(reward):
            raise ConfigError(f"reward {combination.name!r} gave {reward}; give a finite number, or None for none")
    return rewards


def kept_scores(
    group: Group, scores: Iterable[Score] = (), *, combination: Combination | str = RULER, now: float | None = None
) -> tuple[Score, ...]:
    """Return what is to be kept of a group's rewards: each criterion's values and the result; nothing for `ruler`.

    Giving them again replaces the result, whatever the combination, and the values under the same rules.

    Args:
        group: as in `rewards_G`.
        scores: as in `rewards_G`.
        combination: as in `rewards_G`.
        now: `Score.at`; the present unless given.
    """
    if isinstance(combination, str):
        combination = load_combination(combination)
    if combination is RULER:
        return ()
    at = time.time() if now is None else now
    whole = with_scores(group, scores)
    rewards = rewards_G(whole, combination=combination)
    results = tuple(
        Score(
            _score_id(group.id, sibling.id), sibling.id, REWARD_NAME, reward, COMBINED, at,
            comment=combination.name, group_id=group.id, rubric=combination.version,
        )
        for sibling, reward in zip(group.trajectories, rewards, strict=True)
        if reward is not None
    )  # fmt: skip
    return (*criterion_scores(whole, combination.criteria, now=at), *results)


def _score_id(group_id: str, trajectory_id: str) -> str:
    key = "\0".join((COMBINED, group_id, trajectory_id))
    return hashlib.sha256(key.encode("utf-8", "backslashreplace")).hexdigest()[:32]
