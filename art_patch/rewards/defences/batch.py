"""Judges a batch of groups with defences against a judge that can be fooled.

    leave out a user's groups beyond their share of the batch -> ask about planted answers -> judge each group once
    -> some again in the reverse order -> some again without the turns after the judged answer
    -> agreement of these scores, limits of suspicious ones, alarms

`suspicion` contains the decisions; this module calls the judge. It returns the scores to train on, and a reason for
each group without scores. Planted answers (bad for certain, in copies of groups) are judged first. If the judge misses
too many of them, it is not asked about the groups at all. Scores of planted answers and of their copied groups are
never returned.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol

from art_patch._lib.ids import derived_id
from art_patch.errors import JudgeError
from art_patch.rewards.defences import suspicion
from art_patch.rewards.defences.suspicion import DefenceConfig
from art_patch.rewards.judge.client import Usage, total
from art_patch.rewards.judge.ruler import JudgeReport, OnJudgement, OnScored, Progress
from art_patch.types import JSON, Group, Judgement, Score

_BOTH_WAYS = "both_ways"

# Group id -> trajectory id -> score.
Values = dict[str | None, dict[str, float]]

_TURNED = "without what followed, the judge orders the attempts the other way round"
_OVER_SHARE = "a user's groups are more than their share of the batch"


class OrderedJudge(Protocol):
    """Protocol of a judge that can show siblings in one order and in the reverse order; `Judge` is such a judge."""

    def score_groups(
        self, groups: Sequence[Group], *args: Any, progress: Progress | None = None, **how: Any
    ) -> JudgeReport:
        """Score the siblings of each group as `Judge.score_groups` does; `how` holds further arguments of its."""
        ...


@dataclass(frozen=True, slots=True)
class JudgedBatch(Usage):
    """The result of `judge_batch`. Each group is scored, unscored, quarantined, or left for the next batch."""

    # For each sibling of each group that may be trained on: the mean of its passes, capped if it is flagged.
    scores: tuple[Score, ...] = ()
    unscored: dict[str, str] = field(default_factory=dict[str, str])  # group id -> why the judge gave no scores
    quarantined: dict[str, str] = field(default_factory=dict[str, str])  # group id -> why not to train on it
    alarms: tuple[str, ...] = ()  # what looks wrong with the batch or the judge
    flags: dict[str, str] = field(default_factory=dict[str, str])  # trajectory id -> text that addresses a judge
    capped: dict[str, float] = field(default_factory=dict[str, float])  # trajectory id -> score before the cap
    planted_answers: tuple[int, int] = (0, 0)  # judged, and recognised as bad
    agreement: float | None = None  # mean share of pairs that both orders rank alike; `None` without a second pass
    length_correlation: float | None = None  # of score and length within groups; `None` if too little differs
    left: dict[str, int] = field(default_factory=dict[str, int])  # reason -> groups that wait for the next batch


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
    """Judge a batch up to three times (planted answers, all groups, some in the reverse order); return its scores.

    Args:
        groups: the groups to judge; the ids of groups and trajectories are distinct.
        seed: chooses the groups that get planted answers and those of the second pass. Users must not be able to
            predict it.
        known: scores that `on_scored` received in an earlier call; the first pass does not ask the judge about their
            groups again.
        on_scored: receives the scores of each group of the first pass at once, before the defences are applied. Store
            them in case the process is killed, and train on the returned scores alone.
        on_judgement: receives the record of each question to the judge, with purpose `planted answer`, `score`,
            `second pass` or `without what followed`. The `facts` of a second pass have the scores of both orders, which
            `both_ways` reads. If it agrees with the first, they have the judge's `noise` and the number of `siblings`
            from which it was computed, too; `noise_of_judges` reads them.

    Raises:
        JudgeError: no group could be judged.
    """
    config = config or DefenceConfig()
    rng = random.Random(seed)
    taken, left = suspicion.within_user_share(groups, config)
    planted = suspicion.plant(taken, config, rng)
    twice = rng.sample(taken, math.ceil(config.double_share * len(taken)))
    followed = [group for group in taken if group.followed]
    blind = rng.sample(followed, math.ceil(config.blind_share * len(followed)))
    asking = _Asking(judge, len(planted) + len(taken) + len(twice) + len(blind), on_judgement, progress)

    alarms: list[str] = []
    values, unscored, failed = asking.try_about([one.group for one in planted], purpose="planted answer")
    judged = [one for one in planted if one.group.id in values]
    if planted and not judged:
        alarms.append(f"no planted answer could be judged: {failed or next(iter(unscored.values()))}")
    found = ((one.group.id, suspicion.why_missed(one, values[one.group.id], config)) for one in judged)
    misses = [f"{name}: {reason}" for name, reason in found if reason]
    result = JudgedBatch(
        left={_OVER_SHARE: len(left)} if left else {},
        planted_answers=(len(judged), len(judged) - len(misses)),
        alarms=(*alarms, *misses),
    )
    if suspicion.too_many_missed(len(judged), len(misses), config):
        reason = f"the judge fell for {len(misses)} of {len(judged)} planted answers: {misses[0]}"
        return asking.paid(replace(result, quarantined={group.id: reason for group in taken}))

    first = asking.about(taken, known=known, on_scored=on_scored) if taken else JudgeReport((), {})
    if failed is not None and not first.scores:
        raise failed  # the judge was asked about everything that the budget allows, and never answered
    # A group that was chosen for a second pass and got none stays unscored: half of a defence is no defence.
    twice = [group for group in twice if group.id not in first.unscored]
    noting = _NoiseNotes(_values_of(first.scores), config, on_judgement)
    second, missing, _ = asking.try_about(
        twice, order="reversed", purpose="second pass", on_scored=noting.keep, on_judgement=noting.note
    )
    unscored = first.unscored | {name: f"second pass: {reason}" for name, reason in missing.items()}
    unseen = [replace(group, followed=()) for group in blind if group.id not in unscored]
    third, missing, _ = asking.try_about(unseen, purpose="without what followed")
    unscored |= {name: f"without what followed: {reason}" for name, reason in missing.items()}
    scored = [group for group in taken if group.id not in unscored]
    return asking.paid(_defend(replace(result, unscored=unscored), scored, first.scores, second, third, config))


def both_ways(facts: JSON, group_id: str, runs: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Return the scores that a judge gave these runs in one order and in the reverse one; empty if it was not noted.

    `facts` are those of the group's judgement in the second pass.
    """
    noted = facts.get(_BOTH_WAYS, {})
    found = {run: noted.get(_sibling(group_id, run)) for run in runs}
    return {run: (pair[0], pair[1]) for run, pair in found.items() if pair is not None}


def _sibling(group_id: str, run: str) -> str:
    # A hash, because a judgement outlives its runs, and an id that the app chose may hold personal data.
    return derived_id("both ways", group_id, run)


def _defend(
    result: JudgedBatch,
    groups: Sequence[Group],
    given: Sequence[Score],
    second: Values,
    blind: Values,
    config: DefenceConfig,
) -> JudgedBatch:
    score_of = {(score.group_id, score.trajectory_id): score for score in given}
    quarantined, flags, capped = dict[str, str](), dict[str, str](), dict[str, float]()
    disagreed = 0
    agreements: list[float] = []
    lengths: list[tuple[list[float], list[int]]] = []
    scores: list[Score] = []
    for group in groups:
        names = [sibling.id for sibling in group.trajectories]
        values = [score_of[group.id, name].value for name in names]
        if group.id in second:
            again = [second[group.id][name] for name in names]
            agreements.append(suspicion.pairwise_agreement(values, again, config.tie))
            if (reason := suspicion.why_disagreed(values, again, config)) is not None:
                quarantined[group.id] = reason
                disagreed += 1
            values = [fmean(pair) for pair in zip(values, again, strict=True)]
        if group.id in blind and suspicion.turns(values, [blind[group.id][name] for name in names], config):
            quarantined.setdefault(group.id, _TURNED)
        lengths.append((values, suspicion.written_length(group)))
        value_of = dict(zip(names, values, strict=True))
        flagged = suspicion.flags(group)
        flags |= {name: flag.reason for name, flag in flagged.items()}
        caps = suspicion.caps(value_of, flagged, config)
        if group.id not in quarantined:
            capped |= {name: value_of[name] for name in caps}
            for name in names:
                scores.append(_score(score_of[group.id, name], value_of[name], caps.get(name), flags.get(name, "")))
    alarms = list(result.alarms)
    longer = suspicion.length_correlation(lengths)
    if longer is not None and longer > config.max_length_correlation:
        alarms.append(f"longer attempts score higher: rank correlation {longer:.2f}")
    # One group may disagree by chance. If most do, the groups that were judged only once are no better.
    if disagreed > 1 and disagreed > len(agreements) / 2:
        alarms.append(f"the judge disagreed with itself on {disagreed} of {len(agreements)} groups")
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


def _values_of(scores: Iterable[Score]) -> Values:
    values: Values = {}
    for score in scores:
        values.setdefault(score.group_id, {})[score.trajectory_id] = score.value
    return values


@dataclass
class _NoiseNotes:
    """Adds to the record of a group's second pass how far its scores are from those of the first pass."""

    first: Values
    config: DefenceConfig
    on_judgement: OnJudgement | None
    second: Values = field(default_factory=Values)

    def keep(self, group: Group, scores: Sequence[Score], _usage: object) -> None:
        self.second |= _values_of(scores)

    def note(self, judgement: Judgement) -> None:
        if self.on_judgement is None:
            return
        again = self.second.get(judgement.group_id, {})
        values = [self.first[judgement.group_id][name] for name in again]
        if again:
            pairs = zip(again, values, again.values(), strict=True)
            found = {_BOTH_WAYS: {_sibling(judgement.group_id, name): [one, two] for name, one, two in pairs}}
            judgement = replace(judgement, facts={**judgement.facts, **found})
        # A quarantined group is never trained on, so its disagreement says nothing about the rewards that are.
        if again and suspicion.why_disagreed(values, list(again.values()), self.config) is None:
            found = {"noise": suspicion.noise(values, list(again.values())), "siblings": len(again)}
            judgement = replace(judgement, facts={**judgement.facts, **found})
        self.on_judgement(judgement)


def _score(given: Score, value: float, cap: float | None, reason: str) -> Score:
    if cap is None:
        return replace(given, value=value)
    note = f"[capped at {cap:.2f}, was {value:.2f}: {reason}]"
    return replace(given, value=cap, comment=f"{given.comment} {note}" if given.comment else note)


@dataclass
class _Asking:
    """Asks the judge, with one progress and one bill over all passes."""

    judge: OrderedJudge
    total: int
    on_judgement: OnJudgement | None
    progress: Progress | None
    done: int = 0
    reports: list[JudgeReport] = field(default_factory=list[JudgeReport])

    def about(self, groups: Sequence[Group], **how: Any) -> JudgeReport:
        before, progress, self.done = self.done, self.progress, self.done + len(groups)
        step: Progress | None = None if progress is None else lambda done, _: progress(before + done, self.total)
        report = self.judge.score_groups(groups, progress=step, **({"on_judgement": self.on_judgement} | how))
        self.reports.append(report)
        return report

    def try_about(self, groups: Sequence[Group], **how: Any) -> tuple[Values, dict[str, str], JudgeError | None]:
        """Ask in a pass whose failure is not the batch's; return scores, why groups have none, and the failure."""
        if not groups:
            return {}, {}, None
        try:
            report = self.about(groups, **how)
        except JudgeError as error:  # perhaps for these few groups alone; the first pass finds out if the judge is down
            return {}, {group.id: str(error) for group in groups}, error
        return _values_of(report.scores), report.unscored, None

    def paid(self, result: JudgedBatch) -> JudgedBatch:
        """Return the result with the costs of all passes."""
        return replace(result, **asdict(total(self.reports)))
