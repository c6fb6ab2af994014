"""Train: `python train.py` on a laptop, `python train.py --base-model Qwen/Qwen2.5-3B-Instruct` on a GPU.

Goes on where an earlier run of the same seed and directory ended. With `--json` the last line says `before`, `after`
(share of right parts on held-out puzzles, sampled) and `wall_s`.
"""

from __future__ import annotations

import argparse
import time

from puzzles import held_out, lessons
from rollout import learner, rollout

import art_patch as art
from art_patch.demo.example_script import before_and_after, run_training

STEPS, PUZZLES, SIBLINGS = 8, 16, 10


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
                art.TrajectoryGroup(rollout(model, puzzle) for _ in range(SIBLINGS))
                for puzzle in lessons(size, PUZZLES, seed=f"{asked.seed} {step}")
            )
            await model.train(groups, config=config)
        after = await art.evaluate(rollout, held_out(size), [model], runs=4)
    return before_and_after(before, after, "right", began)


if __name__ == "__main__":
    run_training(train, __doc__, steps=STEPS, metric="right")
