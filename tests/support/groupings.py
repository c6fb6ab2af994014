"""Trajectories that ask something, and groups of them as lists of their ids."""

from __future__ import annotations

from itertools import count

from art_patch.grouping import Grouping, form_groups
from art_patch.types import Trajectory
from tests.support.factory import make_call, make_trajectory


def ids():
    numbers = count()
    return lambda: f"g{next(numbers)}"


def asked(key: str, text: str, *, system: str = "be brief", tool: str = "lookup", **about) -> Trajectory:
    messages = ({"role": "system", "content": system}, {"role": "user", "content": text})
    tools = ({"type": "function", "function": {"name": tool}},)
    return make_trajectory(key, make_call(f"{key}-c", trajectory_id=key, messages=messages, tools=tools), **about)


def members(grouping: Grouping) -> list[list[str]]:
    return [[t.id for t in group.trajectories] for group in grouping.groups]


def form(*trajectories: Trajectory, **options) -> Grouping:
    return form_groups(trajectories, new_id=ids(), **({"min_size": 2, "holdout_share": 0.0} | options))
