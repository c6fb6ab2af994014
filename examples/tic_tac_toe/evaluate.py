"""Compare: the base model and what training made of it, against a random player; a table, and a plot beside this file.

`python evaluate.py` after `python train.py`, with the same `--seed`, `--base-model` and `--path`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from matches import held_out, tiny
from rollout import NAME, rollout

import art_patch as art


async def evaluate(asked: argparse.Namespace) -> art.Evaluation:
    """Let both play every held-out game."""
    base_model = asked.base_model or str(tiny(asked.seed))
    model = art.TrainableModel(name=NAME, project=f"{NAME}-{asked.seed}", base_model=base_model)
    with art.LocalBackend(path=asked.path) as backend:
        await model.register(backend)
        policies = [await model.checkpoint(0), await model.checkpoint(await model.get_step())]
        found = await art.evaluate(rollout, held_out(), policies)
        found.plot(
            asked.plot,
            figure="win_or_draw",
            title="Tic-tac-toe against a random player",
            curve=await model.history("train/against_random"),
        )
    return found


def main() -> None:
    """Read the options, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", help="as it was given to train.py")
    parser.add_argument("--seed", type=int, default=0, help="as it was given to train.py (%(default)s)")
    parser.add_argument("--path", help="as it was given to train.py")
    parser.add_argument("--plot", type=Path, default=Path(__file__).with_name("result.png"), help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="JSON in place of the table")
    asked = parser.parse_args()
    found = asyncio.run(evaluate(asked))
    print(
        json.dumps(found.to_json()) if asked.json else found.table("win_or_draw", "wins", "draws", "losses", "illegal")
    )


if __name__ == "__main__":
    main()
