"""What a policy could do already: its own earlier successes, which an update goes on imitating while it learns more.

Taken from groups that earlier updates were trained on, newest first: what was sampled in exact tokens, by any policy of
this model, in runs of a high reward that nobody corrected. Each is kept once, however many siblings said it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from art_patch.pipeline.cycle_run import Cycle
from art_patch.rewards import rewards_G
from art_patch.training import Row, rows_and_report
from art_patch.types import JSON, Policy, Trajectory

_GROUPS = 64  # read whole: some hundred runs, as a large cycle reads to train on them
_ROWS = 512  # an update of a hundred steps sees each once or twice


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What is rehearsed.

    Attributes:
        rows: newest first; there are no log-probabilities, and temperatures are those that were sampled at.
        others: the trajectories that they are of.
        metrics: how many there are, and what of earlier groups was left out.
    """

    rows: tuple[Row, ...] = ()
    others: tuple[str, ...] = ()
    metrics: JSON = field(default_factory=dict[str, Any])


def rehearsal(run: Cycle, champion: Policy) -> Rehearsal:
    """Return what is rehearsed, if the config asks for it."""
    config = run.config.train
    if config.rehearse_from is None:
        return Rehearsal()
    left_out: Counter[str] = Counter()
    rows: dict[Row, str] = {}
    for trajectory in _successes(run, champion, config.rehearse_from, left_out):
        found, _ = rows_and_report(trajectory, max_tokens=config.max_tokens, learn_truncated=config.learn_truncated)
        new = [row for row in map(_to_be_imitated, found) if row not in rows]
        rows |= dict.fromkeys(new[: _ROWS - len(rows)], trajectory.id)
        if not new:
            left_out["nothing in it is new" if found else "nothing in it may be trained"] += 1
    metrics = {"rows": len(rows), "left_out": dict(left_out)}
    return Rehearsal(tuple(rows), tuple(dict.fromkeys(rows.values())), {"rehearsal": metrics})


def _successes(run: Cycle, champion: Policy, least: float, left_out: Counter[str]) -> Iterator[Trajectory]:
    """Runs of this model with reward enough, newest group first; others are counted."""
    read = run.store.read
    newest = read.group_ids(state="trained", held_out=False, limit=_GROUPS)[::-1]
    for group in read.groups_of(newest):
        corrected = run.store.corrections([each.id for each in group.trajectories])
        rewards = rewards_G(group, combination=run.config.combination)
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            if reward is None or reward < least:
                left_out["no reward" if reward is None else "reward too low"] += 1
            elif trajectory.id in corrected:
                left_out["somebody corrected it"] += 1
            elif {call.policy.rpartition("@")[0] for call in trajectory.calls if call.policy} != {champion.model}:
                left_out["not sampled by this model"] += 1
            else:
                yield trajectory


def _to_be_imitated(row: Row) -> Row:
    return replace(row, logprobs_T=(0.0,) * len(row.ids_T))
