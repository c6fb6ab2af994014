"""Scored groups -> a candidate, published and in the ledger."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from art_patch.records import Group, Policy, Trajectory
from art_patch.rewards.combine import rewards_G
from art_patch.stages.run import Cycle
from art_patch.training.advantages import Sample, advantages_of_groups


def train(run: Cycle, champion: Policy) -> tuple[Policy | None, str]:
    """Return the candidate, or why there is none.

    Raises:
        TrainingError: the update failed; nothing was published.
    """
    groups = run.store.read.groups(state="scored", held_out=False)
    if (reason := _why_wait(run, groups)) is not None:
        return None, reason
    samples, live = _samples(run, groups, champion)
    if not samples:
        return None, "no group teaches anything: every group was scored alike or is too old"

    from art_patch.training.update import stale_directories, update  # imports torch

    for directory in stale_directories(run.adapters):
        shutil.rmtree(directory)
    name = f"{champion.model}@{_next_step(run, champion)}"
    metrics = update(
        samples,
        base=champion.base,
        base_sha256=champion.base_sha256,
        parent=Path(champion.path) if champion.path else None,
        target=run.adapters / name,
        config=run.config.train,
        on_policy=lambda trajectory: all(c.policy == champion.name for c in trajectory.calls),
        progress=lambda done, total, loss: run.progress("train", done, total, f"loss {loss:+.4f}"),
    )
    run.figures["train"] |= asdict(metrics)
    candidate = Policy(
        name=name,
        base=champion.base,
        base_sha256=champion.base_sha256,
        state="candidate",
        created_at=time.time(),
        path=str(run.adapters / name),
        parent=champion.name,
        figures={"train": run.figures["train"]},
    )
    run.store.ledger.add_candidate(candidate, trained_on=live, who=run.who)
    return candidate, ""


def _why_wait(run: Cycle, groups: Sequence[Group]) -> str | None:
    """Why nothing is trained yet; the groups wait for more traffic."""
    config = run.config
    if len(groups) < config.min_groups:
        left: dict[str, int] = run.figures["group"]["left"]
        why = "; ".join(f"{count} trajectories: {reason}" for reason, count in left.items())
        return f"{len(groups)} scored groups, {config.min_groups} are needed" + (f" ({why})" if why else "")
    held_out = {group.scenario_key for group in run.store.read.groups(state="formed", held_out=True)}
    if len(held_out) < config.gate.min_scenarios:
        needed = config.gate.min_scenarios
        return f"{len(held_out)} held-out scenarios, {needed} are needed to test a candidate; the groups wait for more"
    return None


def _samples(run: Cycle, groups: Sequence[Group], champion: Policy) -> tuple[list[Sample], list[str]]:
    """Return what can be learned from, and the groups it is in; what teaches nothing is put aside for good."""
    samples: list[Sample] = []
    live: list[str] = []
    dead: list[str] = []
    staleness = run.config.train.max_staleness
    rewards_of_groups = [rewards_G(group, combination=run.config.combination) for group in groups]
    rewards = [reward for rewards_of_group in rewards_of_groups for reward in rewards_of_group if reward is not None]
    advantages_of_all = advantages_of_groups(rewards_of_groups, run.config.train.advantage_scale)
    for group, advantages in zip(groups, advantages_of_all, strict=True):
        if advantages is None:
            dead.append(group.id)
            continue
        live.append(group.id)
        samples += [
            Sample(trajectory, advantage)
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
            if _is_fresh(trajectory, champion, staleness)
        ]
    run.figures["train"] = {"groups": len(groups), "dead_groups": len(dead), "mean_reward": sum(rewards) / len(rewards)}
    run.store.ledger.set_groups(dead, "dead", reason="all siblings were scored alike")
    if not any(sample.advantage for sample in samples):
        reason = f"not sampled within {staleness} steps of the champion"
        run.store.ledger.set_groups(live, "stale", reason=reason)
        return [], []
    return samples, live


def _is_fresh(trajectory: Trajectory, champion: Policy, max_staleness: int) -> bool:
    """Whether every trainable call was sampled by a policy of this model, at most so many steps ago."""
    for call in trajectory.calls:
        if call.untrainable is None and call.policy is not None:
            model, _, step = call.policy.rpartition("@")
            if model != champion.model or champion.step - int(step) > max_staleness:
                return False
    return True


def _next_step(run: Cycle, champion: Policy) -> int:
    """One above every step that was ever taken: names are never used twice, engines cache by name."""
    taken = [p.step for p in run.store.ledger.policies() if p.model == champion.model]
    taken += [int(d.name.rpartition("@")[2]) for d in run.adapters.glob(f"{champion.model}@*") if d.is_dir()]
    return max(taken) + 1
