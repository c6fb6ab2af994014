"""What users lose while a policy replaces their provider, and how soon a control group notices that it is worse.

::

    python tests/benchmarks/incumbent.py [--json] [--only control drift loop never overhead take_over] [--draws 20]
                                            [--sizes 50 500] [--seeds 1 2 3 4 5] [--home DIRECTORY]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met. `control` with `--sizes 50 500 5000` (sessions a day) takes about ten minutes on two cores.
`loop` takes about ten minutes for each seed. Models, stores and logs are kept in `--home`.

The parts with real processes, see `incumbent_loop.py`:

- `loop`: a bot on a provider that is right 91 times in 100, from before `art-patch serve` until 500 sessions after the
  promotion. `worst_window`: true success minus the provider's on the same sessions, mean of the worst 200 consecutive
  ones, worst seed. A policy's true success is that on the session's question, 0 or 1, so there is chance in it: which
  questions came. `worst_window_overall` takes its success over all questions, `worst_window_sampled` what was answered.
  `promoted_share`: seeds in which a trained policy came to serve; `share_after`: its true success, worst seed.
- `never`: a base that learns, but too slowly to reach its provider, in 30 cycles: `never_promoted`, `never_canaries`
  tests on the sessions, `never_learners` replaced by a candidate; `never_best`: true success of the best learner.
- `take_over`: the share of the calls that a policy answers with `serve --take-over`.

Two small parts: `drift` counts comparisons with a model that upstream no longer has (`alias_drift`), and `overhead`
what a call costs more with a control group, a learner or a canary beside upstream (`*_added_us_*`).

`control`: each draw is the traffic of a champion and its control group as the store would hand it over, decided by
`promotion.evidence_of` and `promotion.decide_control` as they are shipped, from the last 28 days before each look.
Upstream is right 91 times in 100, as the bot of the field report.

- `false_alarm`: equal for 30 days, 500 sessions a day, a control group of 5 %: how often the champion was retired.
- `degraded_days_N_C`: from day 20 on the champion is worse by 0.2; N sessions a day, a control group of C percent: days
  until it was retired, median; `degraded_found_N_C`: within 8 days. `_seldom`: a reward on a tenth of the sessions.
- `judge_bias_days_N_C`: the champion is worse by 0.1 from its promotion on, a judge ranks it better by 0.1, and a tenth
  of the sessions has feedback: days until it was retired, 90th percentile.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from art_patch.promotion import CanaryConfig, Evidence, decide_control, evidence_of  # noqa: E402 - after the line above
from art_patch.promotion.bets import SIGNALS, Bets, add_bets, begin_bets  # noqa: E402
from art_patch.promotion.evidence import Observation  # noqa: E402
from art_patch.promotion.sequential import CONTROL_DAYS  # noqa: E402
from art_patch.store.queries.evidence import CONTROL_S  # noqa: E402
from art_patch.types import UPSTREAM_ARM, ArmCall, ArmTraffic, Score  # noqa: E402
from tests.benchmarks import incumbent_drift, incumbent_loop, incumbent_overhead  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402

DAY = 86_400.0
CHAMPION = "agent@1"
CONFIG = CanaryConfig()
RIGHT = 0.91
CHANGE = 20.0  # the day from which on a champion is worse
STEP = 0.125  # days between two looks that are tried

TARGETS = (
    Target("false_alarm", None, 0.05, "equal champions that were retired within 30 days"),
    Target("degraded_days_500_5", None, 3, "days until a champion worse by 0.2 was retired, median"),
    Target("degraded_found_500_5", 0.95, None, "of these, within 8 days"),
    Target("degraded_days_5000_5", None, 0.5, "the same with 5,000 sessions a day"),
    Target("judge_bias_days_5000_5", None, 21, "days until feedback undid what a judge liked, 90th percentile"),
    Target("alias_drift", None, 0, "comparisons with a model that upstream no longer has"),
    Target("alias_drift_later", 1, None, "comparisons with the later one, fewest of all tests"),
    Target("control_added_us_named", None, 5, "added to a call by the control group, us"),
    Target("learner_added_us_named", None, 5, "added to a call by a learner, us"),
    Target("judge_bias_days_5000_20", None, 7, "the same with a control group of 20 %"),
)


class World(NamedTuple):
    """What a champion is like."""

    a_day: float
    control: float  # share of the sessions
    loss: float
    change: float  # the day from which on it is worse
    days: float  # how long it is followed
    coverage: float = 1.0  # share of the sessions with a reward
    judged: bool = False  # the reward is feedback, and a judge scores all sessions


class Draw:
    """The traffic of one champion from its promotion on."""

    def __init__(self, world: World, seed: int) -> None:
        """Make all sessions."""
        self.world, rng = world, random.Random(f"{world} {seed}")
        self.calls, self.scores = list[ArmCall](), list[Score]()
        first = max(0.0, world.change - CONTROL_S / DAY - 1)  # no look knows what was before
        for number in range(int(first * world.a_day), int(world.days * world.a_day)):
            at = (number + rng.random()) * DAY / world.a_day
            kept = rng.random() < world.control
            loss = 0.0 if kept or at < world.change * DAY else world.loss
            key, ms = f"t{number}", rng.lognormvariate(6.5, 0.5)
            policy = UPSTREAM_ARM if kept else CHAMPION
            group = f"g{number // 8}" if world.judged else None
            self.calls.append(ArmCall(key, key, key, group, at + ms / 1000, policy, "ok", False, ms, None, False))
            right = float(rng.random() < RIGHT - loss)
            if rng.random() < world.coverage:
                name = "thumbs" if world.judged else "reward"
                self.scores.append(Score(f"r{number}", key, name, right, "user", at + 30))
            if world.judged:
                liked = min(1.0, max(0.0, rng.gauss(0.6 if kept else 0.7, 0.15)))
                self.scores.append(Score(f"j{number}", key, "ruler", liked, "ruler", at + 3_600, group_id=group))

    def is_retired(self, day: float, found: Evidence | None = None) -> bool:
        """Whether a look at this day retires the champion; `found` is what it sees, if that is known."""
        found = found or self.evidence(day)
        return decide_control(found, begin=max(0.0, day * DAY - CONTROL_S), config=CONFIG).action == "roll back"

    def evidence(self, day: float) -> Evidence:
        """What a look at this day sees."""
        now = day * DAY
        since = max(0.0, now - CONTROL_S)
        begin, end = (bisect_left(self.calls, at, key=lambda call: call.at) for at in (since, now))
        calls = tuple(self.calls[begin:end])
        ids = {call.trajectory_id for call in calls}
        scores = tuple(score for score in self.scores if score.trajectory_id in ids and score.at <= now)
        traffic = ArmTraffic(calls, scores, ((since, 100 * (1 - self.world.control)),), since == 0.0)
        return evidence_of(traffic, challenger=CHAMPION, champion=UPSTREAM_ARM, state="canary", now=now)


def proven_by(found: Evidence, begin: float) -> float:
    """The day by which the bets on one signal prove that the champion is worse, by all that a later look knows."""
    days = [math.inf]
    for signal in SIGNALS:
        tolerance, needed = getattr(CONFIG, signal.tolerance), 1 / (CONFIG.alpha * signal.control_share)
        bets = begin_bets(signal, tolerance, CONFIG.margin)
        bets.spread(CONTROL_DAYS * DAY, begin=begin, is_whole=found.is_whole)

        def note(one: Observation, bets: Bets = bets, needed: float = needed) -> None:
            if bets.most_worse >= needed:
                days.append(one.at / DAY)

        add_bets(bets, signal, found.observations.get(signal.name, ()), tolerance, note)
    return min(days)


def retired_after(world: World, seed: int) -> float:
    """Days after the change until a look retires the champion; infinite if none does."""
    draw = Draw(world, seed)
    # A proof stands in all later looks that know its sessions, so the first look that sees it is found by halving. What
    # the last one knows tells about where it is, which saves most of the looks.
    low, high = 0, round((world.days - world.change) / STEP)
    last = draw.evidence(world.days)
    if not draw.is_retired(world.days, last):
        return math.inf
    about = proven_by(last, max(0.0, world.days * DAY - CONTROL_S))
    first = [math.ceil((about - world.change) / STEP) - early for early in (0, 1)] if about < math.inf else []
    while high - low > 1:
        middle = first.pop(0) if first else (low + high) // 2
        if not low < middle < high:
            continue
        low, high = (low, middle) if draw.is_retired(world.change + middle * STEP) else (middle, high)
    return high * STEP


def is_wrong(world: World, seed: int) -> bool:
    """Whether any look, one every other day, retires an equal champion."""
    draw = Draw(world, seed)
    return any(draw.is_retired(day) for day in range(2, round(world.days) + 1, 2))


def control(draws: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Simulate control groups with so many sessions a day."""
    metrics = dict[str, Any]()
    with get_context("spawn").Pool(2) as pool:

        def days(world: World) -> list[float]:
            its = max(4, draws // 4) if world.a_day > 500 else draws
            return sorted(pool.imap_unordered(partial(retired_after, world), range(its)))

        if 500 in sizes:
            equal = World(500, 0.05, 0.0, 0.0, 30)
            metrics["false_alarm"] = fmean(pool.imap_unordered(partial(is_wrong, equal), range(draws)))
            say(f"equal for 30 days: {metrics['false_alarm']:.3f} retired")
        for a_day in sizes:
            for kept in (0.05, 0.2):
                for coverage, more in ((1.0, ""), (0.1, "_seldom")):
                    found = days(World(a_day, kept, 0.2, CHANGE, CHANGE + 8, coverage))
                    name = f"{a_day}_{100 * kept:g}{more}"
                    metrics[f"degraded_found_{name}"] = fmean(day <= 8 for day in found)
                    if math.isfinite(median(found)):
                        metrics[f"degraded_days_{name}"] = median(found)
                    say(f"worse by 0.2, {name}: {metrics[f'degraded_found_{name}']:.2f} found, {median(found)} days")
                if a_day >= 500:
                    found = days(World(a_day, kept, 0.1, 0.0, 28.0, 0.1, True))
                    metrics[f"judge_bias_found_{a_day}_{100 * kept:g}"] = fmean(map(math.isfinite, found))
                    if math.isfinite(p90 := quantiles(found, n=10)[-1]):
                        metrics[f"judge_bias_days_{a_day}_{100 * kept:g}"] = p90
                    say(f"a judge likes what is worse by 0.1, {a_day} {kept:.0%}: {found}")
    return metrics | {"draws": draws}


def main() -> None:
    """Measure and print."""
    parts = ("control", "drift", "loop", "never", "overhead", "take_over")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 500], help="sessions a day of `control`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--home", type=Path, help="keep models, stores and logs here")
    asked = parser.parse_args()
    metrics = control(asked.draws, asked.sizes) if "control" in asked.only else {}
    with tempfile.TemporaryDirectory() as temporary:
        home = (asked.home or Path(temporary)).absolute()
        if "drift" in asked.only:
            metrics |= incumbent_drift.alias_drift(Path(temporary))
        if "overhead" in asked.only:
            metrics |= incumbent_overhead.overhead()
        if "loop" in asked.only:
            metrics |= incumbent_loop.summary([incumbent_loop.loop(home, seed) for seed in asked.seeds])
        if "never" in asked.only:
            metrics |= incumbent_loop.never(home, asked.seeds[0])
        if "take_over" in asked.only:
            metrics |= incumbent_loop.take_over(home, asked.seeds[0])
    finish(metrics, (*TARGETS, *incumbent_loop.TARGETS), as_json=asked.json)


if __name__ == "__main__":
    main()
