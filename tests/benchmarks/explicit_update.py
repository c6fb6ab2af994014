"""Training by hand in numbers: many rollouts at once of which some raise, and requests while an update runs.

    python tests/benchmarks/explicit_update.py [--rollouts 1000] [--raising 0.05] [--turns 3]

One line of JSON: how many rollouts were trained on and how many raised, what the script's process needed for it
(`peak_mib`, of which `grown_mib` came with the rollouts), and how long requests took beside the update and without it.
Two processes compute on the same cores, so what is slower there is what the cores are shared by; nothing waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import art_patch as art

_MAKE = """
import sys
from tests.support.tiny import make_tiny_model
make_tiny_model(sys.argv[1], hidden=32, vocab_size=320)
"""
SIBLINGS = 10


class Raised(Exception):
    """What a rollout's own code may do."""


async def rollout(model: art.Model[Any], number: int, *, turns: int, raises: bool) -> art.Trajectory:
    """Some turns, and a reward that is no two rollouts' own."""
    trajectory = art.Trajectory(reward=random.random(), metadata={"scenario_id": number // SIBLINGS})
    for turn in range(turns):
        trajectory.messages_and_choices.append({"role": "user", "content": f"turn {turn} of {number // SIBLINGS}"})
        answer = await model.openai_client().chat.completions.create(
            model=model.name, messages=trajectory.messages(), max_tokens=4
        )
        trajectory.messages_and_choices.append(answer.choices[0])
        if raises:
            raise Raised(number)
    return trajectory


async def gathered(model: art.Model[Any], rollouts: int, raising: float, turns: int) -> list[art.TrajectoryGroup]:
    """All at once, in groups of ten."""
    failing = set(random.Random(0).sample(range(rollouts), round(rollouts * raising)))
    return await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(
                rollout(model, number, turns=turns, raises=number in failing)
                for number in range(first, min(first + SIBLINGS, rollouts))
            )
            for first in range(0, rollouts, SIBLINGS)
        ),
        pbar_desc=None,
        max_exceptions=raising,
    )


async def latencies_ms(model: art.Model[Any], until: asyncio.Task[Any]) -> tuple[list[float], int]:
    """One request after another: how long each took, and how many failed."""
    taken: list[float] = []
    failed = 0
    while not until.done():
        began = time.perf_counter()
        try:
            await model.openai_client().chat.completions.create(
                model=model.name, messages=[{"role": "user", "content": "hi"}], max_tokens=4
            )
        except Exception:
            failed += 1
        taken.append((time.perf_counter() - began) * 1000)
    return taken, failed


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def memory_mib(name: str) -> float:
    """`VmRSS` or `VmHWM` of this process (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


async def measure(base: Path, home: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Everything, once."""
    model = art.TrainableModel(name="crowd", project="by-hand", base_model=str(base))
    async with art.start(model, path=home, engine="embedded", threads=1):
        await gathered(model, SIBLINGS, 0.0, 1)  # warm
        before_mib, began = memory_mib("VmRSS"), time.perf_counter()
        groups = await gathered(model, asked.rollouts, asked.raising, asked.turns)
        rollouts_s = time.perf_counter() - began
        alone, _ = await latencies_ms(model, asyncio.create_task(asyncio.sleep(5)))
        began = time.perf_counter()
        update = asyncio.create_task(
            model.train(groups, art.TrainConfig(epochs=1, minibatches=4, lora_rank=4, advantage_scale="none"))
        )
        beside, failed = await latencies_ms(model, update)
        result = await update
        return {
            "rollouts": asked.rollouts,
            "raised": sum(len(group.exceptions) for group in groups),
            "raised_with_trajectory": sum(f.trajectory is not None for group in groups for f in group.exceptions),
            "trained_on": result.metrics["trajectories"],
            "step": result.step,
            "rollouts_s": round(rollouts_s, 1),
            "update_s": round(time.perf_counter() - began, 1),
            "peak_mib": round(memory_mib("VmHWM")),
            "grown_mib": round(memory_mib("VmHWM") - before_mib),
            "requests_beside_update": len(beside),
            "failed_beside_update": failed,
            "p99_alone_ms": round(p99(alone), 1),
            "p99_beside_ms": round(p99(beside), 1),
        }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--raising", type=float, default=0.05)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory, "base")
        subprocess.run([sys.executable, "-c", _MAKE, str(base)], check=True, cwd=Path(__file__).parents[2])
        print(json.dumps(asyncio.run(measure(base, Path(directory, "home"), asked))))


if __name__ == "__main__":
    main()
