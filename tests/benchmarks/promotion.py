"""How far promotion can be trusted: what the gate lets pass, and how soon a rollback is everywhere.

::

    python tests/benchmarks/promotion.py [--json] [--quick] [--only equal]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met; without it, a table. `--quick` takes a tenth.

- `equal`: 1,000 simulated gates for each number of scenarios, in which the candidate is the champion: same questions,
  same distribution of answers, scored by a noisy judge in two orders. In half of them scores are coarse and mostly
  tied. Scenarios are harder or easier for both, and turns of one scenario are alike. `false_promotion_rate` is the
  share that was promoted at the gate's default level; `false_promotion_rate_N` that of gates with N scenarios;
  `found_rate_N` the share that was promoted of as many gates in which the candidate answers better by a tenth of the
  scale, so that nobody can meet the target by promoting nothing.
- `rollback`: three patched apps, each in a process of its own and asking all the time, follow the store at the interval
  that they have by default. `rollback_s` is the time from the start of the process `art-patch rollback` to the first
  answer of the policy before in the last of the apps, the worst of ten; `rollback_down_s` that until the last app knows
  who serves, with the engine dead; `late_answers` counts answers of the old champion after an app's first of the new.
- `canary`: a challenger with 20 % of the sessions that fails, breaks after a while, is slow, or is disliked, three
  times each (`promotion_canary`). `canary_rollback_s` is the time from when it turned bad until the last of three apps
  had left it, the worst of twelve, with `canary_calls_per_s` to learn from; `canary_affected_share` of the calls
  meanwhile were its, more than `canary_affected_share_low` with 95 % certainty, since a hash of the session decides;
  `canary_affected_elsewhere` were of sessions that the hash gives the champion; `canary_late_answers` came later.
- `policies`: 20 better candidates and 28 bad ones in the demo's world (`promotion_policies`), since what was to make
  one worse does not always; ten minutes on two cores. `bad_promoted` of `bad_count` that are truly worse than their
  champion; `better_promoted` of `better_count` that are truly better, and their share. `--quick` takes two better
  ones, and a bad one of each kind.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from art_patch.gate import GateConfig, decide  # noqa: E402 - the line above makes ours importable
from art_patch.settings import Settings  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402
from tests.support.two_apps import App, Place  # noqa: E402

TARGETS = (
    Target("false_promotion_rate", None, 0.05, "of gates in which the candidate is the champion"),
    Target("found_rate_32", 0.8, None, "of gates in which it is better by a tenth of the scale"),
    Target("rollback_s", None, 2.0, "from the command to the last app's first answer of the policy before"),
    Target("rollback_down_s", None, 2.0, "the same with the engine dead: until the last app knows"),
    Target("canary_rollback_s", None, 60.0, "from when a canary turned bad until the last app had left it"),
    Target("canary_affected_share_low", None, 0.2, "of the calls were its, with 95 % certainty more than this"),
    Target("canary_affected_elsewhere", None, 0, "of its calls were in sessions that are the champion's"),
    Target("canary_late_answers", None, 0, "of the canary, after an app had left it"),
    Target("bad_promoted", None, 0, "of policies that are truly worse than the champion"),
    Target("bad_count", 20, None, "policies that are truly worse"),
    Target("better_promoted_share", 0.9, None, "of policies that are truly better: 18 of 20"),
    Target("late_answers", None, 0, "of the policy that was gone back from, after an app's first of the other"),
)

SCENARIOS = (8, 12, 16, 32, 64)
GATES = 1_000
CONFIG = GateConfig(min_scenarios=min(SCENARIOS))


def equal(share: float) -> dict[str, float]:
    """What the gate makes of a candidate that is the champion, and of one that is a little better."""
    gates = max(1, round(GATES * share))
    metrics: dict[str, float] = {}
    for count in SCENARIOS:
        for name, lift in (("false_promotion_rate", 0.0), ("found_rate", 0.1)):
            rng = random.Random(f"{name} {count}")
            promoted = sum(
                decide(simulated(rng, count, lift=lift, coarse=bool(gate % 2)), CONFIG, seed=gate).promote
                for gate in range(gates)
            )
            metrics[f"{name}_{count}"] = promoted / gates
        say(f"{count} scenarios: {metrics[f'false_promotion_rate_{count}']:.3f} of equal ones promoted")
    return {"false_promotion_rate": fmean(metrics[f"false_promotion_rate_{n}"] for n in SCENARIOS)} | metrics


def simulated(rng: random.Random, scenarios: int, *, lift: float, coarse: bool) -> Iterator[tuple[str, float, float]]:
    """Mean scores of a gate's turns, as `merge_orders` makes them."""
    config = GateConfig()
    for scenario in range(scenarios):
        ease = rng.betavariate(2, 2)
        for _ in range(config.turns_per_scenario):
            turn_ease = ease + rng.gauss(0, 0.1)
            ours = [answer(rng, turn_ease + lift, coarse) for _ in range(config.samples)]
            theirs = [answer(rng, turn_ease, coarse) for _ in range(config.samples)]
            yield f"s{scenario}", judged(rng, ours, coarse), judged(rng, theirs, coarse)


def answer(rng: random.Random, quality: float, coarse: bool) -> float:
    """How good one answer is: right or wrong, and mostly alike for both, or anywhere on the scale."""
    if coarse:
        return float(rng.random() < min(1.0, max(0.0, 2 * quality - 0.5)))
    return min(1.0, max(0.0, quality + rng.gauss(0, 0.25)))


def judged(rng: random.Random, answers: list[float], coarse: bool) -> float:
    """The mean score over both orders; a judge gives twentieths, and errs unless answers are simply right or wrong."""
    error = 0.0 if coarse else 0.1
    orders = range(GateConfig().orders)
    return fmean(min(20, max(0, round(20 * (value + rng.gauss(0, error))))) / 20 for value in answers for _ in orders)


ROLLBACKS = 10
APPS = 3


def rollback(share: float) -> dict[str, float]:
    """How long it takes until every app answers with the policy before."""
    rounds = max(2, round(ROLLBACKS * share))
    interval_s = Settings.model_fields["poll_interval_s"].default
    taken_s: list[float] = []
    late = 0
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        place = Place(Path(home), stack, candidates=rounds + 1, apps=APPS, poll_interval_s=interval_s)
        for app in place.apps:
            app.answer("first")
        for step in range(1, rounds + 1):
            place.decide("promote", f"agent@{step}")
            place.follow(champion=f"agent@{step}")
            asking = [_Asking(app, f"agent@{step}") for app in place.apps]
            began = time.monotonic()
            before = place.decide("rollback")["champion"]
            ended = [each.until(before) for each in asking]
            taken_s.append(max(ended) - began)
            late += sum(each.late(before) for each in asking)
            say(f"rollback {step}: {taken_s[-1]:.2f} s")
        place.decide("promote", f"agent@{rounds + 1}")
        place.follow(champion=f"agent@{rounds + 1}")
        place.server.stop(signal.SIGKILL)
        began = time.monotonic()
        before = place.decide("rollback")["champion"]
        place.follow(champion=before)
        down_s = time.monotonic() - began
    return {"rollback_s": max(taken_s), "rollback_down_s": down_s, "late_answers": late}


class _Asking:
    """An app that is asked all the time, and who answered when."""

    def __init__(self, app: App, champion: str) -> None:
        self._answers: list[tuple[float, str]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(app,))
        self._thread.start()
        self.until(champion)

    def _run(self, app: App) -> None:
        number = 0
        while not self._stop.is_set():
            by = app.answer(f"session {number}")
            self._answers.append((time.monotonic(), by))
            number += 1
            time.sleep(0.1)

    def until(self, policy: str) -> float:
        """Wait for the first answer of this policy and return when it came."""
        while True:
            for at, by in list(self._answers):
                if by == policy:
                    return at
            time.sleep(0.01)

    def late(self, policy: str) -> int:
        """Stop asking, and return how many answers after the first of this policy were another's."""
        time.sleep(0.5)
        self._stop.set()
        self._thread.join()
        answers = [by for _, by in self._answers]
        return sum(by != policy for by in answers[answers.index(policy) :])


def policies(share: float) -> dict[str, Any]:
    """What the gate makes of policies that are worse, and of such as are better."""
    from tests.benchmarks import promotion_policies  # with what the demo and the update need

    return promotion_policies.policies(share)


def canary(share: float) -> dict[str, Any]:
    """How long a bad challenger lasts, and whom it meets."""
    from tests.benchmarks import promotion_canary

    return promotion_canary.canary(share)


PARTS: dict[str, Callable[[float], dict[str, Any]]] = {
    "equal": equal,
    "rollback": rollback,
    "canary": canary,
    "policies": policies,
}
"""Name -> what measures it, given the share of the work that `--quick` leaves."""


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description="How far promotion can be trusted.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), metavar="PART")
    asked = parser.parse_args()
    targets = [target for target in TARGETS if target.figure != "bad_count" or not asked.quick]
    metrics: dict[str, Any] = {}
    for part in asked.only:
        metrics |= PARTS[part](0.1 if asked.quick else 1.0)
    finish(metrics, targets, as_json=asked.json)


if __name__ == "__main__":
    main()
