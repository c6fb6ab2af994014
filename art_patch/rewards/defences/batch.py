"""A batch of groups judged with suspicion: groups in, scores to train on out, and a reason for whatever is not.

    users' share -> planted answers -> first pass -> some in the reverse order -> agreement, caps, alarms

`planted_answers` and `suspicion` decide; this asks. A planted answer is judged before anything else, in a copy of its
group: a judge that falls for too many is asked no further. Neither the planted answers nor the scores in their copies
leave this file. What is quarantined is not to be trained on; what has no score, or was left, is as it was before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol

from art_patch.errors import JudgeError
from art_patch.rewards.defences import suspicion
from art_patch.rewards.defences.planted_answers import PlantedAnswer, plant, too_many_missed, why_missed
from art_patch.rewards.defences.suspicion import DefenceConfig
from art_patch.rewards.judge.question import Order
from art_patch.rewards.judge.ruler import JudgeReport, OnJudgement, OnScored, Progress
from art_patch.types import Group, Score

_OVER_SHARE = "a user's groups are more than their share of the batch"


class OrderedJudge(Protocol):
    """Ranks siblings in one order and its reverse (`judge.Judge`)."""

    def score_groups(
        self,
        groups: Sequence[Group],
        *,
        order: Order = "shuffled",
        known: Iterable[Score] = (),
        purpose: str = "score",
        on_scored: OnScored | None = None,
        on_judgement: OnJudgement | None = None,
        progress: Progress | None = None,
    ) -> JudgeReport:
        """Return a score for each sibling; `reversed` shows them in the reverse of the order that `shuffled` has."""
        ...


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    """What came of a batch. Every group is in one place: scored, unscored, quarantined, or left.

    Attributes:
        scores: one for each sibling of each group that may be trained on: the mean of its passes, capped if flagged.
        unscored: group id -> why the judge has no scores for it.
        quarantined: group id -> why its scores are not to be trained on.
        alarms: what looks wrong with the batch or the judge, in words.
        flags: trajectory id -> what in its transcript speaks to a judge, and who wrote it.
        capped: trajectory id -> what the judge gave, for those that got less.
        planted_answers: how many known-bad siblings were judged, and how many of them came out at the bottom.
        agreement: mean share of the pairs that both passes ordered alike; `None` if nothing was judged twice.
        length_correlation: of score and length within the groups; `None` if too little differed.
        left: why groups were not judged -> how many; they wait for the next batch.
        calls: requests made, all passes and planted_answers together.
        prompt_tokens: as the judge's server counted them.
        completion_tokens: as the judge's server counted them.
        cost_usd: `None` where the price of an answer is not known.
    """

    scores: tuple[Score, ...] = ()
    unscored: dict[str, str] = field(default_factory=dict[str, str])
    quarantined: dict[str, str] = field(default_factory=dict[str, str])
    alarms: tuple[str, ...] = ()
    flags: dict[str, str] = field(default_factory=dict[str, str])
    capped: dict[str, float] = field(default_factory=dict[str, float])
    planted_answers: tuple[int, int] = (0, 0)
    agreement: float | None = None
    length_correlation: float | None = None
    left: dict[str, int] = field(default_factory=dict[str, int])
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = 0.0


def judge_batch(
    groups: Sequence[Group],
    judge: OrderedJudge,
    config: DefenceConfig | None = None,
    *,
    seed: int,
    known: Iterable[Score] = (),
    on_scored: OnScored | None = None,
    on_judgement: OnJudgement | None = None,
    progress: Progress | None = None,
) -> JudgedBatch:
    """Return the scores of `groups` that may be trained on, and what was found on the way.

    Args:
        groups: what to judge; their ids and their trajectories' are all different.
        judge: asked up to three times: planted_answers, all groups, some in the reverse order.
        config: how much it is trusted.
        seed: decides which groups get planted answers and a second pass; one that nobody can foresee.
        known: scores that `on_scored` was told of before; their groups are not asked about again in the first pass.
        on_scored: told of each group of the first pass as soon as it is judged. Such scores are not defended yet: keep
            them against a kill, and train on none but those that are returned.
        on_judgement: told what each question took; its purpose is `planted answer`, `score` or `second pass`.
        progress: told after each group, planted answers and second passes counted.

    Raises:
        JudgeError: not one group could be judged.
    """
    config = config or DefenceConfig()
    rng = random.Random(seed)
    taken, left = suspicion.within_user_share(groups, config)
    planted_answers = plant(taken, config, rng)
    twice = rng.sample(taken, math.ceil(config.double_share * len(taken)))
    asking = _Asking(judge, len(planted_answers) + len(taken) + len(twice), on_judgement, progress)
    result = JudgedBatch(left={_OVER_SHARE: len(left)} if left else {})

    planted, misses, alarms, failed = _judge_planted(asking, planted_answers, config)
    result = replace(result, planted_answers=(planted, planted - len(misses)), alarms=(*alarms, *misses))
    if too_many_missed(planted, len(misses), config):
        reason = f"the judge fell for {len(misses)} of {planted} planted_answers: {misses[0]}"
        return asking.paid(replace(result, quarantined={group.id: reason for group in taken}))

    first = asking.about(taken, known=known, on_scored=on_scored) if taken else JudgeReport((), {}, cost_usd=0.0)
    if failed is not None and not first.scores:
        raise failed  # all that was within the budget was asked, and not once answered
    second, unscored = _judge_again(asking, [group for group in twice if group.id not in first.unscored])
    unscored = {**first.unscored, **unscored}
    scored = [group for group in taken if group.id not in unscored]
    return asking.paid(_defend(replace(result, unscored=unscored), scored, first.scores, second, config))


def _judge_planted(
    asking: _Asking, planted_answers: Sequence[PlantedAnswer], config: DefenceConfig
) -> tuple[int, list[str], list[str], JudgeError | None]:
    """How many were judged, why each that was missed was, an alarm if nothing can be said, and the judge's failure."""
    if not planted_answers:
        return 0, [], [], None
    try:
        report = asking.about([planted_answer.group for planted_answer in planted_answers], purpose="planted answer")
    except JudgeError as error:  # perhaps just these few; whether the judge is down is for the first pass to find out
        return 0, [], [f"no planted answer could be judged: {error}"], error
    if len(report.unscored) == len(planted_answers):
        return 0, [], [f"no planted answer could be judged: {next(iter(report.unscored.values()))}"], None
    values = {(score.group_id, score.trajectory_id): score.value for score in report.scores}
    judged = [planted_answer for planted_answer in planted_answers if planted_answer.group.id not in report.unscored]
    found = (
        (c.group.id, why_missed(c, {t.id: values[c.group.id, t.id] for t in c.group.trajectories}, config))
        for c in judged
    )
    return len(judged), [f"{name}: {reason}" for name, reason in found if reason], [], None


def _judge_again(
    asking: _Asking, groups: Sequence[Group]
) -> tuple[dict[tuple[str | None, str], float], dict[str, str]]:
    """Values by group and trajectory in the reverse order, and why a group has none: half a defence is none."""
    if not groups:
        return {}, {}
    try:
        report = asking.about(groups, order="reversed", purpose="second pass")
    except JudgeError as error:
        return {}, {group.id: f"second pass: {error}" for group in groups}
    values = {(score.group_id, score.trajectory_id): score.value for score in report.scores}
    return values, {group_id: f"second pass: {reason}" for group_id, reason in report.unscored.items()}


def _defend(
    result: JudgedBatch,
    groups: Sequence[Group],
    given: Sequence[Score],
    second: dict[tuple[str | None, str], float],
    config: DefenceConfig,
) -> JudgedBatch:
    """The result with agreement, flags, caps and alarms, from what the judge gave in both orders."""
    score_of = {(score.group_id, score.trajectory_id): score for score in given}
    quarantined, flags, capped = dict[str, str](), dict[str, str](), dict[str, float]()
    agreements: list[float] = []
    lengths: list[tuple[list[float], list[int]]] = []
    scores: list[Score] = []
    for group in groups:
        keys = [(group.id, sibling.id) for sibling in group.trajectories]
        values = [score_of[key].value for key in keys]
        if all(key in second for key in keys):
            again = [second[key] for key in keys]
            agreements.append(suspicion.pairwise_agreement(values, again, config.tie))
            if (reason := suspicion.why_disagreed(values, again, config)) is not None:
                quarantined[group.id] = reason
            values = [fmean(pair) for pair in zip(values, again, strict=True)]
        lengths.append((values, suspicion.written_length(group)))
        value_of = {sibling.id: value for sibling, value in zip(group.trajectories, values, strict=True)}
        flagged = suspicion.flags(group)
        flags |= {name: flag.reason for name, flag in flagged.items()}
        caps = suspicion.caps(value_of, flagged, config)
        if group.id not in quarantined:
            capped |= {name: value_of[name] for name in caps}
            for key in keys:
                cap = caps.get(key[1])
                scores.append(_score(score_of[key], value_of[key[1]], cap, flags.get(key[1], "")))
    alarms = list(result.alarms)
    longer = suspicion.length_correlation(lengths)
    if longer is not None and longer > config.max_length_correlation:
        alarms.append(f"longer attempts score higher: rank correlation {longer:.2f}")
    # One group in disagreement is its own affair; the groups that were judged once are in the same hands.
    if len(quarantined) > 1 and len(quarantined) > len(agreements) / 2:
        alarms.append(f"the judge disagreed with itself on {len(quarantined)} of {len(agreements)} groups")
    if config.strict and alarms:
        quarantined |= {group.id: f"strict: {alarms[0]}" for group in groups if group.id not in quarantined}
        scores, capped = [], {}
    return replace(
        result,
        scores=tuple(scores),
        quarantined=quarantined,
        alarms=tuple(alarms),
        flags=flags,
        capped=capped,
        agreement=fmean(agreements) if agreements else None,
        length_correlation=longer,
    )


def _score(given: Score, value: float, cap: float | None, reason: str) -> Score:
    if cap is None:
        return replace(given, value=value)
    note = f"[capped at {cap:.2f}, was {value:.2f}: {reason}]"
    return replace(given, value=cap, comment=f"{given.comment} {note}" if given.comment else note)


class _Asking:
    """The judge, with one progress and one bill for all that it is asked."""

    def __init__(
        self, judge: OrderedJudge, total: int, on_judgement: OnJudgement | None, progress: Progress | None
    ) -> None:
        self._judge = judge
        self._total = total
        self._on_judgement = on_judgement
        self._progress = progress
        self._done = 0
        self._reports: list[JudgeReport] = []

    def about(self, groups: Sequence[Group], **how: Any) -> JudgeReport:
        before, self._done = self._done, self._done + len(groups)
        progress = self._progress
        step: Progress | None = None if progress is None else lambda done, _: progress(before + done, self._total)
        report = self._judge.score_groups(groups, on_judgement=self._on_judgement, progress=step, **how)
        self._reports.append(report)
        return report

    def paid(self, result: JudgedBatch) -> JudgedBatch:
        """The result with what all of it cost."""
        costs = [report.cost_usd for report in self._reports]
        return replace(
            result,
            calls=sum(report.calls for report in self._reports),
            prompt_tokens=sum(report.prompt_tokens for report in self._reports),
            completion_tokens=sum(report.completion_tokens for report in self._reports),
            cost_usd=None if None in costs else sum(cost for cost in costs if cost is not None),
        )
