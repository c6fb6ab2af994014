"""How well and how fast grouping finds the runs of one task among others.

::

    python tests/benchmarks/grouping.py [--json] [--quick]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met; without it, a table. 100,000 runs over 20,000 scenarios; `--quick` takes a tenth.

What the traffic is, and what it cannot show, is said in `traffic.py`. How it is measured:

- `precision`: of all pairs of runs that were given the same scenario, the share that truly have it; `recall`: of all
  pairs that truly have it, the share that were given the same. `precision_same_task` counts the pairs whose normalised
  texts are equal, `precision_near_duplicate` those whose texts differ, `near_duplicate_pairs` says how many these are.
- `confused`: scenarios that share a group with another.
- `grouped`: the share of runs that are in a group.
- `seconds`: `form_groups`, wall time; `cpu_seconds`: what it takes where nothing else runs. `growth`: CPU time divided
  by that for a tenth of the runs.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter, defaultdict
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from art_patch.grouping import Grouping, form_groups  # noqa: E402 - the line above makes it importable
from art_patch.grouping.wording import normalise  # noqa: E402
from tests.benchmarks.traffic import traffic  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402

TARGETS = (
    Target("precision", 0.99, None, "pairs in one scenario that belong together"),
    Target("precision_same_task", 0.99, None, "of the same normalised text"),
    Target("precision_near_duplicate", 0.99, None, "of different texts"),
    Target("recall", 0.95, None, "pairs that belong together and are"),
    Target("seconds", None, 60, "form_groups, s"),
    Target("growth", None, 12, "its CPU time / that for a tenth of the runs"),
)
USUAL, QUICK = 100_000, 10_000


def pairs(counts: Counter[Any]) -> int:
    return sum(size * (size - 1) // 2 for size in counts.values())


def grouped(runs: int, *, seed: int) -> tuple[dict[str, float], Grouping, dict[str, int], dict[str, str]]:
    """Group so much traffic.

    Returns:
        Times; what came of it; run -> number of its scenario; run -> its text.
    """
    made = list(traffic(runs, seed=seed))
    trajectories = [trajectory for trajectory, _ in made]
    truth = {trajectory.id: number for trajectory, number in made}
    texts = {t.id: str(t.calls[0].messages[-1]["content"]) for t in trajectories}
    ids = count()
    gc.collect()
    start, worked = time.perf_counter(), time.process_time()
    grouping = form_groups(trajectories, new_id=lambda: f"g{next(ids)}")
    took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - worked}
    return took, grouping, truth, texts


def judged(grouping: Grouping, truth: dict[str, int], texts: dict[str, str]) -> dict[str, Any]:
    """Compare with the truth, pair by pair."""
    members: dict[str, list[str]] = defaultdict(list)
    for group in grouping.groups:
        members[group.scenario_key] += [trajectory.id for trajectory in group.trajectories]
    found, right, alike, alike_right = 0, 0, 0, 0
    confused: set[int] = set()
    for ids in members.values():
        numbers = Counter(truth[key] for key in ids)
        found += pairs(Counter({"": len(ids)}))
        right += pairs(numbers)
        same = {key: normalise(texts[key]) for key in ids}
        alike += pairs(Counter(same.values()))
        alike_right += pairs(Counter((same[key], truth[key]) for key in ids))
        if len(numbers) > 1:
            confused |= set(numbers)
            if len(confused) < 12:
                examples = {truth[key]: texts[key] for key in ids}
                say("  taken for one: " + " <> ".join(repr(text) for text in list(examples.values())[:2]))
    return {
        "precision": right / found,
        "recall": right / pairs(Counter(truth.values())),
        "precision_same_task": alike_right / alike,
        "precision_near_duplicate": (right - alike_right) / (found - alike),
        "near_duplicate_pairs": found - alike,
        "confused": len(confused),
        "grouped": sum(map(len, members.values())) / len(truth),
        "waiting": len(grouping.waiting),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object, last line of stdout")
    parser.add_argument("--quick", action="store_true", help="a tenth")
    parser.add_argument("--seed", type=int, default=7, help="of the traffic")
    given = parser.parse_args()
    runs = QUICK if given.quick else USUAL
    say(f"{runs // 10} runs")
    before, *_ = grouped(runs // 10, seed=given.seed)
    say(f"  {before['seconds']:.2f} s\n{runs} runs")
    took, grouping, truth, texts = grouped(runs, seed=given.seed)
    say(f"  {took['seconds']:.2f} s")
    metrics = judged(grouping, truth, texts) | took
    metrics |= {"growth": took["cpu_seconds"] / before["cpu_seconds"], "runs": runs}
    finish(metrics, TARGETS, as_json=given.json)


if __name__ == "__main__":
    main()
