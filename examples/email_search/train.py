"""Train: `python train.py` on a laptop, `python train.py --base-model Qwen/Qwen2.5-14B-Instruct` on a GPU.

Goes on where an earlier run of the same seed and directory ended. With `--json` the last line says `before`, `after`
(right answers to held-out questions, sampled) and `wall_s`. `--inbox` and `--questions` name one's own, see README.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from rollout import NAME, rollout
from scenarios import add_options, chosen
from stand_in import tiny

import art_patch as art

STEPS, QUESTIONS, SIBLINGS = 11, 24, 12


async def train(asked: argparse.Namespace) -> dict[str, float]:
    """Evaluate, learn for some steps, evaluate again."""
    began = time.monotonic()
    scenarios = chosen(asked)
    base_model = asked.base_model or str(tiny(asked.seed))
    learning_rate = 1e-5 if asked.base_model else 1e-3
    model = art.TrainableModel(name=NAME, project=f"{NAME}-{asked.seed}", base_model=base_model)
    with art.LocalBackend(path=asked.path) as backend:
        await model.register(backend)
        before = await art.evaluate(rollout, scenarios.held_out(), [await model.checkpoint(0)], runs=2)
        for step in range(await model.get_step(), asked.steps):
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(model, question) for _ in range(SIBLINGS))
                for question in scenarios.lesson(QUESTIONS, seed=f"{asked.seed} {step}")
            )
            slower = learning_rate * (1 - step / asked.steps)  # late in training most of an update is noise
            await model.train(groups, config=art.TrainConfig(learning_rate=slower, seed=asked.seed))
        after = await art.evaluate(rollout, scenarios.held_out(), [model], runs=2)
    return {
        "before": round(before.models[0].metrics["right"].value, 3),
        "after": round(after.models[0].metrics["right"].value, 3),
        "wall_s": round(time.monotonic() - began, 1),
    }


def main() -> None:
    """Read the options, train, say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--steps", type=int, default=STEPS, help="updates (%(default)s)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    asked = parser.parse_args()
    found = asyncio.run(train(asked))
    print(json.dumps(found) if asked.json else f"right {found['before']} -> {found['after']}, {found['wall_s']} s")


if __name__ == "__main__":
    main()
