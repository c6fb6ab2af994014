"""Scores stand side by side: finding the one that counts. Pure.

Of several with one name and source the newest counts, of two that are equally new the later one in the record. What is
no finite number is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from art_patch.types import Group, Score, Trajectory


def with_scores(group: Group, scores: Iterable[Score]) -> Group:
    """Return the group with further scores of its siblings; those of other trajectories are passed over."""
    further: dict[str, list[Score]] = {}
    for score in scores:
        further.setdefault(score.trajectory_id, []).append(score)
    if not further:
        return group
    siblings = (replace(each, scores=(*each.scores, *further.get(each.id, ()))) for each in group.trajectories)
    return replace(group, trajectories=tuple(siblings))


def newest(trajectory: Trajectory, name: str, sources: Collection[str], *, group_id: str | None = None) -> float | None:
    """Return the value of the score that counts; `None` if there is none.

    Args:
        trajectory: what was judged.
        name: of the score.
        sources: who may have given it.
        group_id: the group that it must have been given in, for scores that mean something in one group only.
    """
    found: Score | None = None
    for score in trajectory.scores:
        if score.name != name or score.source not in sources or not math.isfinite(score.value):
            continue
        if (group_id is None or score.group_id == group_id) and (found is None or score.at >= found.at):
            found = score
    return None if found is None else found.value
