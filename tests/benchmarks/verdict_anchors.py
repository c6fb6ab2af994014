"""How many updates less it takes to learn the one turn that decides, with anchor advantages.

A part of `verdicts.py` (`--only anchors`). The world: six turns, and the answer to the first of them decides the
reward; an eighth of the vocabulary is right. The prompt of a turn is the state alone: the task, the number of the turn,
and whether the run is open, won or lost. A tiny model with random weights answers with one token, and the shipped
update trains it on groups of siblings: from the same seeds, with anchors and without. `anchor_updates_ratio` is the
number of updates until eight of ten runs are won, divided by the number without anchors.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from art_patch.policies import base_fingerprint
from art_patch.training import Example, Row, Sibling, TrainConfig, TrainGroup, TrainJob, advantages_of_groups
from art_patch.training.loop.update import update
from tests.support.benchmark_report import Target, say
from tests.support.tiny import make_tiny_model
from tests.support.train_jobs import plain_model

TURNS, TASKS, SIBLINGS = 6, 6, 16
WEIGHT = 1.0
OPEN, WON, LOST = 1, 2, 3
WANTED, MOST = 0.8, 80
TARGETS = (Target("anchor_updates_ratio", None, 0.6, "updates with anchors, to those without"),)
CONFIG = TrainConfig(
    learning_rate=5e-3, epochs=2, minibatches=4, warmup_steps=0, max_kl_nats=None, max_clip_fraction=None
)


def walk(model: Any, task: int, number: int, generator: torch.Generator) -> list[tuple[tuple[Row, ...], float]]:
    """Walk through the turns of a task so many times; return the rows and the reward of each walk."""
    outcomes, rows = [OPEN] * number, [list[Row]() for _ in range(number)]
    for turn in range(TURNS):
        prompts = [(10 + task, 30 + turn, outcome) for outcome in outcomes]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=torch.tensor(prompts)).logits[:, -1].double(), -1)
        words = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0].tolist()
        for which, (prompt, word) in enumerate(zip(prompts, words, strict=True)):
            said = (0.0, 0.0, 0.0, logprobs[which, word].item())
            rows[which].append(Row((*prompt, word), (False, False, False, True), said, (1.0,) * 4))
            if turn == 0:
                outcomes[which] = WON if word % 8 == task else LOST
    return [(tuple(its), float(outcome == WON)) for its, outcome in zip(rows, outcomes, strict=True)]


def updates_needed(base: Path, seed: int, anchor_weight: float, directory: Path) -> int:
    """Return how many updates it took until eight of ten walks of the mean task are won."""
    generator, parent = torch.Generator().manual_seed(seed), None
    config = replace(CONFIG, anchor_weight=anchor_weight, seed=seed)
    for number in range(1, MOST + 1):
        model = plain_model(base, parent)
        success = fmean(won for task in range(TASKS) for _, won in walk(model, task, 64, generator))
        if success >= WANTED:
            return number - 1
        walks = [walk(model, task, SIBLINGS, generator) for task in range(TASKS)]
        groups: list[TrainGroup] = []
        of_groups = advantages_of_groups([[reward for _, reward in its] for its in walks])
        for task, (its, advantages) in enumerate(zip(walks, of_groups, strict=True)):
            examples = map(Example, (rows for rows, _ in its), advantages or (0.0,) * SIBLINGS)
            siblings = (Sibling(f"{task}-{n}", example, True) for n, example in enumerate(examples))
            groups.append(TrainGroup(f"{number}-{task}", tuple(siblings)))
        if all(advantages is None for advantages in of_groups):
            continue
        target = directory / "adapters" / f"agent@{number}"
        job = TrainJob(str(base), base_fingerprint(base), parent, target, config, groups=tuple(groups))
        update(job, directory / "jobs" / target.name)
        parent = target
    return MOST


def _needed(job: tuple[int, float]) -> int:
    seed, anchor_weight = job
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        return updates_needed(make_tiny_model(Path(temporary, "base"), seed), seed, anchor_weight, Path(temporary))


def anchors(pool: Any, seeds: int) -> dict[str, float]:
    """Compare the numbers of updates with anchors and without any."""
    jobs = [(seed, weight) for seed in range(seeds) for weight in (WEIGHT, 0.0)]
    needed = pool.map(_needed, jobs, 1)
    say(f"updates until {WANTED:.0%} of the runs are won, with and without anchors, by seed: {needed}")
    with_anchors, without = fmean(needed[::2]), fmean(needed[1::2])
    return {
        "anchor_updates": with_anchors,
        "run_updates": without,
        "anchor_updates_ratio": with_anchors / without,
    }
