"""Train for a task in one sentence: `python train.py --task "..."`, with stand-ins for every model that is not named.

A helper writes scenarios, the agent answers them, RULER ranks the answers, GRPO learns. Goes on where an earlier run of
the same task, seed and directory ended. With `--json` the last line says `before`, `after` (RULER's mean score on
held-out scenarios, base and trained model judged side by side at the end) and `wall_s`.
"""

from __future__ import annotations

import argparse
import time

from roles import add_options, learner, roles, scenarios_of
from rollout import rollout, side_by_side

import art_patch as art
from art_patch.demo.example_script import base_and_trained, run_training

STEPS, QUESTIONS, SIBLINGS = 8, 16, 10


async def train(asked: argparse.Namespace) -> dict[str, float]:
    """Write scenarios, learn for some steps, let the judge compare."""
    began = time.monotonic()
    config = art.TrainConfig(learning_rate=1e-5 if asked.base_model else 1e-3, seed=asked.seed)
    with roles(asked) as who, art.LocalBackend(path=asked.path) as backend:
        scenarios = await scenarios_of(asked, who)
        model = learner(asked, who, scenarios)
        await model.register(backend)
        for step in range(await model.get_step(), asked.steps):
            groups = await art.gather_trajectory_groups(
                (
                    art.TrajectoryGroup(rollout(model, scenarios.system_prompt, question) for _ in range(SIBLINGS))
                    for question in scenarios.lessons(QUESTIONS, seed=f"{asked.seed} {step}")
                ),
                after_each=who.judged(asked.task, may_fail=True),
            )
            await model.train(groups, config=config)
        policies = await base_and_trained(model)
        judge = who.judged(asked.task, may_fail=False)
        found = await side_by_side(policies, scenarios.system_prompt, scenarios.held_out(), judge, runs=4)
    before, after = (each.metrics["reward"].value for each in found.models)
    return {"before": round(before, 3), "after": round(after, 3), "wall_s": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    run_training(train, __doc__, steps=STEPS, metric="score", options=add_options)
