"""What the gate makes of policies that are truly worse than the champion, and of policies that are truly better.

The demo's world (`promotion_world`), its recipe and its gate; every candidate goes through `retrain`. What is true is
measured apart, on questions that no traffic asks, by the shop's exact rule: a policy counts as worse, or as better, if
its success differs from the champion's by more than two standard errors. Others are told and not counted.

- better: the champion is the base model, and the candidate one ordinary update on traffic of its own.
- bad: the champion has two ordinary cycles behind it, and `bad_policies` makes the candidates. Those that
  learned to please a judge are put to the gate twice more with that very judge in it: `fooled_gate_promoted` got past
  it, and `fooled_gate_promoted_checked` past it and a check of the user's that knows what is right.

The two run beside each other, each in a process of its own with an engine of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from art_patch.demo.run import CYCLE
from art_patch.demo.shop_model import build_model
from art_patch.errors import AdapterRejected, TrainingError
from art_patch.pipeline import CycleReport, group
from art_patch.pipeline.cycle_run import Cycle
from art_patch.store import Store
from tests.benchmarks.promotion_world import WHO, Success, World, champion_of
from tests.support.benchmark_report import say

if TYPE_CHECKING:
    from tests.benchmarks.bad_policies import Bad

BETTER = 20
CYCLES = 2
"""Behind the champion of the bad ones."""
CLEAR = 2.0
"""Standard errors."""


@dataclass(frozen=True, slots=True)
class GatedPolicy:
    """A candidate, what it is worth, and what the gate said.

    Attributes:
        kind: of candidate.
        name: which.
        sampled: its success.
        greedy: its success, greedy.
        champion: that of the champion, sampled.
        above: standard errors that it is better by.
        outcome: of the cycle.
        reason: of the outcome.
        candidate: the policy; `None` if none came of it.
    """

    kind: str
    name: str
    sampled: float
    greedy: float
    champion: float
    above: float
    outcome: str
    reason: str
    candidate: str | None

    @property
    def promoted(self) -> bool:
        return self.outcome == "promoted"


def policies(share: float) -> dict[str, Any]:
    """Metrics of both; a share below 1 takes that much of the better ones, and one bad one of each kind."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        base = build_model(home / "models" / "shop-1", seed=1)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(2, mp_context=spawn, initializer=_prepare) as pool:
            worse = pool.submit(_bad, home / "bad", base, 5 if share < 1 else None)
            better = pool.submit(_better, home / "better", base, max(2, round(BETTER * share)))
            return figures_of_better(better.result()) | figures_of_bad(*worse.result())


def figures_of_better(seen: list[GatedPolicy]) -> dict[str, Any]:
    clear = [each for each in seen if each.above > CLEAR]
    return {
        "better_promoted": sum(each.promoted for each in clear),
        "better_promoted_share": fmean(each.promoted for each in clear) if clear else 0.0,
        "better_count": len(clear),
        "better_success": fmean(each.sampled for each in clear) if clear else 0.0,
        "better_champion_success": fmean(each.champion for each in seen),
        "not_better": [asdict(each) for each in seen if each not in clear],
    }


def figures_of_bad(seen: list[GatedPolicy], liked: Counter[str]) -> dict[str, Any]:
    clear = [each for each in seen if each.above < -CLEAR]
    kinds = Counter(each.kind for each in clear)
    return {
        "bad_promoted": sum(each.promoted for each in clear),
        "bad_count": len(clear),
        "bad_success": fmean(each.sampled for each in clear) if clear else 0.0,
        "bad_champion_success": fmean(each.champion for each in seen),
        **{f"bad_count_{kind}": count for kind, count in kinds.items()},
        **{f"bad_success_{kind}": fmean(e.sampled for e in clear if e.kind == kind) for kind in kinds},
        "fooled_gate_promoted": liked["unchecked"],
        "fooled_gate_promoted_checked": liked["checked"],
        "not_worse": [asdict(each) for each in seen if each not in clear],
    }


def _better(home: Path, base: Path, count: int) -> list[GatedPolicy]:
    seen: list[GatedPolicy] = []
    with ExitStack() as stack:
        world = World(home, base, stack)
        for seed in range(1, count + 1):
            name = f"seed-{seed}"
            store = world.project(name)
            before = champion_of(store).name
            if not seen:
                theirs = world.success(before)
            world.traffic(name, store, seed=seed)
            cycle = partial(world.cycle, store, world.judge, CYCLE)
            seen.append(_look(world, theirs, "better", name, cycle))
    return seen


def _bad(home: Path, base: Path, count: int | None) -> tuple[list[GatedPolicy], Counter[str]]:
    from tests.benchmarks.bad_policies import BAD

    seen: list[GatedPolicy] = []
    liked: Counter[str] = Counter()
    with ExitStack() as stack:
        world = World(home, base, stack)
        store = world.project("good")
        for number in range(1, CYCLES + 1):
            world.traffic("good", store, seed=100 + number)
            report = world.cycle(store, world.judge, CYCLE)
            say(f"good {number}: {report.outcome}: {report.reason}")
        world.traffic("good", store, seed=100)
        group(Cycle(store, world.judge, CYCLE, lambda *_: None, time.time(), world.client, world.adapters, WHO))
        theirs = world.success(champion_of(store).name)
        for number, bad in enumerate(BAD[:count]):
            copy = world.copy("good", f"bad-{number}")
            seen.append(_look(world, theirs, bad.kind, bad.name, partial(_gated, world, copy, bad)))
            if bad.rule is not None and seen[-1].candidate is not None:
                liked += _judged_by_the_fooled(world, bad, seen[-1].candidate)
    return seen, liked


def _gated(world: World, store: Store, bad: Bad) -> CycleReport:
    judge, config = bad.make(world, store)
    return world.cycle(store, judge, config)


def _judged_by_the_fooled(world: World, bad: Bad, candidate: str) -> Counter[str]:
    """What the gate makes of a candidate if its judge is fooled, too: without, and with a check of the user's."""
    from tests.benchmarks.bad_policies import CHECK, add_candidate

    assert bad.rule is not None
    liked: Counter[str] = Counter()
    for name, config in (("unchecked", CYCLE), ("checked", replace(CYCLE, checks=(CHECK,)))):
        store = world.copy("good", f"{bad.name} {name}".replace(" ", "-"))
        add_candidate(store, world.adapters / candidate)
        report = world.cycle(store, world.judge_by(bad.rule), config)
        liked[name] += report.outcome == "promoted"
        say(f"{bad.kind}, {bad.name}, by a judge that likes it, {name}: {report.outcome}: {report.reason}")
    return liked


def _look(world: World, theirs: Success, kind: str, name: str, gated: Callable[[], CycleReport]) -> GatedPolicy:
    """Let the gate decide, and measure."""
    began = time.monotonic()
    try:
        report = gated()
    except (TrainingError, AdapterRejected) as error:  # then there is nothing to be promoted
        report = CycleReport("failed", str(error), None)
    took_s = time.monotonic() - began
    candidate = report.candidate
    ours = theirs if candidate is None else world.success(candidate)
    if candidate is not None and report.outcome == "rejected":
        world.client.unload(candidate)
    seen = GatedPolicy(
        kind, name, ours.mean, ours.greedy, theirs.mean, ours.above(theirs), report.outcome, report.reason, candidate
    )
    say(
        f"{kind}, {name}: truly {ours.mean:.3f} (greedy {ours.greedy:.3f}) against {theirs.mean:.3f} "
        f"({theirs.greedy:.3f}), {seen.above:+.1f} standard errors; {took_s:.0f} s; {report.outcome}: {report.reason}"
    )
    return seen


def _prepare() -> None:
    """Two of us share the machine; and what we start is of this checkout, too."""
    import torch

    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
