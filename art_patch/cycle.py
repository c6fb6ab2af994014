"""One cycle: group -> score -> train -> gate -> promote. `retrain` reads as the table of contents.

The stages are pure; this file reads and writes the store around them. Every stage's result is in the store before the
next begins, so a cycle that was killed goes on where it stopped: groups that were formed are scored, groups that were
scored are trained on, a candidate that was published is gated. Serving is touched by one thing only, a promotion.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from filelock import FileLock, Timeout

from art_patch.errors import ArtPatchError, Busy, EngineError
from art_patch.gate import GateConfig, Turn, Verdict, contest, decide, held_out_turns
from art_patch.grouping import form_groups
from art_patch.ids import new_id
from art_patch.promotion.promote import ensure_loaded, promote
from art_patch.records import JSON, Choice, Group, Policy, Trajectory
from art_patch.rewards.combine import rewards_G
from art_patch.rewards.judge import JudgeReport
from art_patch.serving.contract import Engine
from art_patch.store import Store
from art_patch.training import TrainConfig
from art_patch.training.advantages import Sample, advantages_G

Outcome = Literal["promoted", "rejected", "nothing to do"]


class Judge(Protocol):
    """Ranks siblings (`rewards.judge.Judge`)."""

    def score_groups(
        self, groups: Sequence[Group], *, progress: Callable[[int, int], None] | None = None
    ) -> JudgeReport:
        """Return a score for each sibling, and the reason where a group has none."""
        ...


class Progress(Protocol):
    """Called as work goes on: stage, how much is done, how much there is, a word on it."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show it."""
        ...


@dataclass(frozen=True, slots=True)
class CycleConfig:
    """How a cycle is made.

    Attributes:
        settle_s: a trajectory is whole when its last call ended this long ago.
        min_group_size: siblings that a group needs.
        max_group_size: siblings that the judge ranks at once.
        holdout_share: part of the scenarios that only the gate sees.
        min_groups: with fewer scored groups nothing is trained; they wait for more.
        train: the update.
        gate: the test.
        keep_days: trajectories whose last call is longer ago are deleted at the end.
        keep_trajectories: of the others, all but the newest so many are deleted at the end.
    """

    settle_s: float = 60.0
    min_group_size: int = 4
    max_group_size: int = 16
    holdout_share: float = 0.2
    min_groups: int = 4
    train: TrainConfig = field(default_factory=TrainConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    keep_days: float | None = None
    keep_trajectories: int | None = None


@dataclass(frozen=True, slots=True)
class CycleReport:
    """What a cycle did.

    Attributes:
        outcome: `promoted`, `rejected` or `nothing to do`.
        reason: why, in words.
        champion: who serves now.
        candidate: the policy that was trained, if any.
        figures: of every stage that ran.
    """

    outcome: Outcome
    reason: str
    champion: str | None
    candidate: str | None = None
    figures: JSON = field(default_factory=dict[str, Any])


def retrain(
    store: Store,
    engine: Engine,
    judge: Judge,
    adapters: Path,
    config: CycleConfig,
    *,
    who: str,
    progress: Progress,
    now: float | None = None,
) -> CycleReport:
    """Run one cycle; at most one runs on a project at a time.

    Args:
        store: where traffic was recorded.
        engine: the serving engine.
        judge: ranks siblings.
        adapters: directory of published policies.
        config: how.
        who: for the ledger.
        progress: told what goes on.
        now: seconds since the epoch.

    Raises:
        Busy: if another cycle runs.
        JudgeError: if the judge scored nothing; the groups wait for the next cycle.
        TrainingError: if the update failed; nothing was published.
        EngineError: if the engine failed; a candidate that was trained is gated by the next cycle.
    """
    with only_one(adapters.parent), _retention(store, config, progress, who=who, now=now):
        champion = store.ledger.champion()
        if champion is None:
            return CycleReport("nothing to do", "no policy serves yet; start `art-patch serve --base MODEL`", None)
        figures: dict[str, Any] = {}
        candidate = _left_over(store, champion)
        if candidate is None:
            _group(store, config, figures, progress, time.time() if now is None else now)
            _score(store, judge, figures, progress)
            candidate, why_not = _train(store, champion, adapters, config, figures, progress, who=who)
            if candidate is None:
                return CycleReport("nothing to do", why_not, champion.name, None, figures)
        verdict = _gate(store, engine, judge, candidate, champion, config, figures, progress)
        if not verdict.promote:
            store.ledger.move(
                candidate.name, "rejected", who=who, reason=verdict.reason, figures={"gate": verdict.figures}
            )
            engine.unload(candidate.name)
            return CycleReport("rejected", verdict.reason, champion.name, candidate.name, figures)
        progress("promote", 0, 1, candidate.name)
        promote(store.ledger, engine, candidate.name, who=who, reason=verdict.reason, figures={"gate": verdict.figures})
        progress("promote", 1, 1, candidate.name)
        return CycleReport("promoted", verdict.reason, candidate.name, candidate.name, figures)


@contextmanager
def only_one(directory: Path) -> Generator[None]:
    """Hold the project's cycle lock; the kernel frees it if we are killed.

    Raises:
        Busy: if another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(directory / "cycle.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise Busy(
            f"another cycle is running on {directory}; this one did nothing. Try again when it is done"
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _retention(
    store: Store, config: CycleConfig, progress: Progress, *, who: str, now: float | None
) -> Generator[None]:
    """Delete what is older than is kept, when the block has ended.

    Also when it failed with an error of ours: a judge that is down for a month must not keep data for a month longer.
    """
    try:
        yield
    except ArtPatchError:
        prune(store, config, progress, who=who, now=now)
        raise
    prune(store, config, progress, who=who, now=now)


def prune(store: Store, config: CycleConfig, progress: Progress, *, who: str, now: float | None = None) -> None:
    """Delete what is older, or more, than is kept; nothing if the settings do not say."""
    if config.keep_days is None and config.keep_trajectories is None:
        return
    store.rights.prune(
        older_than_s=None if config.keep_days is None else config.keep_days * 86_400,
        keep=config.keep_trajectories,
        who=who,
        progress=lambda done, total: progress("prune", done, total),
        now=now,
    )


def _left_over(store: Store, champion: Policy) -> Policy | None:
    """A candidate that an earlier cycle trained from this champion and did not live to gate."""
    waiting = [p for p in store.ledger.policies() if p.state == "candidate" and p.parent == champion.name and p.path]
    return waiting[-1] if waiting and Path(waiting[-1].path or "").is_dir() else None


def _group(store: Store, config: CycleConfig, figures: dict[str, Any], progress: Progress, now: float) -> None:
    pending = store.read.ungrouped(settled_before=now - config.settle_s)
    progress("group", 0, len(pending))
    grouping = form_groups(
        pending,
        new_id=new_id,
        min_size=config.min_group_size,
        max_size=config.max_group_size,
        holdout_share=config.holdout_share,
    )
    store.ledger.add_groups(grouping.groups, now=now)
    progress("group", len(pending), len(pending), f"{len(grouping.groups)} groups")
    figures["group"] = {
        "trajectories": len(pending),
        "groups": len(grouping.groups),
        "held_out": sum(group.held_out for group in grouping.groups),
        "left": dict(grouping.left),
    }


def _score(store: Store, judge: Judge, figures: dict[str, Any], progress: Progress) -> None:
    waiting = store.read.groups(state="formed", held_out=False)
    scored = [group for group in waiting if None not in rewards_G(group)]  # users' rewards need no judge
    asked = [group for group in waiting if group not in scored]
    report = judge.score_groups(asked, progress=lambda done, total: progress("score", done, total)) if asked else None
    if report is not None:
        store.write(report.scores)
        scored += [group for group in asked if group.id not in report.unscored]
        for group_id, reason in report.unscored.items():
            store.ledger.set_groups([group_id], "formed", reason=reason)
    store.ledger.set_groups([group.id for group in scored], "scored")
    figures["score"] = {"groups": len(scored), "unscored": len(report.unscored) if report else 0}
    if report is not None:
        for name in ("calls", "prompt_tokens", "completion_tokens", "cost_usd"):
            figures["score"][name] = getattr(report, name)


def _why_wait(store: Store, groups: Sequence[Group], config: CycleConfig, figures: dict[str, Any]) -> str | None:
    """Why nothing is trained yet; the groups wait for more traffic."""
    if len(groups) < config.min_groups:
        left: dict[str, int] = figures["group"]["left"]
        why = "; ".join(f"{count} trajectories: {reason}" for reason, count in left.items())
        return f"{len(groups)} scored groups, {config.min_groups} are needed" + (f" ({why})" if why else "")
    held_out = {group.scenario_key for group in store.read.groups(state="formed", held_out=True)}
    if len(held_out) < config.gate.min_scenarios:
        needed = config.gate.min_scenarios
        return f"{len(held_out)} held-out scenarios, {needed} are needed to test a candidate; the groups wait for more"
    return None


def _samples(
    store: Store, groups: Sequence[Group], champion: Policy, config: CycleConfig, figures: dict[str, Any]
) -> tuple[list[Sample], list[str]]:
    """Return what can be learned from, and the groups it is in; what teaches nothing is put aside for good."""
    samples: list[Sample] = []
    live: list[str] = []
    dead: list[str] = []
    rewards: list[float] = []
    for group in groups:
        rewards_of_group = rewards_G(group)
        rewards += [reward for reward in rewards_of_group if reward is not None]
        advantages = advantages_G(rewards_of_group)
        if advantages is None:
            dead.append(group.id)
            continue
        live.append(group.id)
        samples += [
            Sample(trajectory, advantage)
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
            if _is_fresh(trajectory, champion, config.train.max_staleness)
        ]
    figures["train"] = {"groups": len(groups), "dead_groups": len(dead), "mean_reward": sum(rewards) / len(rewards)}
    store.ledger.set_groups(dead, "dead", reason="all siblings were scored alike")
    if not any(sample.advantage for sample in samples):
        reason = f"not sampled within {config.train.max_staleness} steps of the champion"
        store.ledger.set_groups(live, "stale", reason=reason)
        return [], []
    return samples, live


def _train(
    store: Store,
    champion: Policy,
    adapters: Path,
    config: CycleConfig,
    figures: dict[str, Any],
    progress: Progress,
    *,
    who: str,
) -> tuple[Policy | None, str]:
    groups = store.read.groups(state="scored", held_out=False)
    if (reason := _why_wait(store, groups, config, figures)) is not None:
        return None, reason
    samples, live = _samples(store, groups, champion, config, figures)
    if not samples:
        return None, "no group teaches anything: every group was scored alike or is too old"

    from art_patch.training.update import stale_directories, update  # imports torch

    for directory in stale_directories(adapters):
        shutil.rmtree(directory)
    name = f"{champion.model}@{_next_step(store, champion, adapters)}"
    metrics = update(
        samples,
        base=champion.base,
        base_sha256=champion.base_sha256,
        parent=Path(champion.path) if champion.path else None,
        target=adapters / name,
        config=config.train,
        on_policy=lambda trajectory: all(c.policy == champion.name for c in trajectory.calls),
        progress=lambda done, total, loss: progress("train", done, total, f"loss {loss:+.4f}"),
    )
    figures["train"] |= asdict(metrics)
    candidate = Policy(
        name=name,
        base=champion.base,
        base_sha256=champion.base_sha256,
        state="candidate",
        created_at=time.time(),
        path=str(adapters / name),
        parent=champion.name,
        figures={"train": figures["train"]},
    )
    store.ledger.add_candidate(candidate, trained_on=live, who=who)
    return candidate, ""


def _gate(
    store: Store,
    engine: Engine,
    judge: Judge,
    candidate: Policy,
    champion: Policy,
    config: CycleConfig,
    figures: dict[str, Any],
    progress: Progress,
) -> Verdict:
    gate = config.gate
    turns = held_out_turns(
        store.read.groups(state="formed", held_out=True),
        scenarios=gate.max_scenarios,
        turns_per_scenario=gate.turns_per_scenario,
        seed=candidate.step,
    )
    ensure_loaded(engine, candidate.name)
    ensure_loaded(engine, champion.name)
    answers: list[tuple[Turn, list[Choice], list[Choice]]] = []

    def both(turn: Turn) -> tuple[Turn, list[Choice], list[Choice]]:
        ours = _answers(engine, candidate.name, turn, gate.samples)
        return turn, ours, _answers(engine, champion.name, turn, gate.samples)

    with ThreadPoolExecutor(16) as pool:
        asked = pool.map(both, turns)
        for done, answer in enumerate(asked, 1):
            answers.append(answer)
            progress("gate: answers", done, len(turns))
    contests = [(turn, *contest(turn, ours, theirs, new_id=new_id)) for turn, ours, theirs in answers]
    report = judge.score_groups(
        [group for _, group, _ in contests], progress=lambda done, total: progress("gate: judge", done, total)
    )
    value = {score.trajectory_id: score.value for score in report.scores}
    pairs: list[tuple[str, float, float]] = []
    for turn, group, ours in contests:
        if group.id in report.unscored:
            continue
        by_us = [value[t.id] for t in group.trajectories if t.id in ours]
        by_them = [value[t.id] for t in group.trajectories if t.id not in ours]
        pairs.append((turn.scenario_key, sum(by_us) / len(by_us), sum(by_them) / len(by_them)))
    verdict = decide(pairs, gate, seed=candidate.step)
    if len(report.unscored) > len(contests) * gate.max_unscored:
        verdict = Verdict(False, f"the judge scored only {len(pairs)} of {len(contests)} turns", verdict.figures)
    figures["gate"] = {"turns": len(turns), "unscored": len(report.unscored)} | dict(verdict.figures)
    return verdict


def _answers(engine: Engine, policy: str, turn: Turn, samples: int) -> list[Choice]:
    """Let a policy answer a turn as traffic had it answered: same prompt to the token, same sampling parameters.

    Raises:
        EngineError: if the engine renders another prompt than the one recorded: the comparison would be worth nothing.
    """
    given = turn.call.params
    kept = {key: given[key] for key in ("temperature", "max_tokens", "max_completion_tokens", "stop") if key in given}
    body: dict[str, Any] = {"model": policy, "messages": list(turn.call.messages), "n": samples} | kept
    if turn.call.tools:
        body["tools"] = list(turn.call.tools)
    answer = engine.chat(**body, return_token_ids=True)
    if tuple(answer["prompt_token_ids"]) != turn.call.prompt_token_ids:
        raise EngineError(
            f"call {turn.call.id} has another prompt now than when it was recorded (another chat template?); "
            "serve the base with the template that traffic was recorded with"
        )
    return [Choice(c["index"], c["message"], c["finish_reason"]) for c in answer["choices"]]


def _is_fresh(trajectory: Trajectory, champion: Policy, max_staleness: int) -> bool:
    """Whether every trainable call was sampled by a policy of this model, at most so many steps ago."""
    for call in trajectory.calls:
        if call.untrainable is None and call.policy is not None:
            model, _, step = call.policy.rpartition("@")
            if model != champion.model or champion.step - int(step) > max_staleness:
                return False
    return True


def _next_step(store: Store, champion: Policy, adapters: Path) -> int:
    """One above every step that was ever taken: names are never used twice, engines cache by name."""
    taken = [p.step for p in store.ledger.policies() if p.model == champion.model]
    taken += [int(d.name.rpartition("@")[2]) for d in adapters.glob(f"{champion.model}@*") if d.is_dir()]
    return max(taken) + 1
