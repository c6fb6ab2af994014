"""The parts of `incumbent.py` with real processes: what users get while a policy learns beside a provider.

`incumbent_world.py` says how the world is made.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from art_patch import promotion
from art_patch.demo.run import SINGLE_SHOT
from art_patch.demo.shop import make_tasks, triples
from art_patch.types import Trajectory
from tests.benchmarks.incumbent_world import QUICK, REST_S, RIGHT, Asked, World, triple
from tests.support.benchmark_report import Target, say

WINDOW = 200
FIRST = 300  # sessions before a server is started
AFTER = 500  # sessions after the promotion
MOST_CYCLES = 15
CANARY_S = 420.0  # the longest that a canary test is waited for
NEVER_CYCLES = 30
BUSY = 6  # conversations at once while a cycle runs

CYCLE = replace(
    SINGLE_SHOT, settle_s=REST_S, resample=replace(SINGLE_SHOT.resample, max_turns=240),
    canary=promotion.CanaryConfig(rest_s=REST_S, silence_s=REST_S),
)  # fmt: skip

TARGETS = (
    Target("worst_window", -0.03, None, "true success minus the provider's, worst 200 sessions of all seeds"),
    Target("promoted_share", 1.0, None, "of the seeds, in which a trained policy came to serve"),
    Target("share_after", RIGHT - 0.05, None, "true success of what serves then, worst seed"),
    Target("never_promoted", None, 0, "promotions of a base that cannot reach the provider, in 30 cycles"),
    Target("take_over", 1.0, None, "of the calls that a policy may answer, answered by one, with --take-over"),
)


# --- one seed from the first call to some hundred after the promotion ---


def loop(home: Path, seed: int, *, most_cycles: int = MOST_CYCLES, after: int = AFTER) -> dict[str, Any]:
    """Run one seed."""
    began = time.monotonic()
    with ExitStack() as stack:
        world = World(stack, home, f"loop-{seed}-{os.getpid()}", seed)
        say(f"seed {seed}: {FIRST} sessions with the provider, in {world.settings.directory}")
        world.sessions(FIRST)
        with world.traffic(BUSY):
            served_at = time.time()
            server = world.serve()
            say(f"  champion {server.champion}, learner {server.learner}")
            promoted_at, cycles = _until_promoted(world, most_cycles)
        if promoted_at is not None:
            world.sessions(after)
        runs = world.wait_until_recorded(len(world.asked))
        metrics = _figures(world, runs, served_at, promoted_at)
        metrics |= {"cycles": cycles, "took_s": time.monotonic() - began}
        for move in reversed(world.store.ledger.history(limit=200)):
            say(f"  {move['policy']} {move['from_state']} -> {move['to_state']}: {move['reason'][:240]}")
    say(f"seed {seed}: {json.dumps(metrics)}")
    return metrics


def _until_promoted(world: World, most_cycles: int) -> tuple[float | None, int]:
    """Run cycles, and wait for the server's tests; return when a policy came to serve, and the number of cycles."""
    for number in range(1, most_cycles + 1):
        world.cycle(CYCLE)
        if world.store.ledger.challenger() is not None:
            _wait_for_test(world)
        if world.store.ledger.champion() is not None:
            return time.time(), number
    return None, most_cycles


def _wait_for_test(world: World) -> None:
    """Let the server decide on a canary; nothing is trained meanwhile."""
    deadline, told = time.monotonic() + CANARY_S, 0.0
    with world.traffic(QUICK - BUSY):
        while (challenger := world.store.ledger.challenger()) is not None and time.monotonic() < deadline:
            if time.monotonic() - told > 30:
                told, route = time.monotonic(), world.store.ledger.route()
                say(f"  {len(world.asked)} sessions, {challenger.name} answers {route.challenger_percent} %")
            time.sleep(1)


def _figures(world: World, runs: Sequence[Trajectory], served_at: float, promoted_at: float | None) -> dict[str, Any]:
    """What the sessions and the true rates of the policies that answered them say."""
    answered = list[tuple[Trajectory, Asked, str | None]]()  # `None`: not one policy, or upstream, alone
    for run in runs:
        if run.info.session_id in world.asked and run.info.started_at >= served_at:
            by = {call.policy or "" for call in run.calls}
            answered.append((run, world.asked[run.info.session_id], by.pop() if len(by) == 1 else None))
    champion = world.store.ledger.champion()
    policies = {by for _, _, by in answered if by} | ({champion.name} if champion is not None else set())
    every = make_tasks("traffic", len(triples("traffic")), seed=0)
    truths = {policy: world.truths(policy, every) for policy in sorted(policies)}
    rates = {policy: fmean(its.values()) for policy, its in truths.items()}
    expected, overall, sampled, agree = list[float](), list[float](), list[float](), list[bool]()
    for _, its, by in answered:
        sampled.append(its.right - RIGHT)
        if by:
            right = truths[by][triple(its.task)]
            agree.append(right == its.right)
            expected.append(right - RIGHT)
            overall.append(rates[by] - RIGHT)
        else:  # where two answered, no rate is known but what happened
            expected.append(0.0 if by == "" else its.right - RIGHT)
            overall.append(expected[-1])
    of_policies = [run for run, _, by in answered if by]
    of_upstream = [run for run, _, by in answered if by == ""]
    metrics: dict[str, Any] = {
        "seed": world.seed,
        "worst_window": worst(expected),
        "worst_window_overall": worst(overall),
        "worst_window_sampled": worst(sampled),
        "rates": rates,
        "sessions": len(answered),
        "sessions_by": dict(Counter("two" if by is None else by or "upstream" for _, _, by in answered)),
        "fell_back": sum(call.fallback is not None for run, _, _ in answered for call in run.calls),
        "errors": sum(its.error is not None for _, its, _ in answered),
        "truth_agrees": fmean(agree) if agree else None,
        "ms_upstream": median(call.duration_ms for run in of_upstream for call in run.calls),
        "promoted": champion is not None and champion.name.partition("@")[2] != "0",
    }
    if of_policies:
        metrics["ms_policies"] = median(call.duration_ms for run in of_policies for call in run.calls)
    if champion is not None and promoted_at is not None:
        late = [run for run, _, _ in answered if run.info.started_at >= promoted_at + 3]
        metrics |= {
            "champion": champion.name,
            "share_after": rates[champion.name],
            "sessions_until_promotion": sum(run.info.started_at < promoted_at for run, _, _ in answered),
            "control_group": fmean(any(call.in_control_group for call in run.calls) for run in late),
        }
    return metrics


def worst(differences: Sequence[float]) -> float:
    """The mean of the worst window."""
    windows = range(max(1, len(differences) - WINDOW + 1))
    return min(fmean(differences[first : first + WINDOW]) for first in windows)


def summary(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all seeds together, and each seed's own."""
    metrics: dict[str, Any] = {
        "worst_window": min(one["worst_window"] for one in seeds),
        "worst_window_overall": min(one["worst_window_overall"] for one in seeds),
        "worst_window_sampled": min(one["worst_window_sampled"] for one in seeds),
        "promoted_share": fmean(one["promoted"] for one in seeds),
    }
    if after := [one["share_after"] for one in seeds if "share_after" in one]:
        metrics["share_after"] = min(after)
    return metrics | {f"seed_{one['seed']}": one for one in seeds}


# --- the two others ---


def never(home: Path, seed: int, *, cycles: int = NEVER_CYCLES) -> dict[str, Any]:
    """A base that learns too slowly to reach its provider: updates of rank 1 at a tenth of the learning rate."""
    config = replace(
        CYCLE,
        train=replace(CYCLE.train, learning_rate=CYCLE.train.learning_rate / 10, lora_rank=1, lora_alpha=2),
        resample=replace(SINGLE_SHOT.resample, max_turns=60),
        gate=replace(CYCLE.gate, samples=4),
    )
    with ExitStack() as stack:
        world = World(stack, home, f"never-{seed}-{os.getpid()}", seed, delay_s=0.02)
        world.sessions(120)
        world.serve()
        for _ in range(cycles):
            world.sessions(40)
            time.sleep(config.settle_s + 1)
            world.cycle(config)
        moves = world.store.ledger.history(limit=1_000)
        learners = [move["policy"] for move in reversed(moves) if move["to_state"] == "learner"]
        every = make_tasks("traffic", len(triples("traffic")), seed=0)
        rates = {policy: fmean(world.truths(policy, every).values()) for policy in dict.fromkeys(learners)}
        say(f"never: true success of the learners: {rates}")
        return {
            "never_promoted": sum(move["to_state"] == "champion" for move in moves),
            "never_canaries": sum(move["to_state"] == "canary" for move in moves),
            "never_learners": len(learners) - 1,  # the base is the first
            "never_best": max(rates.values()),
            "never_cycles": cycles,
        }


def take_over(home: Path, seed: int, *, count: int = 100) -> dict[str, Any]:
    """How many calls a policy answers at once if it is told to take over."""
    with ExitStack() as stack:
        world = World(stack, home, f"take-over-{seed}-{os.getpid()}", seed, delay_s=0.02)
        world.sessions(40)
        server = world.serve("--take-over")
        time.sleep(2)  # running apps read the route every second
        since = time.time()
        world.sessions(count)
        runs = world.wait_until_recorded(len(world.asked))
        calls = [call for run in runs if run.info.started_at >= since for call in run.calls]
        say(
            f"take-over: {Counter(call.policy for call in calls)}, control {world.store.ledger.route().control_percent}"
        )
        return {
            "take_over": fmean(call.policy == server.champion for call in calls),
            "take_over_calls": len(calls),
            "take_over_fell_back": sum(call.fallback is not None for call in calls),
        }
