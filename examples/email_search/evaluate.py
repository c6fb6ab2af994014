"""Compare: the base model and what training made of it, on held-out questions; a table, and a plot beside this file.

`python evaluate.py` after `python train.py`, with the same `--seed`, `--base-model` and `--path`, and the same inbox.
"""

from __future__ import annotations

import argparse

from rollout import NAME, rollout
from scenarios import add_options, chosen
from stand_in import tiny

import art_patch as art
from art_patch.demo.example_script import base_and_trained, run_evaluation


async def evaluate(asked: argparse.Namespace) -> art.Evaluation:
    """Let both answer every held-out question twice."""
    base_model = asked.base_model or str(tiny(asked.seed))
    model = art.TrainableModel(name=NAME, project=f"{NAME}-{asked.seed}", base_model=base_model)
    with art.LocalBackend(path=asked.path) as backend:
        await model.register(backend)
        found = await art.evaluate(rollout, chosen(asked).held_out(), await base_and_trained(model), runs=2)
        found.plot(
            asked.plot,
            metric="right",
            title="Email search, held-out questions",
            curve=await model.history("train/right"),
        )
    return found


if __name__ == "__main__":
    run_evaluation(
        evaluate,
        __doc__,
        script=__file__,
        columns=("right", "read_it", "gave_up", "turns", "reward"),
        options=add_options,
    )
