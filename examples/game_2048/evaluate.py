"""Compare: the base model and what training made of it, on held-out games; a table, and a plot beside this file.

`python evaluate.py` after `python train.py`, with the same `--seed`, `--base-model`, `--limit` and `--path`.
"""

from __future__ import annotations

import argparse
from functools import partial

from games import held_out, tiny
from rollout import NAME, add_options, rollout

import art_patch as art
from art_patch.demo.example_script import base_and_trained, run_evaluation


async def evaluate(asked: argparse.Namespace) -> art.Evaluation:
    """Let both play every held-out game."""
    base_model = asked.base_model or str(tiny(asked.seed))
    model = art.TrainableModel(name=NAME, project=f"{NAME}-{asked.seed}", base_model=base_model)
    with art.LocalBackend(path=asked.path) as backend:
        await model.register(backend)
        found = await art.evaluate(partial(rollout, limit=asked.limit), held_out(), await base_and_trained(model))
        found.plot(
            asked.plot,
            metric="score",
            title=f"2048, score of held-out games of at most {asked.limit} moves",
            curve=await model.history("train/score"),
        )
    return found


if __name__ == "__main__":
    run_evaluation(
        evaluate, __doc__, script=__file__, columns=("score", "max_tile", "moves", "illegal"), options=add_options
    )
