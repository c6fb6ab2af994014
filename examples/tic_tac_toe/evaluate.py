"""Compare: the base model and what training made of it, against a random player; a table, and a plot beside this file.

`python evaluate.py` after `python train.py`, with the same `--seed`, `--base-model` and `--path`.
"""

from __future__ import annotations

import argparse

from matches import held_out, tiny
from rollout import NAME, rollout

import art_patch as art
from art_patch.demo.example_script import base_and_trained, run_evaluation


async def evaluate(asked: argparse.Namespace) -> art.Evaluation:
    """Let both play every held-out game."""
    base_model = asked.base_model or str(tiny(asked.seed))
    model = art.TrainableModel(name=NAME, project=f"{NAME}-{asked.seed}", base_model=base_model)
    with art.LocalBackend(path=asked.path) as backend:
        await model.register(backend)
        found = await art.evaluate(rollout, held_out(), await base_and_trained(model))
        found.plot(
            asked.plot,
            metric="win_or_draw",
            title="Tic-tac-toe against a random player",
            curve=await model.history("train/against_random"),
        )
    return found


if __name__ == "__main__":
    run_evaluation(evaluate, __doc__, script=__file__, columns=("win_or_draw", "wins", "draws", "losses", "illegal"))
