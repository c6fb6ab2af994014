"""Train: `python train.py` on a laptop, `python train.py --base-model Qwen/Qwen2.5-3B-Instruct` on a GPU.

Goes on where an earlier run of the same seed and directory ended. With `--json` the last line says `before`, `after`
(win or draw against a random player, sampled) and `wall_s`.
"""

from __future__ import annotations

import argparse
import random
import time

from matches import held_out, lessons, tiny
from rollout import NAME, rollout

import art_patch as art
from art_patch.demo.example_script import before_and_after, run_training

STEPS, MATCHES, SIBLINGS = 14, 24, 12


async def train(asked: argparse.Namespace) -> dict[str, float]:
    """Evaluate, learn for some steps, evaluate again."""
    began = time.monotonic()
    base_model = asked.base_model or str(tiny(asked.seed))
    learning_rate = 1e-5 if asked.base_model else 1e-3
    model = art.TrainableModel(name=NAME, project=f"{NAME}-{asked.seed}", base_model=base_model)
    with art.LocalBackend(path=asked.path) as backend:
        await model.register(backend)
        before = await art.evaluate(rollout, held_out(), [await model.checkpoint(0)])
        for step in range(await model.get_step(), asked.steps):
            seed = f"{asked.seed} {step}"
            former = random.Random(seed).randrange(step + 1)
            opponents = {"itself": model, "earlier": await model.checkpoint(former), "random": None}
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(model, match, opponents[match.opponent]) for _ in range(SIBLINGS))
                for match in lessons(MATCHES, seed)
            )
            slower = learning_rate * (1 - step / asked.steps)  # late in training most of an update is noise
            await model.train(groups, config=art.TrainConfig(learning_rate=slower, seed=asked.seed))
        after = await art.evaluate(rollout, held_out(), [model])
    return before_and_after(before, after, "win_or_draw", began)


if __name__ == "__main__":
    run_training(train, __doc__, steps=STEPS, metric="win or draw")
