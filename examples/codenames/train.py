"""Train: `python train.py` on a laptop, `python train.py --base-model Qwen/Qwen2.5-3B-Instruct` on a GPU.

Goes on where an earlier run of the same seed and directory ended. With `--json` the last line says `before`, `after`
(mean reward on held-out boards, sampled) and `wall_s`.
"""

from __future__ import annotations

import argparse
import time

from game import held_out, lessons
from rollout import learner, rollout

import art_patch as art
from art_patch.demo.example_script import before_and_after, run_training

STEPS, BOARDS, SIBLINGS = 24, 16, 10


async def train(asked: argparse.Namespace) -> dict[str, float]:
    """Evaluate, learn for some steps, evaluate again."""
    began = time.monotonic()
    model, size = learner(asked.base_model, asked.seed)
    config = art.TrainConfig(learning_rate=1e-5 if asked.base_model else 1e-3, seed=asked.seed)
    with art.LocalBackend(path=asked.path) as backend:
        await model.register(backend)
        before = await art.evaluate(rollout, held_out(size), [await model.checkpoint(0)], runs=4)
        for step in range(await model.get_step(), asked.steps):
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(model, board) for _ in range(SIBLINGS))
                for board in lessons(size, BOARDS, seed=f"{asked.seed} {step}")
            )
            await model.train(groups, config=config)
        after = await art.evaluate(rollout, held_out(size), [model], runs=4)
    return before_and_after(before, after, "reward", began)


if __name__ == "__main__":
    run_training(train, __doc__, steps=STEPS, metric="reward")
