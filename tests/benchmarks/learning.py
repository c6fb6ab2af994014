"""Whether the demo's agent learns, from every seed, goes on doing so, and learns nothing from shuffled rewards.

::

    python tests/benchmarks/learning.py [--json] [--seeds 1 2 3 4 5] [--cycles 4] [--no-control]

Runs `art-patch demo` for each seed, twice as many cycles as `--cycles` says, one seed after the other. A seed takes
about ten minutes on two cores. Progress goes to stderr; with `--json` the last line of stdout is one object of named
metrics, with `missed` listing the targets that were not met.

With `--home` the runs are kept there, and what is there already is gone on with, not repeated.

- `sampled_least`, `greedy_least`: success on unseen tasks after `--cycles` cycles, of the worst seed, at the sampling
  temperature and greedy; `sampled_seed_N`, `greedy_seed_N`: the whole curve of each seed, the first value before any.
- `sampled_later_least`: the lowest sampled success of any seed in any of the cycles after these: whether one collapses.
- `control_rise`: sampled success of the first seed, the best of all cycles minus that before, when the rewards of
  siblings are shuffled and the gate lets everything through.
- `failed_calls`: calls that failed or fell back, over all seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.benchmark_report import Target, finish, say  # noqa: E402 - the line above makes it importable

TARGETS = (
    Target("sampled_least", 0.8, None, "of the worst seed"),
    Target("greedy_least", 0.8, None, "of the worst seed"),
    Target("sampled_later_least", 0.75, None, "no seed collapses when it runs twice as long"),
    Target("control_rise", None, 0.1, "with shuffled rewards"),
    Target("failed_calls", None, 0, "failed or fell back"),
)


def demo(home: Path, seed: int, cycles: int, *, control: bool = False) -> dict[str, Any]:
    """Run what is missing, and return the demo's metrics."""
    kept = home / f"seed-{seed}{'-control' if control else ''}.json"
    metrics: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"cycles": 0}
    if metrics["cycles"] < cycles:
        command = [
            sys.executable, "-m", "art_patch", "demo", "--seed", str(seed), "--cycles", str(cycles - metrics["cycles"]),
            "--json", "--engine", "embedded", "--home", str(home), *(["--control"] if control else []),
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        if done.returncode:
            sys.exit(f"the demo of seed {seed} ended with {done.returncode}")
        failed = metrics.get("failed_calls", 0)
        metrics = json.loads(done.stdout)
        metrics["failed_calls"] += failed  # the demo counts those of its own run
        kept.write_text(json.dumps(metrics))
    say(f"seed {seed}{', control' if control else ''}: {metrics['curve']}, greedy {metrics['greedy_curve']}")
    return metrics


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description="Whether the demo's agent learns, from every seed.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--home", type=Path, help="keep the runs here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(asked, asked.home or Path(temporary))


def measure(asked: argparse.Namespace, home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    for seed in asked.seeds:  # all seeds once before any goes on: so what was kept says something early
        demo(home, seed, asked.cycles)
    runs = {seed: demo(home, seed, 2 * asked.cycles) for seed in asked.seeds}
    metrics: dict[str, Any] = {
        "sampled_least": min(run["curve"][asked.cycles] for run in runs.values()),
        "greedy_least": min(run["greedy_curve"][asked.cycles] for run in runs.values()),
        "sampled_later_least": min(min(run["curve"][asked.cycles :]) for run in runs.values()),
        "failed_calls": sum(run["failed_calls"] for run in runs.values()),
    }
    for seed, run in runs.items():
        metrics |= {f"sampled_seed_{seed}": run["curve"], f"greedy_seed_{seed}": run["greedy_curve"]}
    if not asked.no_control:
        control = demo(home, asked.seeds[0], asked.cycles, control=True)
        metrics |= {
            "control_rise": max(control["curve"]) - control["curve"][0],
            "sampled_control": control["curve"],
            "greedy_control": control["greedy_curve"],
        }
    finish(metrics, TARGETS, as_json=asked.json)


if __name__ == "__main__":
    main()
