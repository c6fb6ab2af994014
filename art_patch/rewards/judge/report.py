"""What comes of judging: scores, why there are none, and what it took."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from art_patch.rewards.judge.verdict import Verdict
from art_patch.types import Group, Judgement, Score

SCORE_NAME = "ruler"
SCORE_SOURCE = "ruler"


@dataclass(frozen=True, slots=True)
class JudgeReport:
    """What came of judging some groups.

    Attributes:
        scores: one for each trajectory of each group that was judged or was known already.
        unscored: group id -> why the group has no scores.
        calls: requests made, repair tries and retries included.
        prompt_tokens: as the judge's server counted them.
        completion_tokens: as the judge's server counted them.
        cost_usd: `None` where the price of an answer is not known.
        judgements: the same for each group that was asked about.
    """

    scores: tuple[Score, ...]
    unscored: dict[str, str]
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None
    judgements: tuple[Judgement, ...] = ()


def known_scores(
    groups: Sequence[Group], scores: Iterable[Score], *, judge: str, rubric: str
) -> dict[str, tuple[Score, ...]]:
    """Return group id -> its scores, for the groups whose every sibling has one from this judge under this rubric."""
    found: dict[str, dict[str, Score]] = {group.id: {} for group in groups}
    for score in scores:
        ours = (score.name, score.source, score.judge, score.rubric) == (SCORE_NAME, SCORE_SOURCE, judge, rubric)
        if ours and score.group_id in found:
            found[score.group_id][score.trajectory_id] = score
    return {
        group.id: tuple(found[group.id][sibling.id] for sibling in group.trajectories)
        for group in groups
        if all(sibling.id in found[group.id] for sibling in group.trajectories)
    }


def make_scores(
    group: Group, verdicts: Mapping[str, Verdict], *, judge: str, rubric: str, at: float
) -> tuple[Score, ...]:
    """Return a score for each verdict, by trajectory id.

    Ids are derived: judging the same group again under the same rubric replaces the scores.
    """
    return tuple(
        Score(
            id=derived_id(SCORE_NAME, group.id, key, rubric, judge),
            trajectory_id=key,
            name=SCORE_NAME,
            value=verdict.score,
            source=SCORE_SOURCE,
            at=at,
            comment=verdict.explanation,
            group_id=group.id,
            rubric=rubric,
            judge=judge,
        )
        for key, verdict in verdicts.items()
    )


def derived_id(*what: str) -> str:
    """Return the id that these words always give."""
    return hashlib.sha256("\0".join(what).encode("utf-8", "surrogatepass")).hexdigest()[:32]
