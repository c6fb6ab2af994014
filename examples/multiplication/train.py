"""Train: `python train.py` on a laptop, `python train.py --base-model Qwen/Qwen2.5-3B-Instruct` on a GPU.

Goes on where an earlier run of the same seed and directory ended. With `--json` the last line says `before`, `after`
(success on held-out problems, sampled) and `wall_s`.
"""

from __future__ import annotations

import argparse
import time

from problems import held_out, lessons, tiny
from rollout import NAME, rollout

import art_patch as art
from art_patch.demo.example_script import before_and_after, run_training

STEPS, PROBLEMS, SIBLINGS = 12, 24, 12


async def train(asked: argparse.Namespace) -> dict[str, float]:
    """Evaluate, learn for some steps, evaluate again."""
    began = time.monotonic()
    base_model = asked.base_model or str(tiny(asked.seed))
    learning_rate = 1e-5 if asked.base_model else 1e-3
    model = art.TrainableModel(name=NAME, project=f"{NAME}-{asked.seed}", base_model=base_model)
    with art.LocalBackend(path=asked.path) as backend:
        await model.register(backend)
        before = await art.evaluate(rollout, held_out(), [await model.checkpoint(0)], runs=4)
        for step in range(await model.get_step(), asked.steps):
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(model, problem) for _ in range(SIBLINGS))
                for problem in lessons(PROBLEMS, seed=f"{asked.seed} {step}")
            )
            slower = learning_rate * (1 - step / asked.steps)  # late in training most of an update is noise
            await model.train(groups, config=art.TrainConfig(learning_rate=slower, seed=asked.seed))
        after = await art.evaluate(rollout, held_out(), [model], runs=4)
    return before_and_after(before, after, "right", began)


if __name__ == "__main__":
    run_training(train, __doc__, steps=STEPS, metric="success")
