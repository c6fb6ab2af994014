"""Compare: base and trained model, judged side by side on held-out scenarios; a table, and a plot beside this file.

`python evaluate.py` after `python train.py`, with the same options.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from roles import add_options, learner, roles, scenarios_of
from rollout import side_by_side

import art_patch as art


async def evaluate(asked: argparse.Namespace) -> art.Evaluation:
    """Let both answer every held-out question four times."""
    with roles(asked) as who, art.LocalBackend(path=asked.path) as backend:
        scenarios = await scenarios_of(asked, who)
        model = learner(asked, who, scenarios)
        await model.register(backend)
        policies = [await model.checkpoint(0), await model.checkpoint(await model.get_step())]
        judge = who.judged(asked.task, may_fail=False)
        found = await side_by_side(policies, scenarios.system_prompt, scenarios.held_out(), judge, runs=4)
        found.plot(
            asked.plot,
            title=f"RULER by {who.judge}, held-out scenarios",
            curve=await model.history("train/reward"),
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
    print(json.dumps(found.to_json()) if asked.json else found.table("reward", "words"))


if __name__ == "__main__":
    main()
