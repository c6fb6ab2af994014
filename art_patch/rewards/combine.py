"""The one rule that makes a trajectory's reward from the scores that stand side by side. Pure.

**A score named `reward` that a user or their code gave, else the RULER score of this very group, else none.** Where
there are several of a kind, the newest counts. Other scores (`thumbs`, a criterion's, RULER's from another group) are
kept and shown and do not enter.

The rule looks at one trajectory at a time, so a group in which only some have a `reward` mixes the user's scale with
RULER's 0..1: give rewards from 0 to 1, or give them to all siblings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from art_patch.records import Group, Score
from art_patch.rewards.judge import SCORE_NAME, SCORE_SOURCE

REWARD_NAME = "reward"
REWARD_SOURCES = ("user", "code")


def rewards_G(group: Group, scores: Iterable[Score] = ()) -> tuple[float | None, ...]:
    """Return the reward of each of the G siblings, in the order of `group.trajectories`.

    Args:
        group: siblings, with the scores that were stored with them.
        scores: further scores, such as those that were just given; those of other trajectories are passed over.

    Returns:
        One finite number each; `None` where a sibling has no reward. `None` is never to be read as zero.
    """
    given: dict[str, Score] = {}
    ruler: dict[str, Score] = {}
    for score in (*(score for sibling in group.trajectories for score in sibling.scores), *scores):
        if not math.isfinite(score.value):
            continue
        if score.name == REWARD_NAME and score.source in REWARD_SOURCES:
            _keep_newest(given, score)
        elif score.name == SCORE_NAME and score.source == SCORE_SOURCE and score.group_id == group.id:
            _keep_newest(ruler, score)
    counts = ruler | given
    return tuple(counts[s.id].value if s.id in counts else None for s in group.trajectories)


def _keep_newest(kept: dict[str, Score], score: Score) -> None:
    known = kept.get(score.trajectory_id)
    if known is None or score.at >= known.at:
        kept[score.trajectory_id] = score
