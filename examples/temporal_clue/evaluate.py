"""Compare: the base model and what training made of it, on held-out puzzles; a table, and a plot beside this file.

`python evaluate.py` after `python train.py`, with the same `--seed`, `--base-model` and `--path`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from puzzles import held_out
from rollout import learner, rollout

import art_patch as art


async def evaluate(asked: argparse.Namespace) -> art.Evaluation:
    """Let both solve every held-out puzzle four times."""
    model, size = learner(asked.base_model, asked.seed)
    with art.LocalBackend(path=asked.path) as backend:
        await model.register(backend)
        policies = [await model.checkpoint(0), await model.checkpoint(await model.get_step())]
        found = await art.evaluate(rollout, held_out(size), policies, runs=4)
        found.plot(
            asked.plot,
            figure="right",
            title="Temporal Clue, share of right parts, held-out puzzles",
            curve=await model.history("train/right"),
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
    print(json.dumps(found.to_json()) if asked.json else found.table("right", "solved"))


if __name__ == "__main__":
    main()
