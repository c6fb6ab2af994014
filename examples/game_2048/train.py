"""Train: `python train.py` on a laptop, `python train.py --base-model Qwen/Qwen2.5-3B-Instruct --limit 100` on a GPU.

Goes on where an earlier run of the same seed and directory ended. With `--json` the last line says `before`, `after`
(mean score of held-out games, sampled) and `wall_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from functools import partial

from games import held_out, lessons, tiny
from rollout import NAME, rollout

import art_patch as art

STEPS, GAMES, SIBLINGS, LIMIT = 6, 10, 8, 30


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
    return {
        "before": round(before.models[0].metrics["score"].value, 1),
        "after": round(after.models[0].metrics["score"].value, 1),
        "wall_s": round(time.monotonic() - began, 1),
    }


def main() -> None:
    """Read the options, train, say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", help="model directory or Hugging Face id; a tiny one is made unless given")
    parser.add_argument("--steps", type=int, default=STEPS, help="updates (%(default)s)")
    parser.add_argument("--limit", type=int, default=LIMIT, help="moves of a game (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (%(default)s)")
    parser.add_argument("--path", help="directory for what is kept; the user's data directory unless given")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    asked = parser.parse_args()
    found = asyncio.run(train(asked))
    print(json.dumps(found) if asked.json else f"score {found['before']} -> {found['after']}, {found['wall_s']} s")


if __name__ == "__main__":
    main()
