"""Compare: the base model and what training made of it, on held-out boards; a table, and a plot beside this file.

`python evaluate.py` after `python train.py`, with the same `--seed`, `--base-model` and `--path`.
"""

from __future__ import annotations

import argparse

from game import held_out
from rollout import learner, rollout

import art_patch as art
from art_patch.demo.example_script import base_and_trained, run_evaluation


async def evaluate(asked: argparse.Namespace) -> art.Evaluation:
    """Let both play every held-out board four times."""
    model, size = learner(asked.base_model, asked.seed)
    with art.LocalBackend(path=asked.path) as backend:
        await model.register(backend)
        found = await art.evaluate(rollout, held_out(size), await base_and_trained(model), runs=4)
        found.plot(
            asked.plot,
            metric="reward",
            title="Codenames, mean reward, held-out boards",
            curve=await model.history("train/reward"),
        )
    return found


if __name__ == "__main__":
    run_evaluation(evaluate, __doc__, script=__file__, columns=("reward", "found", "assassin", "won"))
