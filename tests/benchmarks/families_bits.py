"""What packing the base costs in learning: the demo's world, trained with `base_bits` 4 beside 16.

::

    python tests/benchmarks/families_bits.py [--json] [--seeds 1 2 3] [--cycles 3] [--keep FILE]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met. `--keep` writes what is measured to a file as it goes. About five minutes a seed on an idle
core.

Both sides begin with the same base, train on the same recorded runs in the first cycle, and are asked the same
questions later; then each side learns from what its own policy does. The demo's model, tasks and recipe, real engine,
store and updates; the rewards are the demo's rule, and no gate tests a candidate. The engine serves the whole base.

- `bits4_gap`: held-out success with 16 bits minus that with 4, after the last cycle, as the mean over seeds;
  `bits4_gap_error` is its standard error: of the questions that were asked, and of the seeds, whichever is larger.
- `bits4_first_gap`: the same after the first cycle, when both sides learned from the same runs.
- `bits4_logprob_gap_nats`: mean difference of a log-probability between server and trainer that the updates with 4 bits
  reported, the largest of all; `max_gap_nats` refuses .05.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from art_patch.demo.run import CYCLE, EVALUATION_TASKS, ROLLOUTS, SCENARIOS  # noqa: E402 - the line above is needed
from art_patch.demo.shop import make_tasks  # noqa: E402
from art_patch.demo.shop_model import build_model  # noqa: E402
from art_patch.pipeline.score_groups import group, score  # noqa: E402
from art_patch.pipeline.train_policy import train  # noqa: E402
from art_patch.promotion import promote  # noqa: E402
from art_patch.serving import EmbeddedEngine  # noqa: E402
from tests.benchmarks.verdict_learning import World, a_cycle  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402
from tests.support.engines import serve  # noqa: E402

TARGETS = (Target("bits4_gap", None, 0.05, "held-out success lost by an update in 4 bits"),)
BITS = (16, 4)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--home", type=Path, help="has the demo's models, or gets them")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for seed in asked.seeds:
            rows.append(learned(seed, asked.cycles, asked.home or Path(place)))
            if asked.keep:
                asked.keep.write_text(json.dumps(rows, indent=1))
    finish(metrics_of(rows), TARGETS, as_json=asked.json)


def learned(
    seed: int, cycles: int, home: Path, scenarios: int = SCENARIOS, questions: int = EVALUATION_TASKS, times: int = 4
) -> dict[str, Any]:
    """Train on both sides; return the success of each after each cycle, the base's first."""
    base = build_model(home / f"shop-{seed}", seed=seed)
    first: list[Any] = []  # what the base did in the first cycle, which both sides learn from
    row: dict[str, Any] = {"seed": seed, "asked": questions * times}
    for bits in BITS:
        config = replace(CYCLE, train=replace(CYCLE.train, base_bits=bits))
        gaps: list[float] = []
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            with serve(EmbeddedEngine.from_pretrained(base, adapters_root=place / "adapters")) as running:
                world = World(place, running.client, base, seed, config)

                def success(policy: str, world: World = world) -> float:
                    tasks = make_tasks("evaluation", questions, seed=seed)
                    return fmean(run[-1].value for run in world.ask(policy, tasks, times))

                curve = row[f"success_{bits}"] = [row["success_16"][0] if first else success("agent@0")]
                for number in range(1, cycles + 1):
                    champion = world.store.ledger.champion()
                    assert champion is not None
                    tasks = make_tasks("traffic", scenarios, seed=seed * 1_000 + number)
                    runs = first if number == 1 and first else world.ask(champion.name, tasks, ROLLOUTS)
                    first = first or runs
                    world.store.write([record for run in runs for record in run])
                    cycle = a_cycle(world.store, world.config, place, running.client)
                    group(cycle)
                    score(cycle)
                    candidate, why = train(cycle, champion)
                    assert candidate is not None, why
                    gaps.append(candidate.metrics["train"]["logprob_gap_mean_nats"])
                    running.client.load(candidate.name)
                    promote(world.store.ledger, running.client, candidate.name, who="benchmark", reason="ungated")
                    curve.append(success(candidate.name))
                    say(f"seed {seed}, {bits} bits: {[round(each, 3) for each in curve]}, gap {gaps[-1]:.5f} nats")
                world.store.close()
        row[f"logprob_gap_{bits}"] = gaps
    return row


def metrics_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare both sides."""

    def gaps(number: int) -> list[float]:
        return [row["success_16"][number] - row["success_4"][number] for row in rows]

    def variance(row: dict[str, Any]) -> float:
        return sum(share * (1 - share) / row["asked"] for bits in BITS for share in [row[f"success_{bits}"][-1]])

    by_questions = math.sqrt(sum(map(variance, rows))) / len(rows)
    by_seeds = stdev(gaps(-1)) / math.sqrt(len(rows)) if len(rows) > 1 else 0.0
    return {
        "bits4_gap": fmean(gaps(-1)),
        "bits4_gap_error": max(by_questions, by_seeds),
        "bits4_first_gap": fmean(gaps(1)),
        "success_before": fmean(row["success_16"][0] for row in rows),
        "success_16": fmean(row["success_16"][-1] for row in rows),
        "success_4": fmean(row["success_4"][-1] for row in rows),
        "bits4_logprob_gap_nats": max(gap for row in rows for gap in row["logprob_gap_4"]),
    }


if __name__ == "__main__":
    main()
