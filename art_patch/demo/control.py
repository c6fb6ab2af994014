"""The control: a judge whose scores are dealt out at random, so that nothing can be learned from them.

They are dealt to siblings and not to transcripts. RULER shows answers that are alike once; a score dealt to such a
transcript would be that of all its siblings, so that answers which many gave would be rewarded by another rule than
those which one gave. That is no longer chance, and a policy learns from it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from art_patch.rewards import JudgeReport, OnScored, OrderedJudge
from art_patch.types import Group, Score


class DealtOut:
    """Asks a judge, and deals the scores of each group out to its siblings."""

    def __init__(self, judge: OrderedJudge, seed: int) -> None:
        """Deal out what `judge` gives."""
        self._judge = judge
        self._random = random.Random(seed)

    def score_groups(
        self,
        groups: Sequence[Group],
        *,
        known: Iterable[Score] = (),
        on_scored: OnScored | None = None,
        **more: Any,
    ) -> JudgeReport:
        """Return a sibling's score for each sibling; what is known was dealt out before and stays."""
        dealt: dict[str, float] = {}

        def deal(group: Group, scores: Sequence[Score], usage: Any) -> None:
            values = [score.value for score in scores]
            self._random.shuffle(values)
            dealt.update(zip((score.id for score in scores), values, strict=True))
            if on_scored is not None:
                on_scored(group, [self._of(score, dealt) for score in scores], usage)

        report = self._judge.score_groups(groups, known=known, on_scored=deal, **more)
        return replace(report, scores=tuple(self._of(score, dealt) for score in report.scores))

    @staticmethod
    def _of(score: Score, dealt: dict[str, float]) -> Score:
        return replace(score, value=dealt.get(score.id, score.value))
