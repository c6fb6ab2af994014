"""Train: `python train.py` on a laptop, `python train.py --base-model Qwen/Qwen2.5-3B-Instruct` on a GPU.

Goes on where an earlier run of the same seed and directory ended. With `--json` the last line says `before`, `after`
(success on held-out problems, sampled) and `wall_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from problems import held_out, lessons, tiny
from rollout import NAME, rollout

import art_patch as art

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
    return {
        "before": round(before.models[0].metrics["right"].value, 3),
        "after": round(after.models[0].metrics["right"].value, 3),
        "wall_s": round(time.monotonic() - began, 1),
    }


def main() -> None:
    """Read the options, train, say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", help="model directory or Hugging Face id; a tiny one is made unless given")
    parser.add_argument("--steps", type=int, default=STEPS, help="updates (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (%(default)s)")
    parser.add_argument("--path", help="directory for what is kept; the user's data directory unless given")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    asked = parser.parse_args()
    found = asyncio.run(train(asked))
    print(json.dumps(found) if asked.json else f"success {found['before']} -> {found['after']}, {found['wall_s']} s")


if __name__ == "__main__":
    main()
