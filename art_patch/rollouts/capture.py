"""What a coroutine asks its model, as a trajectory, without a line in the coroutine.

Each answer through a model's own client is appended: a request that extends a conversation goes on with it; one that
extends none begins another history, as does one with other tools. The longest beginning in common decides, so that
branches, sub-agents and cut histories each are what they are. Streams cannot be captured and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from art_patch.context import CAPTURED
from art_patch.errors import ConfigError
from art_patch.trajectories import canonical

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

    from art_patch.rollouts.trajectory import History, Trajectory


async def capture_auto_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run the coroutine and return what it asked its model as a trajectory; give it its reward, inside or afterwards.

    Calls count that go through `model.openai_client()`. If the coroutine raises, the exception carries the trajectory
    into its group's `exceptions`.
    """
    from art_patch.rollouts.trajectory import Trajectory, remember

    trajectory = Trajectory(reward=math.nan)
    token = CAPTURED.set(trajectory)
    try:
        await coroutine
    except BaseException as error:
        remember(error, trajectory)
        raise
    finally:
        CAPTURED.reset(token)
    return trajectory.finish()


@overload
def auto_trajectory(*, required: Literal[True]) -> Trajectory: ...


@overload
def auto_trajectory(*, required: bool = ...) -> Trajectory | None: ...


def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """Return the trajectory that `capture_auto_trajectory` around the running code is making; `None` outside of it.

    Args:
        required: raise instead.

    Raises:
        ConfigError: it is required and there is none.
    """
    found: Trajectory | None = CAPTURED.get()
    if found is None and required:
        raise ConfigError("nothing is captured here; run this in `await art.capture_auto_trajectory(coroutine)`")
    return found


def capture(messages: Sequence[Any], choice: Choice, tools: Sequence[Any] | None) -> None:
    """Append what was asked and answered to the captured trajectory, if there is one."""
    trajectory: Trajectory | None = CAPTURED.get()
    if trajectory is None:
        return
    from art_patch.rollouts.trajectory import History

    offered = list(tools) if tools else None
    asked = list(messages)
    if not trajectory.messages_and_choices:
        trajectory.messages_and_choices, trajectory.tools = [*asked, choice], offered
        return
    continued = [each for each in trajectory.histories() if each.tools == offered and _goes_on(each, asked)]
    longest = max(continued, key=lambda history: len(history.messages_and_choices), default=None)
    if longest is None:
        trajectory.additional_histories.append(History(messages_and_choices=[*asked, choice], tools=offered))
    else:
        # the list itself is the trajectory's or the history's own
        longest.messages_and_choices += [*asked[len(longest.messages_and_choices) :], choice]


def refuse_stream() -> None:
    """Pass unless something is captured here.

    Raises:
        ConfigError: a stream cannot be captured.
    """
    if CAPTURED.get() is not None:
        raise ConfigError("a streamed answer cannot be captured; leave stream=True out in capture_auto_trajectory")


def _goes_on(history: History, asked: Sequence[Any]) -> bool:
    said = history.messages()
    return len(said) <= len(asked) and all(
        _same(mine, theirs) for mine, theirs in zip(said, asked[: len(said)], strict=True)
    )


def _same(mine: Any, theirs: Any) -> bool:
    return isinstance(theirs, Mapping) and canonical(mine) == canonical(theirs)
