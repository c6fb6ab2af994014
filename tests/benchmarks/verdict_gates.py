"""How often the gate promotes a policy that is no better, and finds one that is: the part `gate` of `verdicts.py`.

The worlds are made here, and the shipped code decides. Each scenario has two turns, with four answers of each policy;
an answer's quality is normal with standard deviation 1. A judge, who errs by half of that, ranks the eight answers of a
turn in two orders.

- `gate_users_worst`: policies that are equal on average, and users who differ: for each, the candidate is better by a
  number that is normal with standard deviation 0.8. A quarter as many users as scenarios, or three of them.
- `gate_skew_worst`: policies that are equal on average: on nine scenarios of ten the candidate is better by 0.05 of the
  judge's scale, and on one worse by 0.45; the judge's mean of a scenario errs by one of `ERRORS`.
- `gate_power`, `gate_power_users`: a candidate that is better by 0.5, with 30 scenarios that are independent, and with
  60 of 15 users who differ.
- `judge_bias_told`: the judge gives our style 0.1 more while the truth falls by 0.1. Share of the reports that show
  both gains with limits, and name the disagreement or the number of values that it takes; worst of four kinds. Gate: a
  check that knows the truth of 6 or of all 60 scenarios. Canary: feedback on a tenth of the sessions, after 1,000
  sessions and after `ENOUGH` of them. That many suffice, so there only reports count that name the disagreement.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from art_patch import promotion
from art_patch.gate import GateConfig, decide, gains_in_words, paired_gain
from art_patch.types import ArmCall, ArmTraffic, Score
from tests.support.benchmark_report import Target, say

TARGETS = (
    Target("gate_users_worst", None, 0.05, "equal policies promoted where users differ, less two standard errors"),
    Target("gate_skew_worst", None, 0.06, "the same where one task of ten is ruined, less two standard errors"),
    Target("gate_power", 0.9, None, "of policies better by 0.5 sd promoted, 30 scenarios"),
    Target("gate_power_users", 0.6, None, "the same, 60 scenarios of 15 users who differ"),
    Target("judge_bias_told", 0.9, None, "of reports on a judge that likes our style, worst kind"),
)

CONFIG = GateConfig()
JUDGE_ERROR = 0.5
ERRORS = (0.0, 0.05, 0.1, 0.175)
BIAS = 0.1
ENOUGH = 15_000

# Scores of the turns, and the users of the scenarios.
World = tuple[list[tuple[str, float, float]], dict[str, str | None]]


def ranked(rng: random.Random, better: float) -> tuple[float, float]:
    """Mean scores of one turn, over both orders: the ranks, from 0 to 1, of four answers of each policy."""
    quality = [rng.gauss(better if place < 4 else 0.0, 1.0) for place in range(8)]
    total = [0.0] * 8
    for _ in range(CONFIG.orders):
        seen = [each + rng.gauss(0, JUDGE_ERROR) for each in quality]
        for rank, place in enumerate(sorted(range(8), key=seen.__getitem__)):
            total[place] += rank / 7 / CONFIG.orders
    return fmean(total[:4]), fmean(total[4:])


def of_users(rng: random.Random, scenarios: int, users: int, better: float, sd: float, even: bool = False) -> World:
    """Users who differ by `sd`; without users, each scenario is by itself."""
    tastes = [rng.gauss(better, sd) for _ in range(users)]
    pairs: list[tuple[str, float, float]] = []
    user_of: dict[str, str | None] = {}
    for number in range(scenarios):
        user = number % users if even else rng.randrange(users) if users else None
        user_of[f"s{number}"] = None if user is None else f"u{user}"
        for _ in range(CONFIG.turns_per_scenario):
            pairs.append((f"s{number}", *ranked(rng, better if user is None else tastes[user])))
    return pairs, user_of


def skewed(rng: random.Random, scenarios: int, error: float) -> World:
    """A candidate that ruins one scenario of ten and is as good on average."""
    gains = [(-0.45 if rng.random() < 0.1 else 0.05) + rng.gauss(0, error) for _ in range(scenarios)]
    return [(f"s{number}", 0.5 + gain, 0.5) for number, gain in enumerate(gains) for _ in range(2)], {}


CELLS: dict[str, Callable[[random.Random], World]] = {
    "users 30/7": lambda rng: of_users(rng, 30, 7, 0.0, 0.8),
    "users 60/15": lambda rng: of_users(rng, 60, 15, 0.0, 0.8),
    "users 30/3": lambda rng: of_users(rng, 30, 3, 0.0, 0.8),
    "users 60/3": lambda rng: of_users(rng, 60, 3, 0.0, 0.8),
    **{
        f"skew {count}, error {error:g}": lambda rng, count=count, error=error: skewed(rng, count, error)
        for count in (30, 60)
        for error in ERRORS
    },
    "equal 30": lambda rng: of_users(rng, 30, 0, 0.0, 0.0),
    "better 30": lambda rng: of_users(rng, 30, 0, 0.5, 0.0),
    "better 60/15": lambda rng: of_users(rng, 60, 15, 0.5, 0.8, even=True),
}


def is_promoted(job: tuple[str, int]) -> bool:
    """Whether the shipped code promotes the candidate of one world."""
    name, number = job
    pairs, user_of = CELLS[name](random.Random(f"{job}"))
    return decide(pairs, CONFIG, user_of=user_of, seed=number).promote


def gates(pool: Any, draws: int) -> dict[str, float]:
    """How often the gate promotes, in each cell."""
    rates: dict[str, float] = {}
    for name in CELLS:
        rates[name] = fmean(pool.imap_unordered(is_promoted, [(name, number) for number in range(draws)], 16))
        say(f"gate, {name}: {rates[name]:.4f} promoted")

    def worst(kind: str) -> tuple[float, float]:
        found = [rate for name, rate in rates.items() if name.startswith(kind)]
        return max(found), less_two_errors(found, draws)

    metrics = {"gate_power": rates["better 30"], "gate_power_users": rates["better 60/15"], "gate_draws": draws}
    metrics |= {"gate_equal_rate": rates["equal 30"]}
    for kind in ("users", "skew"):
        metrics[f"gate_{kind}_rate"], metrics[f"gate_{kind}_worst"] = worst(kind)
    told_rates: dict[str, float] = {}
    for kind in KINDS:
        some = max(40, draws // 20) if kind.startswith("canary") else draws
        told_rates[kind] = fmean(pool.imap_unordered(is_told, [(kind, number) for number in range(some)], 1))
        say(f"a judge that likes our style, {kind}: {told_rates[kind]:.4f} told")
    return metrics | {"judge_bias_told": min(told_rates.values())}


def gate_report(rng: random.Random, known: int) -> str:
    """What a gate says of both gains, if a check knows the truth of so many of the 60 scenarios."""
    judged: list[tuple[str, float, float]] = []
    checked: list[tuple[str, float, float]] = []
    for number in range(60):
        for _ in range(CONFIG.turns_per_scenario):
            ours, theirs = ranked(rng, 0.0)
            judged.append((f"s{number}", ours + BIAS / 2, theirs - BIAS / 2))
            if number < known:
                rates = (fmean(rng.random() < rate for _ in range(CONFIG.samples)) for rate in (0.6 - BIAS, 0.6))
                checked.append((f"s{number}", *rates))
    return gains_in_words(paired_gain("the judge", judged), [paired_gain("check truth", checked)])


def canary_report(rng: random.Random, sessions: int) -> str:
    """What a canary's test says of both gains after so many sessions, half of them the canary's."""
    calls: list[ArmCall] = []
    scores: list[Score] = []
    for number in range(sessions):
        new, at, group = rng.random() < 0.5, 100.0 * number, f"g{number // 4}"
        calls.append(
            ArmCall(
                f"c{number}", f"t{number}", f"s{number}", group, at, "agent@1" if new else "agent@0",
                duration_ms=500.0, status="ok", fell_back=False, ttft_ms=None, empty=False,
            )
        )  # fmt: skip
        liked = min(1.0, max(0.0, 0.45 + BIAS * new + rng.gauss(0, 0.2)))
        scores.append(Score(f"j{number}", f"t{number}", "ruler", liked, "ruler", at + 500.0, group_id=group))
        if rng.random() < 0.1:
            value = float(rng.random() < 0.6 - BIAS * new)
            scores.append(Score(f"f{number}", f"t{number}", "thumbs", value, "user", at + 10.0))
    traffic, now = ArmTraffic(tuple(calls), tuple(scores), ((-100.0, 50.0),)), 100.0 * sessions + 86_400.0
    evidence = promotion.evidence_of(traffic, challenger="agent@1", champion="agent@0", state="canary", now=now)
    verdict = promotion.decide(evidence, state="canary", hours=24.0, config=promotion.CanaryConfig())
    return promotion.with_gains(verdict, evidence).reason


KINDS: dict[str, Callable[[random.Random], str]] = {
    "gate, 6 checked": lambda rng: gate_report(rng, 6),
    "gate, 60 checked": lambda rng: gate_report(rng, 60),
    "canary, 1,000": lambda rng: canary_report(rng, 1_000),
    "canary, enough": lambda rng: canary_report(rng, ENOUGH),
}


def is_told(job: tuple[str, int]) -> bool:
    """Whether a report shows both gains with limits, and says that they disagree or what it takes to show that."""
    kind = job[0]
    report = KINDS[kind](random.Random(f"{job}"))
    shown = "gains: the judge" in report and report.count(" to +") + report.count(" to -") >= 2
    says = "disagree" in report or ("takes about" in report and not kind.endswith("enough"))
    return shown and says


def less_two_errors(rates: Iterable[float], draws: int) -> float:
    """The worst of the rates, each less two standard errors."""
    return max(max(0.0, rate - 2 * (rate * (1 - rate) / draws) ** 0.5) for rate in rates)
