"""Finding the trajectory of a call that nobody named: a conversation that extends an earlier one belongs to it.

An agent without any context still sends its whole history with each call. So each answer's node in the message chain
is remembered; a later prompt that contains the node continues that trajectory. If several trajectories ended at the
same node (same question, same answer, twice), the most recent one that nobody extended yet goes on; if all were
extended, the most recent one branches. What is remembered is bounded; what was forgotten starts a new trajectory.

Clients echo an answer back in their own words: with or without nulls, a text as a list of one part, without the
reasoning. So the chain used here is over what every client keeps: role, content, name and tool calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any, cast

from art_patch._lib.ids import new_id
from art_patch.trajectories import ROOT, canonical
from art_patch.types import JSON, Call, TrajectoryInfo

MAX_NODES = 20_000
MAX_ENDS = 64
"""How many trajectories that ended at one node are told apart."""


@dataclass(slots=True)
class _Thread:
    """A trajectory in the making; shared by all the nodes where it may go on."""

    info: TrajectoryInfo


@dataclass(slots=True)
class _End:
    """One answer of one call, where a trajectory may go on."""

    thread: _Thread
    extended: bool = False


class Stitcher:
    """Remembers where trajectories ended. Not thread-safe: the writer thread owns it."""

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        """Remember at most `max_nodes` answers."""
        self._max_nodes = max_nodes
        self._ends: OrderedDict[bytes, list[_End]] = OrderedDict()

    def place(self, call: Call, group_key: str | None = None) -> TrajectoryInfo:
        """Return the trajectory that `call` belongs to, and remember where it ended."""
        nodes = list(accumulate(call.messages, _node, initial=ROOT))[1:]
        end = self._find(call.messages, nodes)
        if end is None:
            thread = _Thread(TrajectoryInfo(new_id(call.started_at), call.started_at, "single", group_key=group_key))
        else:
            end.extended = True
            thread = end.thread
            if thread.info.origin != "stitched":
                thread.info = replace(thread.info, origin="stitched")
        last = nodes[-1] if nodes else ROOT
        for choice in call.choices:
            if choice.message:
                self._remember(_node(last, choice.message), _End(thread))
        return thread.info

    def _find(self, messages: tuple[JSON, ...], nodes: list[bytes]) -> _End | None:
        # The last message is new by definition: a prompt that ends in an answer we know is that call made again.
        for position in range(len(nodes) - 2, -1, -1):
            if messages[position].get("role") != "assistant":
                continue
            ends = self._ends.get(nodes[position])
            if ends:
                self._ends.move_to_end(nodes[position])
                return next((end for end in reversed(ends) if not end.extended), ends[-1])
        return None

    def _remember(self, node: bytes, end: _End) -> None:
        ends = self._ends.setdefault(node, [])
        ends.append(end)
        del ends[:-MAX_ENDS]
        self._ends.move_to_end(node)
        while len(self._ends) > self._max_nodes:
            self._ends.popitem(last=False)


def _node(parent: bytes, message: JSON) -> bytes:
    """Return the id under `parent` of the part of a message that survives every client's echo."""
    return blake2b(parent + b"\0" + _reduced(message), digest_size=16).digest()


def _reduced(message: JSON) -> bytes:
    content: Any = message.get("content")
    if isinstance(content, list) and len(cast(list[Any], content)) == 1:
        part = content[0]
        if isinstance(part, dict) and cast(dict[str, Any], part).get("type") == "text":
            content = cast(dict[str, Any], part).get("text")
    named: list[Any] = [message.get(key) for key in ("role", "name", "tool_call_id")]
    calls = message.get("tool_calls")
    said: list[Any] = [*named, cast(Any, content)]
    if not calls and all(isinstance(value, str | None) for value in said):
        # Nearly every message, and JSON would take five times as long.
        return "\x1f".join(("", *(value or "" for value in said))).encode("utf-8", "surrogatepass")
    small: dict[str, Any] = dict(zip(("role", "name", "tool_call_id"), named, strict=True)) | {"content": content}
    if isinstance(calls, list):
        small["tool_calls"] = list(_reduced_calls(cast(list[Any], calls)))
    return canonical(small)


def _reduced_calls(calls: list[Any]) -> Iterable[JSON]:
    for call in calls:
        if isinstance(call, dict):
            function: Any = cast(dict[str, Any], call).get("function")
            named = cast(dict[str, Any], function) if isinstance(function, dict) else {}
            yield {"id": call.get("id"), "name": named.get("name"), "arguments": named.get("arguments")}
