"""Compare: base and trained model, judged side by side on held-out scenarios; a table, and a plot beside this file.

`python evaluate.py` after `python train.py`, with the same options.
"""

from __future__ import annotations

import argparse

from roles import add_options, learner, roles, scenarios_of
from rollout import side_by_side

import art_patch as art
from art_patch.demo.example_script import base_and_trained, run_evaluation


async def evaluate(asked: argparse.Namespace) -> art.Evaluation:
    """Let both answer every held-out question four times."""
    with roles(asked) as who, art.LocalBackend(path=asked.path) as backend:
        scenarios = await scenarios_of(asked, who)
        model = learner(asked, who, scenarios)
        await model.register(backend)
        judge = who.judged(asked.task, may_fail=False)
        found = await side_by_side(
            await base_and_trained(model), scenarios.system_prompt, scenarios.held_out(), judge, runs=4
        )
        found.plot(
            asked.plot,
            title=f"RULER by {who.judge}, held-out scenarios",
            curve=await model.history("train/reward"),
        )
    return found


if __name__ == "__main__":
    run_evaluation(evaluate, __doc__, script=__file__, columns=("reward", "words"), options=add_options)
