"""How often the canary test is wrong on traffic like that of real apps, and how soon it is right; the same of the gate.

::

    python tests/benchmarks/verdicts.py [--json] [--draws 60] [--days-draws 60] [--gate-draws 400]
                                          [--only equal,harm,better,gate,learning] [--toy-seeds 24]
                                          [--demo-seeds 1 2 3] [--truths "feedback twice as late"] [--kept FILE]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met; without it, a table. Some minutes with the default number of draws; hours with 4,000. A draw
of equal policies is made from its number, so with `--kept` what was drawn before is gone on with, not repeated.

How it is measured: each draw is the traffic of a test by the generator below, as the store would hand it over, decided
by `promotion.evidence_of` and `promotion.decide` as they are shipped. What was decided once stands, so one look at the
end of a draw with a fixed share tells of all looks before. An estimate meets its target if it is at most the target and
two standard errors.

- `equal_ended_worst`: equal policies whose test ended within a day, for whichever reason, worst of the truths in
  `EQUAL`, with 500 sessions a day (`--a-day 5000` for more), and 5 % and 20 % of them for the canary.
  `equal_promoted_rewritten`: the same where sessions of ten runs are scored over hours, in part again and again.
- `fallback_gain`: a policy that leaves its hardest tenth of the sessions to upstream, which rescues them all: how much
  better its mean reward seems than if it had answered them itself.
- `worse_ended_day`, `worse_exposed_p90`: a policy whose reward is worse by 0.4, 500 sessions a day; how often it is
  rolled back within a day, and how many sessions it had, 90th percentile. `all_fail_*`: a policy that fails in every
  call, looked at every five seconds; so many sessions and calls met it at most, with 500 and 5,000 sessions a day.
- `better_days_1`, `better_days_2`: a policy better by 0.1, promoted within five days, and by 0.2, within two.
  `*_median_days_*`: of those that were promoted within seven days; also with 50 and 5,000 sessions a day, and with a
  reward on a tenth of the sessions.
- `gate_*`: see `verdict_gates.py`; `anchor_*`: see `verdict_anchors.py`, not measured unless `--only` says so.
- What updates learn from noise, and `cycles_ratio`: see `verdict_learning.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from art_patch.promotion import CanaryConfig, WatchVerdict, decide, evidence_of  # noqa: E402 - after the line above
from art_patch.types import ArmCall, ArmTraffic, CallStatus, Score  # noqa: E402
from tests.benchmarks import verdict_anchors, verdict_gates, verdict_learning  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402

NEW, OLD = "agent@1", "agent@0"
DAY = 86_400.0
CONFIG = CanaryConfig()
_DRAWS_AT_ONCE = 200

TARGETS = (
    Target("equal_ended_worst", None, 0.05, "equal policies that were ended, worst case, less two standard errors"),
    Target("equal_promoted_rewritten", None, 0.05, "the same, scored over time, less two standard errors"),
    Target("fallback_gain", None, 0, "reward that falling back seems to add"),
    Target("worse_ended_day", 0.75, None, "of policies worse by 0.4, rolled back within a day"),
    Target("worse_exposed_p90", None, 40, "sessions that met such a policy, 90th percentile"),
    Target("all_fail_sessions", None, 4, "sessions that met a policy that always fails, most"),
    Target("all_fail_attempts", None, 12, "calls that such a policy failed, most"),
    Target("better_days_1", 0.9, None, "of policies better by 0.1, promoted within 5 days"),
    Target("better_days_2", 0.9, None, "of policies better by 0.2, promoted within 2 days"),
)


class Session(NamedTuple):
    """What happens in a session: its calls, and the scores of its runs."""

    calls: list[ArmCall]
    scores: list[Score]


# Makes a session: of the random numbers, its number, when it begins, and whether it is the canary's.
Truth = Callable[[random.Random, int, float, bool], Session]


def call(
    key: int, number: int, at: float, new: bool, ms: float = 800.0, *, run: str | None = None,
    status: CallStatus = "ok", fell_back: bool = False, empty: bool = False,
) -> ArmCall:  # fmt: skip
    """A call that begins then."""
    return ArmCall(
        f"{key}-{number}", run or f"t{key}", f"s{key}", None, at + ms / 1000, NEW if new else OLD,
        status, fell_back, ms, None, empty,
    )  # fmt: skip


def score(key: str, value: float, at: float, name: str = "reward", number: int = 0) -> Score:
    """What the app or its user says of a run."""
    return Score(f"{key}-{name}-{number}", key, name, value, "user", at)


# --- equal policies ---


def slow_sessions(rng: random.Random, key: int, at: float, new: bool) -> Session:
    """The time of a call differs by session (log-sd 1) more than within one."""
    mean = rng.lognormvariate(7, 1)
    return Session([call(key, n, at + 20 * n, new, mean * rng.lognormvariate(0, 0.3)) for n in range(8)], [])


def bad_sessions(share: float, rate: float, what: str = "status", of: int = 8) -> Truth:
    """A share of the sessions fails, or is cut off, in most of its calls."""

    def truth(rng: random.Random, key: int, at: float, new: bool) -> Session:
        is_bad = rng.random() < share
        failed = [is_bad and rng.random() < rate for _ in range(of)]
        statuses: list[CallStatus] = ["error" if each and what == "status" else "ok" for each in failed]
        empty = [each and what == "empty" for each in failed]
        calls = [call(key, n, at + 20 * n, new, status=statuses[n], empty=empty[n]) for n in range(of)]
        return Session(calls, [])

    return truth


def many_calls(rng: random.Random, key: int, at: float, new: bool) -> Session:
    """The number of calls of a session has a long tail, and busy sessions are slow and fail more."""
    number = min(60, int(rng.paretovariate(1.1)))
    status: CallStatus = "error" if number > 20 and rng.random() < 0.5 else "ok"
    return Session([call(key, n, at + 20 * n, new, 500.0 * number**0.5, status=status) for n in range(number)], [])


def late_feedback(rng: random.Random, key: int, at: float, new: bool) -> Session:
    """A third of the sessions says something, bad things sooner; twice as late if the canary answered."""
    value = float(rng.random() < 0.6)
    delay_s = rng.expovariate(1 / (1_200 if value else 600)) * (2 if new else 1)
    said = [score(f"t{key}", value, at + delay_s, "thumbs")] if rng.random() < 0.3 else []
    return Session([call(key, 0, at, new)], said)


def silent_if_unhappy(rng: random.Random, key: int, at: float, new: bool) -> Session:
    """A third of the sessions would say something, but half of those that the canary left unhappy say nothing."""
    value = float(rng.random() < 0.6)
    is_silent = rng.random() > 0.3 or (new and not value and rng.random() < 0.5)
    said = [] if is_silent else [score(f"t{key}", value, at + 60, "thumbs")]
    return Session([call(key, 0, at, new)], said)


def rewarded(worth: float, *, coverage: float = 1.0) -> Truth:
    """Every session has a reward of 0 or 1; the canary's is better by `worth` on average."""

    def truth(rng: random.Random, key: int, at: float, new: bool) -> Session:
        value = float(rng.random() < 0.5 + (worth if new else 0.0))
        said = [score(f"t{key}", value, at + 10)] if rng.random() < coverage else []
        return Session([call(key, 0, at, new, rng.lognormvariate(6.5, 0.5))], said)

    return truth


def rewritten(rng: random.Random, key: int, at: float, new: bool) -> Session:
    """Ten runs, each scored when it is over, some of them again hours later."""
    mood, calls, said = rng.random(), list[ArmCall](), list[Score]()
    for n in range(10):
        run = f"t{key}-{n}"
        calls.append(call(key, n, at + 300 * n, new, run=run))
        for again in range(1 + (rng.random() < 0.5)):
            value = float(rng.random() < mood)
            said.append(score(run, value, at + 300 * n + 30 + again * rng.uniform(600, 20_000), number=again))
    return Session(calls, said)


EQUAL: dict[str, Truth] = {
    "times differ by session": slow_sessions,
    "3 % of sessions fail 60 %": bad_sessions(0.03, 0.6),
    "5 % of sessions are cut off 70 %": bad_sessions(0.05, 0.7, "empty"),
    "1 % of sessions fail always": bad_sessions(0.01, 1.0),
    "3 % of sessions fail always": bad_sessions(0.03, 1.0),
    "Pareto calls a session": many_calls,
    "feedback twice as late": late_feedback,
    "unhappy users of one are silent": silent_if_unhappy,
    "rewards of 0 and 1": rewarded(0.0),
}


# --- draws ---


def look(calls: list[ArmCall], scores: list[Score], shares: list[tuple[float, float]], now: float) -> WatchVerdict:
    """Decide as the shipped code does."""
    known = ArmTraffic(
        tuple(each for each in calls if each.at <= now), tuple(each for each in scores if each.at <= now), tuple(shares)
    )
    found = evidence_of(known, challenger=NEW, champion=OLD, state="canary", now=now, rest_s=CONFIG.rest_s)
    return decide(found, state="canary", hours=now / 3600, config=CONFIG)


def one_day(job: tuple[str, float, float, int]) -> str:
    """What became of an equal canary with a fixed share, after a day."""
    name, a_day, share, _ = job
    rng = random.Random(f"{job}")
    truth = rewritten if name == "rewritten" else EQUAL[name]
    calls, scores = list[ArmCall](), list[Score]()
    for key in range(int(a_day)):
        at = (key + rng.random()) * DAY / a_day
        made = truth(rng, key, at, rng.random() < share)
        calls += made.calls
        scores += made.scores
    return look(calls, scores, [(-100.0, 100 * share)], DAY).action


class Outcome(NamedTuple):
    """What became of a canary, after how many days, and how many sessions and failed calls it had."""

    action: str
    days: float
    sessions: int
    failed: int


def until_decided(job: tuple[str, float, float, float, int]) -> Outcome:
    """Follow a canary from 5 % of the sessions on: with its ramp, and with looks at ever larger distances."""
    name, worth, a_day, days, _ = job
    rng = random.Random(f"{job}")
    coverage = 0.1 if name == "seldom" else 1.0
    truth = always_fails if name == "fails" else rewarded(worth, coverage=coverage)
    shares, calls, scores = [(-100.0, 5.0)], list[ArmCall](), list[Score]()
    looks_at, key, action, now = 5.0, 0, "go on", 0.0
    while now < days * DAY and action == "go on":
        began = (key + rng.random()) * DAY / a_day
        while looks_at < began and action == "go on":
            # A failing policy is looked at every five seconds while a look can see something new.
            if name != "fails" or any(looks_at - 5 <= each.at < looks_at and each.fell_back for each in calls[-9:]):
                verdict = look(calls, scores, shares, now := looks_at)
                action = verdict.action
                if verdict.percent is not None:
                    shares.append((now, verdict.percent))
            looks_at += 5.0 if name == "fails" else max(600.0, 0.05 * looks_at)
        now = max(now, began)
        if action == "go on":
            made = truth(rng, key, began, rng.random() < shares[-1][1] / 100)
            calls += made.calls
            scores += made.scores
            key += 1
    met = [each for each in calls if each.policy == NEW and each.at <= now]
    return Outcome(action, now / DAY, len({each.session for each in met}), sum(each.fell_back for each in met))


def always_fails(rng: random.Random, key: int, at: float, new: bool) -> Session:
    """Upstream answers each call of the canary; after two of them, the session leaves it."""
    return Session([call(key, n, at + 20 * n, new and n < 2, fell_back=new and n < 2) for n in range(8)], [])


def fallback_gain(number: int) -> float:
    """The mean reward that falling back on the hardest tenth seems to add."""
    means: list[float] = []
    for falls_back in (True, False):
        rng = random.Random(number)
        calls, scores = list[ArmCall](), list[Score]()
        for key in range(500):
            at, new, hard = (key + rng.random()) * DAY / 500, rng.random() < 0.5, rng.random() < 0.1
            value = float(rng.random() < (0.2 if hard else 0.6))
            rescued = falls_back and hard and new
            calls.append(call(key, 0, at, new, fell_back=rescued))
            scores.append(score(f"t{key}", 1.0 if rescued else value, at + 10))
        found = look(calls, scores, [(-100.0, 50.0)], DAY).metrics["signals"]["reward"]
        means.append(found["difference"])
    return means[0] - means[1]


# --- measurements ---


def count_ended(pool: Any, name: str, a_day: float, share: float, draws: int, kept: Path | None) -> int:
    """How many of so many draws of equal policies were ended; those that `kept` names are not made again."""
    before: dict[str, list[int]] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    made, ended = before.get(cell := f"{name}, {a_day:g} a day, {share:.0%}", [0, 0])
    if made > draws:
        sys.exit(f"{kept} holds {made} draws of {cell!r}; ask for as many or more, or for another file")
    while made < draws:
        some = min(_DRAWS_AT_ONCE, draws - made)
        jobs = [(name, a_day, share, number) for number in range(made, made + some)]
        ended += sum(each != "go on" for each in pool.imap_unordered(one_day, jobs, 4))
        made += some
        if kept is not None:
            before[cell] = [made, ended]
            kept.write_text(json.dumps(before, indent=1))
    return ended


def equal(
    pool: Any, draws: int, sizes: Sequence[float], truths: Sequence[str], kept: Path | None = None
) -> dict[str, float]:
    """How often equal policies are ended, with so many sessions a day."""
    metrics, worst = dict[str, float](), 0.0
    for a_day in sizes:
        for name in truths:
            for share in (0.05, 0.2):
                per_day = 300.0 if name == "rewritten" else a_day
                rate = count_ended(pool, name, per_day, share, draws, kept) / draws
                low = max(0.0, rate - 2 * (rate * (1 - rate) / draws) ** 0.5)
                say(f"equal, {name}, {per_day:g} sessions a day, {share:.0%}: {rate:.4f} ended")
                if name == "rewritten":
                    metrics["equal_promoted_rewritten"] = max(metrics.get("equal_promoted_rewritten", 0.0), low)
                else:
                    worst = max(worst, low)
                    metrics["equal_ended_rate"] = max(metrics.get("equal_ended_rate", 0.0), rate)
    return metrics | {"equal_ended_worst": worst, "equal_draws": draws}


def harm(pool: Any, draws: int) -> dict[str, float]:
    """How soon a bad policy is stopped."""
    worse = pool.map(until_decided, [("worse", -0.4, 500.0, 1.0, number) for number in range(draws)], 2)
    metrics = {
        "worse_ended_day": fmean(each.action == "roll back" for each in worse),
        "worse_exposed_p90": quantiles([each.sessions for each in worse], n=10)[-1],
        "fallback_gain": fmean(pool.imap_unordered(fallback_gain, range(draws), 4)),
    }
    say(f"worse by 0.4: {metrics}")
    jobs = [("fails", 0.0, a_day, 1.0, number) for a_day in (500.0, 5_000.0) for number in range(draws)]
    dead = pool.map(until_decided, jobs, 2)
    return metrics | {
        "all_fail_sessions": max(each.sessions for each in dead),
        "all_fail_sessions_p90": quantiles([each.sessions for each in dead], n=10)[-1],
        "all_fail_attempts": max(each.failed for each in dead),
        "all_fail_ended": fmean(each.action == "roll back" for each in dead),
    }


def better(pool: Any, draws: int) -> dict[str, float]:
    """How soon a better policy serves."""
    metrics = dict[str, float]()
    for label, name, worth, a_day in (
        ("1", "better", 0.1, 500.0), ("2", "better", 0.2, 500.0), ("2_at_50", "better", 0.2, 50.0),
        ("1_at_5000", "better", 0.1, 5_000.0), ("2_seldom", "seldom", 0.2, 500.0),
    ):  # fmt: skip
        some = max(4, draws // 10) if a_day > 500 else draws
        found = pool.map(until_decided, [(name, worth, a_day, 7.0, number) for number in range(some)], 1)
        days = sorted(each.days for each in found if each.action == "promote")
        metrics[f"better_promoted_{label}"] = len(days) / some
        if days:
            metrics[f"better_median_days_{label}"] = median(days)
        if label in "12":
            metrics[f"better_days_{label}"] = sum(day <= {"1": 5, "2": 2}[label] for day in days) / some
        say(f"better by {worth}, {a_day:g} sessions a day, {name}: {len(days)} of {some} promoted")
    return metrics


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--draws", type=int, default=60, help="of equal policies, for each truth")
    parser.add_argument("--days-draws", type=int, default=60, help="of tests that go on for days")
    parser.add_argument("--a-day", type=float, nargs="+", default=[500.0], help="sessions a day of equal policies")
    parser.add_argument("--truths", nargs="+", choices=(*EQUAL, "rewritten"), default=[*EQUAL, "rewritten"])
    parser.add_argument("--kept", type=Path, help="keep the counts of equal policies here")
    parser.add_argument("--gate-draws", type=int, default=400, help="of the gate's worlds, for each truth")
    parser.add_argument("--anchor-seeds", type=int, default=5, help="tiny models, with and without anchors")
    parser.add_argument("--toy-seeds", type=int, default=24, help="of the toy of `learning`")
    parser.add_argument("--demo-seeds", type=int, nargs="*", default=[], help="for `cycles_ratio`; minutes for each")
    parser.add_argument("--only", default="equal,harm,better,gate,learning")
    arguments = parser.parse_args()
    chosen, metrics = arguments.only.split(","), dict[str, float]()
    # No objects of a draw refer to each other in a circle, and looking for such takes a third of its time.
    with get_context("spawn").Pool(initializer=gc.disable) as pool:
        if "equal" in chosen:
            metrics |= equal(pool, arguments.draws, arguments.a_day, arguments.truths, arguments.kept)
        if "harm" in chosen:
            metrics |= harm(pool, arguments.days_draws)
        if "better" in chosen:
            metrics |= better(pool, arguments.days_draws)
        if "gate" in chosen:
            metrics |= verdict_gates.gates(pool, arguments.gate_draws)
        if "anchors" in chosen:
            metrics |= verdict_anchors.anchors(pool, arguments.anchor_seeds)
    if "learning" in chosen:
        metrics |= verdict_learning.learning(arguments.toy_seeds, arguments.demo_seeds)
    targets = TARGETS + verdict_gates.TARGETS + verdict_anchors.TARGETS + verdict_learning.TARGETS
    finish(metrics, targets, as_json=arguments.json)


if __name__ == "__main__":
    main()
