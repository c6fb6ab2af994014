"""Small records for tests of the pure stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from art_patch.types import Call, Choice, Group, Trajectory, TrajectoryInfo


def make_call(
    key: str = "c",
    *,
    trajectory_id: str = "t",
    prompt: Sequence[int] | None = (1, 2),
    answer: Sequence[int] = (3, 4),
    messages: Sequence[dict[str, Any]] = ({"role": "user", "content": "hi"},),
    text: str = "yo",
    **changes: Any,
) -> Call:
    """A call that one policy answered with `answer`."""
    choice = Choice(0, {"role": "assistant", "content": text}, "stop", tuple(answer), (-0.5,) * len(answer))
    values: dict[str, Any] = {
        "id": key,
        "trajectory_id": trajectory_id,
        "started_at": 1.0,
        "requested_model": "m",
        "messages": tuple(messages),
        "choices": (choice,),
        "policy": "agent@0",
        "prompt_token_ids": None if prompt is None else tuple(prompt),
    }
    return Call(**(values | changes))


def make_trajectory(key: str = "t", *calls: Call, **about: Any) -> Trajectory:
    """A trajectory of these calls; one plain call if none is given."""
    return Trajectory(TrajectoryInfo(key, 1.0, **about), calls or (make_call(f"{key}-c", trajectory_id=key),))


def make_group(*trajectories: Trajectory, key: str = "g", scenario: str = "task:x") -> Group:
    """A group of these siblings."""
    return Group(key, scenario, "same_task", trajectories)
