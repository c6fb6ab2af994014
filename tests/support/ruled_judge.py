"""A judge that scores by a rule of the trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from art_patch.errors import JudgeError
from art_patch.rewards import JudgeReport
from art_patch.trajectories import transcript
from art_patch.types import Group, Judgement, Score, Trajectory

Rule = Callable[[Trajectory, str], float]


class Fake:
    """Scores by a rule of a trajectory and the order; has no opinion on groups in `mute`."""

    def __init__(self, rule: Rule, mute: Iterable[str] = (), mute_in: str = "") -> None:
        self.rule = rule
        self.mute = set(mute)
        self.mute_in = mute_in
        self.asked: list[tuple[str, list[str], tuple[Score, ...]]] = []

    def score_groups(
        self,
        groups: Sequence[Group],
        *,
        order: str = "shuffled",
        known: Iterable[Score] = (),
        purpose: str = "score",
        on_scored: Any = None,
        on_judgement: Any = None,
        progress: Any = None,
    ) -> JudgeReport:
        self.asked.append((purpose, [group.id for group in groups], tuple(known)))
        scores: list[Score] = []
        unscored: dict[str, str] = {}
        for done, group in enumerate(groups, 1):
            if group.id in self.mute or purpose == self.mute_in:
                unscored[group.id] = "mute"
            else:
                given = [
                    Score(f"{group.id} {t.id}", t.id, "ruler", self.rule(t, order), "ruler", 1.0, "why", group.id)
                    for t in group.trajectories
                ]
                scores += given
                if on_scored:
                    on_scored(group, given, None)
                if on_judgement:
                    key = f"{group.id} {purpose}"
                    on_judgement(Judgement(key, group.id, 1.0, "fake", "r", purpose, "ok", facts={"order": order}))
            if progress:
                progress(done, len(groups))
        if groups and not scores:
            raise JudgeError("all mute")
        usage = {"calls": len(groups), "prompt_tokens": 10 * len(groups), "completion_tokens": len(groups)}
        return JudgeReport(tuple(scores), unscored, **usage, cost_usd=0.01 * len(groups))


def said(trajectory: Trajectory) -> str:
    return transcript(trajectory)[-1].get("content") or ""
