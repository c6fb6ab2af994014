"""Chooses the main conversation of a trajectory, the transcript: the messages and the answer of its longest call.

Grouping, rewards and gate all read a run through these functions. The transcript is the prompt and the answer of the
call with the most messages: an agent sends its whole history with each call, so this is the run from the user's
question to its end. Other conversations in the run, such as those of a sub-agent or a classifier, are left out.
"""

from collections.abc import Iterable, Sequence

from art_patch.trajectories.hashing import canonical
from art_patch.types import JSON, Call, Choice, Trajectory, TrajectoryInfo


def main_call(trajectory: Trajectory) -> Call | None:
    """Return the call with the longest conversation, of several the latest; `None` if no call was recorded."""
    # From the end, because an agent that forgets its oldest messages keeps the length and goes on.
    latest_first = reversed(trajectory.calls)
    return max(latest_first, key=lambda call: len(call.messages) + bool(call.choices), default=None)


def transcript(trajectory: Trajectory) -> tuple[JSON, ...]:
    """Return the messages of the run's longest conversation, with its last answer; empty if no call was recorded."""
    call = main_call(trajectory)
    return () if call is None else _with_answer(call)


def as_run(key: str, messages: Sequence[JSON], tools: Iterable[JSON], *, what: str) -> Trajectory:
    """Return messages that no app recorded as a run of one call that is never trained on; `what` says what they are.

    This is the inverse of `transcript`. A run that does not end with the model's message was broken off.
    """
    if not messages:
        return Trajectory(TrajectoryInfo(key, 0.0), ())
    ended = messages[-1].get("role") == "assistant"
    asked, choices = (messages[:-1], (Choice(0, messages[-1]),)) if ended else (messages, ())
    call = Call(key, key, 0.0, what, tuple(asked), choices, tuple(tools), untrainable=what)
    return Trajectory(TrajectoryInfo(key, 0.0), (call,))


def _with_answer(call: Call) -> tuple[JSON, ...]:
    answer = chosen_choice(call, ())
    return call.messages if answer is None else (*call.messages, answer.message)


def followed(trajectory: Trajectory, call: Call) -> tuple[JSON, ...]:
    """Return the messages after the answer to `call`, in the longest conversation that goes on from its prompt."""
    # Compared in canonical form, because clients echo messages with and without empty fields.
    prompt = [canonical(message) for message in call.messages]
    after: tuple[JSON, ...] = ()
    for other in trajectory.calls:
        messages = _with_answer(other)
        beyond = messages[len(prompt) + 1 :]
        if len(beyond) > len(after) and [canonical(message) for message in messages[: len(prompt)]] == prompt:
            after = beyond
    return after


def offered_tools(trajectories: Iterable[Trajectory]) -> tuple[JSON, ...]:
    """Return all tools that the app offered to the model in any call, each once, in the order of their first offer."""
    tools: dict[bytes, JSON] = {}
    for trajectory in trajectories:
        for call in trajectory.calls:
            for tool in call.tools:
                tools.setdefault(canonical(tool), tool)
    return tuple(tools.values())


def chosen_choice(call: Call, later: Iterable[Call]) -> Choice | None:
    """Return the answer to `call` that is in the prompt of a `later` call, else the first; `None` without answers."""
    # Of several answers the app used one, and its next prompt holds that one, even if the next call failed.
    if len(call.choices) > 1:
        depth = len(call.messages)
        prompt = [canonical(message) for message in call.messages]
        for other in later:
            if len(other.messages) > depth and [canonical(m) for m in other.messages[:depth]] == prompt:
                used = canonical(other.messages[depth])
                for choice in call.choices:
                    if canonical(choice.message) == used:
                        return choice
    return min(call.choices, key=lambda choice: choice.index, default=None)
