"""Reads a trajectory as one flat conversation: records in, OpenAI JSON out.

Grouping, rewards and gate all read a run through these functions, so that they judge the same conversation. The
transcript is the longest conversation among the calls: the prompt, and the answer if there was one. An agent sends its
whole history with each call, so that is the run from its question to its end. Calls that share nothing with it (those
of a sub-agent or a classifier) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from art_patch.trajectories.hashing import canonical
from art_patch.types import JSON, Call, Choice, Trajectory


def main_call(trajectory: Trajectory) -> Call | None:
    """Return the call whose conversation is the transcript; `None` if no call was recorded."""
    found: Call | None = None
    longest = 0
    for call in trajectory.calls:
        length = len(call.messages) + bool(call.choices)
        # Of two equally long conversations the later one counts: an agent that forgets its oldest messages keeps the
        # length and goes on.
        if length >= longest:
            found, longest = call, length
    return found


def transcript(trajectory: Trajectory) -> tuple[JSON, ...]:
    """Return the messages of the whole run in order; empty if no call was recorded."""
    call = main_call(trajectory)
    if call is None:
        return ()
    answer = min(call.choices, key=lambda choice: choice.index, default=None)
    return call.messages if answer is None else (*call.messages, answer.message)


def followed(trajectory: Trajectory, call: Call) -> tuple[JSON, ...]:
    """Return the messages that came after the answer to `call`; empty if the run did not go on from there.

    They are those of the longest conversation that begins with the prompt of `call`.
    """
    # Compared in canonical form, because clients echo messages with and without empty fields.
    prompt = [canonical(message) for message in call.messages]
    after: tuple[JSON, ...] = ()
    for other in trajectory.calls:
        answer = min(other.choices, key=lambda choice: choice.index, default=None)
        messages = other.messages if answer is None else (*other.messages, answer.message)
        beyond = messages[len(prompt) + 1 :]
        if len(beyond) > len(after) and [canonical(message) for message in messages[: len(prompt)]] == prompt:
            after = beyond
    return after


def offered_tools(trajectories: Iterable[Trajectory]) -> tuple[JSON, ...]:
    """Return every tool that any call offered, each once, in the order of their first offer."""
    tools: dict[bytes, JSON] = {}
    for trajectory in trajectories:
        for call in trajectory.calls:
            for tool in call.tools:
                tools.setdefault(canonical(tool), tool)
    return tuple(tools.values())


def number_tool_calls(messages: Iterable[JSON]) -> tuple[JSON, ...]:
    """Return the messages with tool-call ids replaced by `call_1`, `call_2`, ... in order of appearance.

    Servers draw those ids at random, so without this two equal runs would differ.
    """
    numbers: dict[str, str] = {}

    def numbered(value: Mapping[str, Any], key: str) -> JSON:
        given = value.get(key)
        if not isinstance(given, str):
            return value
        return {**value, key: numbers.setdefault(given, f"call_{len(numbers) + 1}")}

    result: list[JSON] = []
    for message in messages:
        calls: Any = message.get("tool_calls")
        if isinstance(calls, list | tuple):
            message = {**message, "tool_calls": [numbered(c, "id") if isinstance(c, Mapping) else c for c in calls]}
        result.append(numbered(message, "tool_call_id"))
    return tuple(result)


def chosen_choice(call: Call, later: Iterable[Call]) -> Choice | None:
    """Return the answer of `call` that the app went on with, as the `later` calls show; else the first one."""
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
