"""Train: `python train.py` on a laptop, `python train.py --base-model Qwen/Qwen2.5-3B-Instruct --limit 100` on a GPU.

Goes on where an earlier run of the same seed and directory ended. With `--json` the last line says `before`, `after`
(mean score of held-out games, sampled) and `wall_s`.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

from games import held_out, lessons, tiny
from rollout import NAME, add_options, rollout

import art_patch as art
from art_patch.demo.example_script import before_and_after, run_training

STEPS, GAMES, SIBLINGS = 6, 10, 8


async def train(asked: argparse.Namespace) -> dict[str, float]:
    """Evaluate, learn for some steps, evaluate again."""
    began = time.monotonic()
    base_model = asked.base_model or str(tiny(asked.seed))
    config = art.TrainConfig(learning_rate=1e-5 if asked.base_model else 4e-3, seed=asked.seed)
    model = art.TrainableModel(name=NAME, project=f"{NAME}-{asked.seed}", base_model=base_model)
    play = partial(rollout, limit=asked.limit)
    with art.LocalBackend(path=asked.path) as backend:
        await model.register(backend)
        before = await art.evaluate(play, held_out(), [await model.checkpoint(0)])
        for step in range(await model.get_step(), asked.steps):
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(play(model, game) for _ in range(SIBLINGS))
                for game in lessons(GAMES, seed=f"{asked.seed} {step}")
            )
            await model.train(groups, config=config)
        after = await art.evaluate(play, held_out(), [model])
    return before_and_after(before, after, "score", began, digits=1)


if __name__ == "__main__":
    run_training(train, __doc__, steps=STEPS, metric="score", options=add_options)
