"""Compare: the base model and what training made of it, on held-out questions; a table, and a plot beside this file.

`python evaluate.py` after `python train.py`, with the same `--seed`, `--base-model` and `--path`, and the same inbox.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from rollout import NAME, rollout
from scenarios import add_options, chosen
from stand_in import tiny

import art_patch as art


async def evaluate(asked: argparse.Namespace) -> art.Evaluation:
    """Let both answer every held-out question twice."""
    base_model = asked.base_model or str(tiny(asked.seed))
    model = art.TrainableModel(name=NAME, project=f"{NAME}-{asked.seed}", base_model=base_model)
    with art.LocalBackend(path=asked.path) as backend:
        await model.register(backend)
        policies = [await model.checkpoint(0), await model.checkpoint(await model.get_step())]
        found = await art.evaluate(rollout, chosen(asked).held_out(), policies, runs=2)
        found.plot(
            asked.plot,
            figure="right",
            title="Email search, held-out questions",
            curve=await model.history("train/right"),
        )
    return found


def main() -> None:
    """Read the options, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--plot", type=Path, default=Path(__file__).with_name("result.png"), help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="JSON in place of the table")
    asked = parser.parse_args()
    found = asyncio.run(evaluate(asked))
    print(json.dumps(found.to_json()) if asked.json else found.table("right", "read_it", "gave_up", "turns", "reward"))


if __name__ == "__main__":
    main()
