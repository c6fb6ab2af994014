"""The step `gate`: candidate and champion answer the same held-out scenarios, and the gate decides between them.

Where upstream is the champion, the recorded answers of its present models stand in for new ones.

Both policies answer held-out turns and the user's suite. With `--replay` they repeat whole runs of scenarios that can
be repeated, in place of single turns. The verdict is written to the ledger with its metrics: judge, rubric, a hash of
all prompts, and one row for each check.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple, cast

from art_patch import gate, promotion, rewards
from art_patch._lib.ids import new_id
from art_patch.errors import JudgeError
from art_patch.pipeline.cycle_run import Cycle
from art_patch.pipeline.replay_runs import Reruns, rerun
from art_patch.pipeline.resample_turns import ask_both, is_text
from art_patch.recording import Redactor
from art_patch.store import GateTurn
from art_patch.types import JSON, UPSTREAM, UPSTREAM_ARM, Call, Choice, Group, Policy, Score, Trajectory, TrajectoryInfo

_ORDERS: tuple[rewards.Order, ...] = ("shuffled", "reversed")


def run_gate(
    run: Cycle, candidate: Policy, champion: Policy | None, config: gate.GateConfig | None = None, *, keeps: bool = True
) -> gate.Verdict:
    """Let both policies answer and the judge rank the answers, and return the verdict; no policy's state is changed.

    Without a `champion` the candidate is compared with upstream's recorded answers. `config` overrules the cycle's.
    `keeps`: the answers are kept for people, who read them beside the verdict in the ledger.

    Raises `EngineError`, also if a prompt is rendered otherwise than recorded, and `JudgeError` if an order has no
    score.
    """
    config = config or run.config.gate
    if run.teacher is not None:
        run.teacher.require_same_tokens(candidate.base)
    # The candidate's step as seed: the same candidate is asked the same questions if a killed gate runs again.
    checks, seed = run.config.checks, candidate.step
    held_out = held_out_for(run, config, seed=seed, of_upstream=champion is None)
    promotion.ensure_loaded(run.engine, candidate.name)
    reruns, suite = Reruns(), config.suite
    if champion is not None:
        promotion.ensure_loaded(run.engine, champion.name)
        reruns = rerun(run, held_out, candidate, champion)
    else:
        suite = ()  # upstream is not asked, so it has no answer to these
    turns = [turn for turn in held_out.turns if turn.scenario_key not in reruns.keys and is_text(turn.call)]
    answers = ask_both(run, (*turns, *suite), candidate, champion)
    blind = partial(gate.blind_answers, new_id=new_id, exact=run.teacher is not None)
    comparisons = [(a.turn, *blind(a.turn, a.candidate.choices, a.champion.choices)) for a in answers]
    compared = _compared_in(answers, reruns.repeated)
    ours, theirs = ([run for one in compared for run in one.sides[side]] for side in (0, 1))
    checked = rewards.run_checks(ours, checks), rewards.run_checks(theirs, checks)
    values = _check_values(compared, checked, checks)
    given = [score for side in checked for score in side.scores]
    who = "the judge" if run.teacher is None or run.gate_judge is not None else "the teacher"
    scored = judge_both(run, comparisons, reruns.repeated, given, judge=run.gate_judge or run.judge)
    beside = None
    if run.gate_judge is not None:
        # It decides nothing here, so its failure is no reason to lose the gate's work.
        with suppress(JudgeError):
            beside = judge_both(run, comparisons, reruns.repeated, given, judge=run.judge)
    # A lost run is a scenario without a score, and not one that was never asked: too many of them reject.
    judged = replace(scored.judged, unscored=(*scored.judged.unscored, *(turn.scenario_key for turn in reruns.lost)))
    # The suite is a check of its own: its prompts were chosen by a person and say nothing about traffic.
    traffic = [pair for pair in judged.pairs if not pair[0].startswith(gate.PREFIX)]
    verdict = gate.decide(traffic, config, seed=seed, user_of=held_out.user_of, group_of=held_out.groups)
    # Too few users give no bound. Then the scenarios are the units, and a canary decides for all users.
    user_of = gate.NO_USERS if "users_needed" in verdict.metrics else held_out.user_of
    everything = (*answers, *map(gate.answered_in, reruns.repeated))
    findings = (
        *_unscored(judged, reruns, config, who),
        *(_suite(judged, config, seed) if suite else ()),
        *gate.collapse_findings(everything, config, kl_nats=_kl_nats(candidate), seed=seed, user_of=user_of),
        *gate.failed_runs(reruns.repeated, config),
        *_check_findings(compared, checked, values, config, seed, user_of),
    )
    verdict = gate.with_findings(verdict, findings)
    gains = _gains(scored, beside, values, compared, user_of, seed, who)
    if gains and (words := gate.gains_in_words(gains[0], gains[1:])):
        verdict = replace(verdict, reason=f"{verdict.reason}; {words}")
    asked = (*(a.turn for a in answers), *(one.turn for one in reruns.repeated), *reruns.lost)
    metrics = _counts(asked, held_out, judged, scored, config) | dict(verdict.metrics)
    metrics["against"] = UPSTREAM_ARM if champion is None else champion.name
    if reruns.metrics is not None:
        metrics["reruns"] = dict(reruns.metrics) | ({"largest_reward": scored.largest} if scored.largest > 1 else {})
    metrics["checks"] = [asdict(finding) for finding in findings]
    metrics["gains"] = [gain.facts for gain in gains]
    metrics["results"] = gate.results(traffic, held_out.groups)
    if beside is not None:
        metrics["judge_calls"] += sum(report.calls for report in beside.reports)
    run.metrics["gate" if champion is not None else "upstream_gate"] = metrics
    if keeps:
        _keep_answers(run, candidate, champion, held_out.groups, comparisons, scored.reports)
    return replace(verdict, reason=_reason(verdict, held_out), metrics=metrics)


def held_out_for(run: Cycle, config: gate.GateConfig, *, seed: int, of_upstream: bool = False) -> gate.HeldOut:
    """Return the held-out turns to ask: none of users who just arrived, and not too many of one user.

    `of_upstream`: only those that the present models of upstream answered.
    """
    groups: Sequence[Group] = run.store.read.groups(state="formed", held_out=True)
    if of_upstream:
        since = run.store.evidence.upstream_since() or 0.0
        groups = [_upstreams(group, since) for group in groups]
    users = {t.info.user_id for group in groups for t in group.trajectories if t.info.user_id is not None}
    since, came = run.store.read.arrivals(sorted(users))
    # New accounts are cheap: without this rule, anybody could choose the questions of the gate overnight.
    new = frozenset[str]()
    if since is not None:
        new = gate.new_users(came, project_since=since, new_user_s=config.new_user_s, now=run.now)
    limits = {"scenarios": config.max_scenarios, "turns_per_scenario": config.turns_per_scenario}
    return gate.held_out_turns(groups, seed=seed, without=new, max_user_share=config.max_user_share, **limits)


def _upstreams(group: Group, since: float) -> Group:
    """Return a group with the calls alone that upstream has answered `since` then (seconds since the epoch)."""

    def is_upstreams(call: Call) -> bool:
        return call.policy is UPSTREAM and call.status == "ok" and call.started_at >= since

    runs = (replace(run, calls=tuple(filter(is_upstreams, run.calls))) for run in group.trajectories)
    return replace(group, trajectories=tuple(runs))


def _unscored(judged: gate.Judged, reruns: Reruns, config: gate.GateConfig, who: str) -> tuple[gate.Finding, ...]:
    # Turns without a score may be exactly the bad ones, so too many of them reject.
    asked = len(judged.pairs) + len(judged.unscored)
    share = len(judged.unscored) / asked if asked else 0.0
    words = f"{who} scored {'only ' if judged.unscored else ''}{len(judged.pairs)} of {asked} turns"
    if reruns.repeated or reruns.lost:
        words += f" and runs ({len(reruns.lost)} of the scenarios that were run again were lost)"
    return (gate.Finding("unscored", share, None, config.max_unscored, share <= config.max_unscored, words),)


def _suite(judged: gate.Judged, config: gate.GateConfig, seed: int) -> tuple[gate.Finding, ...]:
    """Return the finding on the user's suite; it fails if one of its prompts has no score."""
    if not config.suite:
        return ()
    if missing := [key for key in judged.unscored if key.startswith(gate.PREFIX)]:
        words = f"suite: {len(missing)} of {len(config.suite)} prompts have no score"
        return (gate.Finding("suite", None, None, config.max_worse, False, words),)
    pairs = [pair for pair in judged.pairs if pair[0].startswith(gate.PREFIX)]
    return (gate.not_worse("suite", pairs, allowed=config.max_worse, level=config.level, seed=seed),)


def _kl_nats(candidate: Policy) -> float | None:
    # The update measured it. A policy that was imported has no such metric.
    kl_nats: Any = candidate.metrics.get("train", {}).get("kl_nats")
    return float(kl_nats) if isinstance(kl_nats, int | float) else None


def _counts(
    asked: Sequence[gate.Turn], held_out: gate.HeldOut, judged: gate.Judged, scored: "Scored", config: gate.GateConfig
) -> dict[str, Any]:
    judgement = next((judgement for report in scored.reports for judgement in report.judgements), None)
    return {
        "turns": len(asked),
        "suite": len(config.suite),
        "unscored": len(judged.unscored),
        "left": dict(held_out.left),
        "order_disagreement": judged.order_disagreement,
        "judge": judgement.judge if judgement else None,
        "rubric": judgement.rubric if judgement else None,
        "judge_calls": sum(report.calls for report in scored.reports),
        "data_sha256": gate.data_hash(asked),
        "config": {name: value for name, value in asdict(replace(config, suite=())).items() if name != "suite"},
    }


def _reason(verdict: gate.Verdict, held_out: gate.HeldOut) -> str:
    # With too few scenarios the gate rejects, so a rejection says why others were not asked.
    if verdict.promote or not held_out.left:
        return verdict.reason
    left = "; ".join(f"{count} {why}" for why, count in held_out.left.items())
    return f"{verdict.reason} (held out but not asked: {left})"


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of candidate and champion in one gate.

    Rewards of repeated runs are divided by `largest`, the largest of them, so that they fit the judge's scale.
    """

    judged: gate.Judged  # for each turn; a repeated scenario counts as one
    reports: tuple[rewards.JudgeReport, ...]  # one for each order
    largest: float  # 1 if no reward is larger
    own: frozenset[str]  # keys of the scenarios that rewards by the app or by a check decided, and no judge


def judge_both(
    run: Cycle, turns: Sequence[gate.BlindComparison], repeated: Sequence[gate.Repeated],
    checked: Sequence[Score] = (), *, judge: rewards.OrderedJudge,
) -> Scored:  # fmt: skip
    """Let the judge rank the answers, and the runs without a reward of their own; average its scores over the orders.

    `checked` has the scores of the user's checks on the runs. `JudgeError` if an order has no score.
    """
    runs = [gate.blind_runs(one, new_id=new_id, exact=run.teacher is not None) for one in repeated]
    # A repeated run is scored like any run of the app: a reward by the app or by a check replaces the judge.
    known = [
        rewards.with_scores(replace(group, trajectories=one.runs), checked)
        for one, (_, group, _) in zip(repeated, runs, strict=True)
    ]
    rewards_of = partial(rewards.rewards_G, combination=run.config.combination)
    unknown = [group for (_, group, _), seen in zip(runs, known, strict=True) if None in rewards_of(seen)]
    own = frozenset(group.scenario_key for _, group, _ in runs) - {group.scenario_key for group in unknown}
    reports = _judge_reports(run, [*(group for _, group, _ in turns), *unknown], judge)
    of_turns = {sibling.id for _, group, _ in turns for sibling in group.trajectories}
    # Scores of turns come from the judge alone: an answer to a single turn has no reward of the app.
    orders = [{s.trajectory_id: s.value for s in report.scores if s.trajectory_id in of_turns} for report in reports]
    rewards_of_runs = [
        {
            sibling.id: reward
            for seen in known
            for sibling, reward in zip(seen.trajectories, rewards_of(seen, report.scores), strict=True)
            if reward is not None
        }
        for report in reports
    ]
    # The judge's scores lie in 0..1 and an app's rewards need not, but all scenarios are compared on one scale.
    largest = max([1.0, *(abs(reward) for of_runs in rewards_of_runs for reward in of_runs.values())])
    for order, of_runs in zip(orders, rewards_of_runs, strict=True):
        order |= {key: reward / largest for key, reward in of_runs.items()}
    return Scored(gate.merge_orders([*turns, *runs], orders), tuple(reports), largest, own)


def _judge_reports(run: Cycle, groups: Sequence[Group], judge: rewards.OrderedJudge) -> list[rewards.JudgeReport]:
    """Return the judge's report on the groups for each order. The judge's cache is not used."""
    orders = _ORDERS[: run.config.gate.orders]

    def report(place: int, order: rewards.Order) -> rewards.JudgeReport:
        before, total = place * len(groups), len(orders) * len(groups)
        return judge.score_groups(
            groups,
            order=order,
            # `known` stays empty: old scores were given beside other siblings, and the gate compares these two.
            purpose="gate",
            on_judgement=run.store.ledger.add_judgement,
            progress=lambda done, _: run.progress("gate: judge", before + done, total),
        )

    return [report(place, order) for place, order in enumerate(orders)]


class _Compared(NamedTuple):
    """What the user's checks score for one turn or scenario; `sides` has the candidate's runs, then the champion's."""

    scenario_key: str
    sides: tuple[tuple[Trajectory, ...], tuple[Trajectory, ...]]


_Values = Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]]
"""Name of a check's score -> its mean by place in `compared`, from 0 to 1, of the candidate and of the champion."""


def _compared_in(answers: Sequence[gate.Answered], repeated: Sequence[gate.Repeated]) -> list[_Compared]:
    """Return what the checks score: each answer to a turn as a run of one call, and the runs of repeated scenarios."""
    turns = [_Compared(a.turn.scenario_key, (_runs(a.turn, a.candidate), _runs(a.turn, a.champion))) for a in answers]
    return turns + [_Compared(one.turn.scenario_key, (one.candidate, one.champion)) for one in repeated]


def _check_findings(
    compared: Sequence[_Compared], found: tuple[rewards.Checked, rewards.Checked], values: _Values,
    config: gate.GateConfig, seed: int, user_of: Mapping[str, str | None],
) -> tuple[gate.Finding, ...]:  # fmt: skip
    """Return a finding for each score of the checks, and one for each check that fails too often.

    A score's finding passes if the test proves, at `config.level`, that the candidate is worse than the champion by at
    most `config.max_worse` (a share of the check's range). Turns without a score are left out. If only one policy has
    scores on too many turns (`config.max_unscored`), the finding fails, too.
    """
    findings: list[gate.Finding] = []
    for side, who in enumerate(("candidate", "champion")):
        findings += _failures(found[side].failures, sum(len(one.sides[side]) for one in compared), who, config)
    keys = [one.scenario_key for one in compared]
    compare = partial(_compare, keys=keys, config=config, seed=seed, user_of=user_of)
    return *findings, *(compare(name, ours, theirs) for name, (ours, theirs) in values.items())


def _check_values(
    compared: Sequence[_Compared], found: tuple[rewards.Checked, rewards.Checked], checks: Sequence[rewards.Check]
) -> _Values:
    range_of = {check.version: (check.lowest, check.highest) for check in checks}
    heard: dict[str, tuple[dict[int, float], dict[int, float]]] = defaultdict(lambda: ({}, {}))
    for side in (0, 1):
        place_of = {run.id: place for place, one in enumerate(compared) for run in one.sides[side]}
        values: dict[tuple[str, int], list[float]] = defaultdict(list)
        for score in found[side].scores:
            # Onto 0..1, because the gate's `max_worse` is a share of the scale.
            lowest, highest = range_of[score.rubric or ""]
            values[score.name, place_of[score.trajectory_id]].append((score.value - lowest) / (highest - lowest))
        for (name, place), given in values.items():
            heard[name][side][place] = fmean(given)
    return heard


def _gains(
    scored: Scored, beside: Scored | None, checked: _Values, compared: Sequence[_Compared],
    user_of: Mapping[str, str | None], seed: int, who: str,
) -> list[gate.Gain]:  # fmt: skip
    """Return what the judge that trains, the gate's own judge, the app's rewards and the checks say, in this order."""

    def judged(judge: Scored, own: bool) -> list[gate.Pair]:
        pairs = (pair for pair in judge.judged.pairs if not pair[0].startswith(gate.PREFIX))
        return [pair for pair in pairs if (pair[0] in judge.own) is own]

    found = {who: judged(scored, False)}
    if beside is not None:
        found = {"the training judge": judged(beside, False), "the gate's judge": judged(scored, False)}
    found["your rewards"] = judged(scored, True)
    for name, (ours, theirs) in checked.items():
        both = sorted(ours.keys() & theirs.keys())
        found[f"check {name}"] = [(compared[place].scenario_key, ours[place], theirs[place]) for place in both]
    return [gate.paired_gain(name, pairs, user_of=user_of, seed=seed) for name, pairs in found.items() if pairs]


def _runs(turn: gate.Turn, given: gate.Given) -> tuple[Trajectory, ...]:
    def run(choice: Choice) -> Trajectory:
        key = new_id()
        # With the recorded run's metadata, where a check may find the right answer. Without the policy's name: a check
        # must not know whose answer it sees.
        info = replace(turn.info or TrajectoryInfo(key, 0.0), id=key)
        choices = (replace(choice, index=0),)
        call = replace(turn.call, id=new_id(), trajectory_id=key, choices=choices, policy=None)
        return Trajectory(info, (call,))

    return tuple(map(run, given.choices))


def _failures(failures: dict[str, int], answers: int, who: str, config: gate.GateConfig) -> list[gate.Finding]:
    return [
        gate.Finding(
            reason.partition(":")[0], None, None, config.max_unscored, False,
            f"check {reason}, on {count} of {answers} answers of the {who}; mend the check",
        )
        for reason, count in failures.items()
        if count > answers * config.max_unscored
    ]  # fmt: skip


def _compare(
    name: str, ours: Mapping[int, float], theirs: Mapping[int, float], *,
    keys: list[str], config: gate.GateConfig, seed: int, user_of: Mapping[str, str | None],
) -> gate.Finding:  # fmt: skip
    either, both = ours.keys() | theirs.keys(), ours.keys() & theirs.keys()
    # A candidate must not pass by answers that the check cannot score, so missing scores of one side reject.
    if len(either - both) > len(either) * config.max_unscored:
        words = f"check {name} speaks of one policy's answers alone on {len(either - both)} of {len(either)} turns"
        return gate.Finding(name, None, None, config.max_unscored, False, words)
    pairs = [(keys[place], ours[place], theirs[place]) for place in sorted(both)]
    return gate.not_worse(
        f"check {name}", pairs, allowed=config.max_worse, level=config.level, seed=seed, user_of=user_of
    )


def _keep_answers(
    run: Cycle, candidate: Policy, champion: Policy | None, groups: Mapping[str, str],
    compared: Sequence[gate.BlindComparison], reports: Sequence[rewards.JudgeReport],
) -> None:  # fmt: skip
    """Keep the answers in `compared` for people, with the mean of the scores that the judge gave each of them.

    The rows, one for each turn of the traffic, take the place of those of an earlier gate of both policies. Prompts of
    the suite are left out, because no run of the store would take their answers along when it is erased. So are whole
    runs that were repeated. `groups` has the newest group of each scenario, by which the gate's results name it. Texts
    are redacted if the job is set to, as an app redacts what an engine answers before it is recorded.
    """
    redact = None if run.config.redact is None else Redactor(run.config.redact)
    scores: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for score in report.scores:
            scores[score.trajectory_id].append(score.value)
    turns: list[GateTurn] = []
    for turn, siblings, ours in compared:
        if turn.scenario_key.startswith(gate.PREFIX):
            continue
        sides: tuple[list[JSON], list[JSON]] = ([], [])
        for sibling in siblings.trajectories:
            (call,) = sibling.calls
            (choice,) = (call if redact is None else cast("Call", redact(call))).choices
            given = scores.get(sibling.id)
            sides[sibling.id not in ours].append(_answer(choice, fmean(given) if given else None))
        turns.append(
            GateTurn(turn.call.id, turn.call.trajectory_id, groups[turn.scenario_key], tuple(sides[0]), tuple(sides[1]))
        )
    run.store.gate_answers.keep(candidate.name, UPSTREAM_ARM if champion is None else champion.name, turns)


def _answer(choice: Choice, score: float | None) -> JSON:
    return {"message": dict(choice.message), "finish_reason": choice.finish_reason, "score": score}
