"""A frozen suite: prompts that a user names, asked of every candidate whatever traffic brings. None may get worse.

A file of JSON lines, each a prompt as one would send it::

    {"messages": [{"role": "user", "content": "Where is order 7?"}], "tools": [...], "name": "order", "max_tokens": 64}

Only `messages` must be there. A last message of the assistant's is an answer that somebody gave, as in OpenAI's
fine-tuning files, and is left out. `name` defaults to the number of the line; `temperature`, `max_tokens`, `stop` and
`chat_template_kwargs` are sent along. The judge ranks both policies' answers to it, and the user's checks
run on them, as on held-out traffic; they count for the suite alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from art_patch.errors import ConfigError
from art_patch.gate.turns import Turn
from art_patch.types import Call, TrajectoryInfo

PREFIX = "suite:"
"""Of the scenario keys; keys of traffic begin otherwise."""

_PARAMS = ("temperature", "max_tokens", "max_completion_tokens", "stop", "chat_template_kwargs")
_KNOWN = {"messages", "tools", "name", *_PARAMS}


def read_suite(path: Path) -> tuple[Turn, ...]:
    """Return the prompts of a suite.

    Raises:
        ConfigError: the file cannot be read or a line is no prompt; the message names the line.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the suite {path} cannot be read ({error}); give a file of JSON lines") from None
    turns = tuple(_turn(path, number, line) for number, line in enumerate(lines, 1) if line.strip())
    if not turns:
        raise ConfigError(f"the suite {path} has no prompts; write one JSON line each, or unset it")
    names = [turn.scenario_key for turn in turns]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two prompts of the suite {path} are named {twice.removeprefix(PREFIX)!r}; rename one")
    return turns


def _turn(path: Path, number: int, line: str) -> Turn:
    where = f"line {number} of the suite {path}"
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error})") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is no JSON object; write {{'messages': [...]}}")
    row = cast("dict[str, Any]", row)
    if unknown := sorted(row.keys() - _KNOWN):
        raise ConfigError(f"{where} has {unknown[0]!r}, which would not be sent; known are {', '.join(sorted(_KNOWN))}")
    messages = _objects(where, "messages", row.get("messages"))
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or not all(isinstance(message.get("role"), str) for message in messages):
        raise ConfigError(f"{where} has no prompt; 'messages' is a list of messages with roles, as OpenAI has them")
    name = str(row.get("name", number))
    call = Call(
        id=f"{PREFIX}{name}",
        trajectory_id=f"{PREFIX}{name}",
        started_at=0.0,
        requested_model="suite",
        messages=messages,
        tools=_objects(where, "tools", row.get("tools", [])),
        params={key: row[key] for key in _PARAMS if key in row},
    )
    return Turn(f"{PREFIX}{name}", call, TrajectoryInfo(call.id, 0.0, name=name, scenario_key=call.id))


def _objects(where: str, what: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    items = cast("list[Any]", value) if isinstance(value, list) else None
    if items is None or not all(isinstance(item, dict) for item in items):
        raise ConfigError(f"{where}: {what!r} is a list of JSON objects")
    return tuple(items)
