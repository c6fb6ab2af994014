"""Train: `python train.py` on a laptop, `python train.py --base-model Qwen/Qwen2.5-14B-Instruct` on a GPU.

Goes on where an earlier run of the same seed and directory ended. With `--json` the last line says `before`, `after`
(right answers to held-out questions, sampled) and `wall_s`. `--inbox` and `--questions` name one's own, see README.
"""

from __future__ import annotations

import argparse
import time

from rollout import NAME, rollout
from scenarios import add_options, chosen
from stand_in import tiny

import art_patch as art
from art_patch.demo.example_script import before_and_after, run_training

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
    return before_and_after(before, after, "right", began)


if __name__ == "__main__":
    run_training(train, __doc__, steps=STEPS, metric="right", options=add_options)
