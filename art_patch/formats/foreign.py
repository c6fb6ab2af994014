"""Makes trajectories from training files of OpenAI (with older function calls, preferences), TRL and ShareGPT. Pure.

- A conversation becomes a trajectory with one call for each assistant message, except messages with `weight: 0`, which
  only are part of the prompts of later calls. The calls are untrainable, because such files hold no token ids.
- A preference row becomes a group of two trajectories, which get the scores 1 and 0 unless the row has scores.
- Unknown columns of a row are kept in the trajectory's metadata.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal, cast

from art_patch.errors import MalformedFile
from art_patch.formats.complete import FORMAT, IMPORTED, Bundle, decode
from art_patch.formats.sharegpt import as_messages
from art_patch.trajectories import verbatim
from art_patch.types import Call, Choice, Score, Trajectory, TrajectoryInfo

ImportFormat = Literal["auto", "chat", "trajectories", "sft", "preference", "grpo"]

Row = Mapping[str, Any]
Message = dict[str, Any]
Messages = Sequence[Message]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MOST_MESSAGES = 4_096  # each answer becomes a call with all messages before it
_NO_METADATA = {
    "messages", "prompt", "completion", "chosen", "rejected", "tools", "functions", "parallel_tool_calls", "input",
    "preferred_output", "non_preferred_output", "score_chosen", "score_rejected", "scenario_key", "group_id",
    "function_call",
}  # fmt: skip


def bundles_of(row: Row, *, expected: ImportFormat = "auto", at: float = 0.0) -> list[Bundle]:
    """Return the trajectories of one row: two for a preference row, one for any other.

    `expected` is the format that the user named, or `auto`; `at` the time of the import, for trajectories without their
    own. A malformed row raises a `MalformedFile`, to which the caller adds the line number.
    """
    row = as_messages(row)
    kind = kind_of(row)
    if expected not in ("auto", kind) and not (expected == "sft" and kind == "chat"):
        raise MalformedFile(f"this is a line of format {kind}, not {expected}")
    if kind == "trajectories":
        record = row.get("record", row)  # in a table, columns to search by stand beside it
        if not isinstance(record, dict):
            raise MalformedFile("record must be an object")
        return [decode(cast("Row", record))]
    # A hash of the whole row: importing a file twice adds nothing, and the same conversation with another score is
    # another trajectory. Sorted, because another program may write the same row with its keys in another order.
    stable = json.dumps(row, sort_keys=True, separators=(",", ":"), default=repr).encode("ascii")
    key = hashlib.blake2b(stable, digest_size=16).hexdigest()
    if kind == "preference":
        return _pair(row, key, at)
    tools = _tools(row)
    if kind == "chat":
        return [_bundle(key, row, [], _answers(row, "messages", role=""), tools, at)]
    prompt = _messages(row["prompt"], "prompt", role="user")
    return [_bundle(key, row, prompt, _answers(row, "completion") if kind == "sft" else [], tools, at)]


def kind_of(row: Row) -> ImportFormat:
    """Return the format of a row, recognised by its keys; raise `MalformedFile` if no known format has these keys."""
    if isinstance(row.get("format"), str) and row["format"].startswith(FORMAT.split("/")[0]):
        return "trajectories"
    if "messages" in row or ("conversations" in row and not {"chosen", "rejected"} <= row.keys()):
        return "chat"
    if "preferred_output" in row or "non_preferred_output" in row or {"chosen", "rejected"} <= row.keys():
        return "preference"
    if {"prompt", "completion"} <= row.keys():
        return "sft"
    if "prompt" in row:
        return "grpo"
    known = (
        "messages; conversations; prompt; prompt, completion; prompt, chosen, rejected; input, preferred_output, ..."
    )
    keys = ", ".join(sorted(row)[:10])[:200] or "(none)"
    raise MalformedFile(f"no known format has the keys {keys} (known: {known})")


def _pair(row: Row, key: str, at: float) -> list[Bundle]:
    if "chosen" in row:
        given, better, worse = row.get("prompt"), _answers(row, "chosen"), _answers(row, "rejected")
        source = row
    else:
        for name in ("input", "preferred_output", "non_preferred_output"):
            if name not in row:
                raise MalformedFile(f"{name} is missing")
        source = row["input"]
        if not isinstance(source, dict) or "messages" not in source:
            raise MalformedFile("input must be an object with messages")
        given = source["messages"]
        better, worse = _answers(row, "preferred_output"), _answers(row, "non_preferred_output")
    if given is None:  # TRL's implicit prompt: the messages that both begin with
        # At least one message stays on either side: the answer itself.
        pairs = zip(better[:-1], worse[:-1], strict=False)
        prompt = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        better, worse = better[len(prompt) :], worse[len(prompt) :]
        if not prompt:
            raise MalformedFile("chosen and rejected have no prompt in common")
    else:
        prompt = _messages(given, "prompt" if "chosen" in row else "input.messages", role="user")
    tools = _tools(cast("Row", source))
    scenario = _scenario(row)
    # Without a key of its own, the prompt makes the scenario, so that pairs on one prompt are found together.
    prompt_hash = hashlib.blake2b(verbatim(prompt) + b"\0" + verbatim(tools), digest_size=16).hexdigest()
    group: dict[str, Any] = {
        "id": f"{key[:24]}-pair",
        "scenario_key": f"{IMPORTED}:{prompt_hash}" if scenario is None else scenario,
        "how": IMPORTED,
        "held_out": False,
        "state": "dead",  # nothing to train on here, nor for the judge to do
        "created_at": at,
        "reason": IMPORTED,
    }
    pair: list[Bundle] = []
    for place, rest, usual in (("chosen", better, 1.0), ("rejected", worse, 0.0)):
        value = row.get(f"score_{place}", usual)
        value = usual if value is None else value
        # To Python, `True` is a number, too.
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise MalformedFile(f"score_{place} must be a number, not {value!r:.50}")
        own = _bundle(f"{key[:24]}-{place}", row, prompt, rest, tools, at).trajectory
        score = Score(f"{own.id}-score", own.id, "reward", float(value), "user", at, comment=f"{IMPORTED}: {place}")
        pair.append(Bundle(replace(own, scores=(score,)), group=group))
    return pair


def _scenario(row: Row) -> str | None:
    key = row.get("scenario_key")
    # As the store writes texts that have no UTF-8: it compares this key with those that it knows.
    return key.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00") if isinstance(key, str) else None


def _bundle(key: str, row: Row, prompt: Messages, rest: Messages, tools: Messages, at: float) -> Bundle:
    parallel = row.get("parallel_tool_calls")
    if parallel is None and isinstance(row.get("input"), dict):
        parallel = row["input"].get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise MalformedFile(f"parallel_tool_calls must be true or false, not {parallel!r:.50}")
    params = {} if parallel is None else {"parallel_tool_calls": parallel}
    messages = [*prompt, *rest]
    last = len(messages) - 1
    places = [
        place
        for place in range(len(prompt) or 1, len(messages))
        # A last message of weight 0 counts all the same: without it the conversation would end without an answer.
        if messages[place]["role"] == "assistant" and (place == last or messages[place].get("weight") != 0)
    ]
    calls = tuple(
        Call(
            # All calls start at `at`, and calls of one moment are read in the order of their ids.
            id=f"{key}-{number:04d}",
            trajectory_id=key,
            started_at=at,
            requested_model=IMPORTED,
            messages=tuple(messages[:place]),
            choices=tuple(
                Choice(0, answer, "tool_calls" if answer.get("tool_calls") else "stop")
                for answer in messages[place : place + 1]
            ),
            tools=tuple(tools),
            params=params,
            untrainable=IMPORTED,
        )
        for number, place in enumerate(places or [len(messages)])
    )
    info = TrajectoryInfo(
        id=key,
        started_at=at,
        origin=IMPORTED,
        scenario_key=_scenario(row),
        metadata={name: value for name, value in row.items() if name not in _NO_METADATA and value is not None},
    )
    return Bundle(Trajectory(info, calls))


def _answers(row: Row, name: str, *, role: str = "assistant") -> list[Message]:
    messages = _messages(row.get(name), name, role=role)
    if messages[-1]["role"] != "assistant":
        raise MalformedFile(f"{name}: the last message is the {messages[-1]['role']}'s, not the assistant's")
    return messages


def _messages(value: Any, where: str, *, role: str = "") -> list[Message]:
    """Return the messages in OpenAI's present format. A plain text becomes one message of `role`, if that is given."""
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise MalformedFile(f"{where} must be a list of messages")
    if len(cast("list[Any]", value)) > _MOST_MESSAGES:
        raise MalformedFile(f"{where} has more than {_MOST_MESSAGES:,} messages; cut the conversation into several")
    messages: list[Message] = []
    last_call = ""
    for index, each in enumerate(cast("list[Any]", value)):
        path = f"{where}[{index}]"
        if not isinstance(each, dict):
            raise MalformedFile(f"{path} must be an object")
        message = {key: item for key, item in cast("Message", each).items() if item is not None}
        _check(message, path)
        if "function_call" in message:
            # Older function calls have no ids; tool calls need one, to which the result refers.
            last_call = f"call_{index}"
            called = _function(message.pop("function_call"), f"{path}.function_call")
            message["tool_calls"] = [{"id": last_call, "type": "function", "function": called}]
        # The older format has no id in the result; it belongs to the call before it.
        elif message["role"] == "function":
            if not last_call:
                raise MalformedFile(f"{path}: the result of a function that was not called")
            message = {"role": "tool", "tool_call_id": last_call, "content": message.get("content", "")}
        elif "tool_calls" in message:
            message["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
            if not message["tool_calls"]:
                del message["tool_calls"]
        said = message.get("content") or message.get("tool_calls") or message.get("refusal")
        if message["role"] == "assistant" and not said:
            raise MalformedFile(f"{path}: the assistant says nothing and calls nothing")
        messages.append(message)
    return messages


def _check(message: Message, path: str) -> None:
    if message.get("role") not in _ROLES:
        raise MalformedFile(f"{path}.role must be one of {', '.join(_ROLES)}, not {message.get('role')!r:.50}")
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise MalformedFile(f"{path}.content must be a text or a list of parts")
    for part in cast("list[Any]", content) if isinstance(content, list) else ():
        if not isinstance(part, dict) or not isinstance(cast("Message", part).get("type"), str):
            raise MalformedFile(f"{path}.content has a part without a type")
    if content is None and message["role"] != "assistant":
        raise MalformedFile(f"{path}.content is missing")
    if message.get("weight", 0) not in (0, 1):
        raise MalformedFile(f"{path}.weight must be 0 or 1, not {message['weight']!r:.50}")


def _tool_calls(value: Any, path: str) -> list[Message]:
    if not isinstance(value, list):
        raise MalformedFile(f"{path} must be a list")
    calls: list[Message] = []
    for index, each in enumerate(cast("list[Any]", value)):
        if not isinstance(each, dict):
            raise MalformedFile(f"{path}[{index}] must be an object")
        call = cast("Message", each)
        if "function" not in call and call.get("type", "function") != "function":
            calls.append(call)  # a custom tool's
            continue
        # TRL leaves out the wrapper in old files.
        inner = call.get("function", {key: call[key] for key in ("name", "arguments") if key in call})
        function = _function(inner, f"{path}[{index}].function")
        about = call if "function" in call else {"type": "function"}
        calls.append({**about, "function": function})
    return calls


def _function(value: Any, path: str) -> Message:
    if not isinstance(value, dict) or not isinstance(cast("Message", value).get("name"), str):
        raise MalformedFile(f"{path}.name is missing")
    function = cast("Message", value)
    arguments = function.get("arguments", "{}")
    # TRL has objects where OpenAI has their JSON as text.
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"name": function["name"], "arguments": text}


def _tools(row: Row) -> list[Message]:
    value = row.get("tools")
    if isinstance(value, str):  # TRL's way for tables that would fill schemas with nulls
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise MalformedFile(f"tools is a text that is no JSON: {error}") from None
    if value is None and (functions := row.get("functions")) is not None:
        if not isinstance(functions, list):
            raise MalformedFile("functions must be a list")
        value = [{"type": "function", "function": function} for function in cast("list[Any]", functions)]
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", value)):
        raise MalformedFile("tools must be a list of objects")
    return cast("list[Message]", value)
