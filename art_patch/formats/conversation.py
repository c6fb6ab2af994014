"""What a trajectory says, in the words of the formats that others read. Pure.

Messages are kept by the store as they came, with everything a client may add. Fine-tuning services refuse keys that
they do not know, and chat templates stumble over `null`, so messages are cleaned on their way out:

- `openai_message`: the keys of OpenAI's fine-tuning format, nulls left out, arguments of tools as JSON text.
- `trl_message`: what chat templates of open models read: the content is one text, `developer` is `system`, arguments
  of tools are objects.

`Unusable` says why a conversation cannot be written; the caller counts the reasons.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from art_patch.trajectories import canonical, main_call, number_tool_calls, transcript
from art_patch.types import JSON, Call, Trajectory

_OPENAI_KEYS = ("role", "content", "name", "refusal", "tool_calls", "tool_call_id", "weight")
_TRL_KEYS = ("role", "name", "tool_call_id", "reasoning_content")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEPT_BY_PROVIDER = ("conversation", "previous_response_id", "prompt")
_HASHED_MEDIA = re.compile(r"sha256:[0-9a-f]{64};bytes=\d+")
_SURROGATES = re.compile(r"[\ud800-\udfff]")


class Unusable(Exception):
    """Why a trajectory gives no row; the text is the same for all of its kind, so that reasons can be counted."""


@dataclass(frozen=True, slots=True)
class Run:
    """A trajectory as one conversation.

    Attributes:
        prompt: what was asked first.
        rest: what followed: answers, results of tools, further turns.
        tools: the tools that the call offered which holds the whole conversation.
        params: its sampling parameters.
        cut: the last answer did not come to its end.
    """

    prompt: tuple[JSON, ...]
    rest: tuple[JSON, ...]
    tools: tuple[JSON, ...]
    params: JSON
    cut: bool

    @property
    def messages(self) -> tuple[JSON, ...]:
        """The whole conversation."""
        return self.prompt + self.rest


def run_of(trajectory: Trajectory) -> Run:
    """Return the trajectory's main conversation.

    Raises:
        Unusable: if nothing was recorded, or not the whole of it.
    """
    call = main_call(trajectory)
    if call is None or not call.messages:
        raise Unusable("no call was recorded")
    if call.api == "completions":
        raise Unusable("a completion is not a chat")
    if any(name in call.params for name in _KEPT_BY_PROVIDER):
        raise Unusable("the provider holds a part of the prompt")
    messages = transcript(trajectory)
    asked = len(_first_prompt(trajectory.calls, messages))
    answer = min(call.choices, key=lambda choice: choice.index, default=None)
    cut = call.status != "ok" or (answer is not None and answer.finish_reason in (None, "length"))
    return Run(messages[:asked], messages[asked:], call.tools, call.params, cut)


def answered(run: Run) -> Run:
    """Return the run if it ends with an answer.

    Raises:
        Unusable: if it does not.
    """
    if not run.rest or run.rest[-1].get("role") != "assistant":
        raise Unusable("it ends without an answer")
    return run


def _first_prompt(calls: Sequence[Call], messages: Sequence[JSON]) -> Sequence[JSON]:
    """The prompt of the earliest call that the conversation goes on from.

    The first assistant message is no boundary: apps put examples into their prompts.
    """
    whole = [canonical(message) for message in messages]
    for call in calls:
        prompt = [canonical(message) for message in call.messages]
        if prompt and len(prompt) <= len(whole) and prompt == whole[: len(prompt)]:
            return call.messages
    return messages


def same_prompt(one: Run, other: Run) -> bool:
    """Whether two runs were asked the same with the same tools; random ids of tool calls do not count."""

    def key(run: Run) -> list[bytes]:
        return [canonical(message) for message in (*number_tool_calls(run.prompt), *run.tools)]

    return key(one) == key(other)


def openai_message(message: JSON) -> dict[str, Any]:
    """Return the message with the keys that OpenAI's fine-tuning files have.

    Raises:
        Unusable: if it says nothing, or something that was not kept.
    """
    clean = {key: message[key] for key in _OPENAI_KEYS if message.get(key) is not None}
    _check_role(clean.get("role"))
    if clean["role"] != "assistant":
        clean.setdefault("content", "")
    calls = clean.pop("tool_calls", None)
    if calls:
        clean["tool_calls"] = [_without_nulls(call) for call in calls]
    if clean["role"] == "assistant" and not (clean.get("content") or calls or clean.get("refusal")):
        raise Unusable("an answer is empty")
    _check_media(clean.get("content"))
    return clean


def trl_message(message: JSON) -> dict[str, Any]:
    """Return the message as chat templates read it.

    Raises:
        Unusable: if it says nothing, or something that is no text.
    """
    clean = {key: message[key] for key in _TRL_KEYS if message.get(key) is not None}
    _check_role(clean.get("role"))
    if clean["role"] == "developer":
        clean["role"] = "system"
    content, calls = _text(message.get("content")), message.get("tool_calls") or ()
    if clean["role"] == "assistant" and not (content or calls):
        content = message.get("refusal") or ""
        if not content:
            raise Unusable("an answer is empty")
    # Never null: templates add strings to it.
    shown: dict[str, Any] = {"role": clean.pop("role"), "content": content, **clean}
    if calls:
        shown["tool_calls"] = [_call_with_object(call) for call in calls]
    return shown


def openai_tool(tool: JSON) -> dict[str, Any]:
    """Return a tool without nulls; servers add them."""
    return _without_nulls(tool)


def writable(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row as every reader of JSON takes it: halves of surrogate pairs become U+FFFD.

    Raises:
        Unusable: if it holds a number that JSON does not have.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise Unusable("it holds a number that JSON does not have (NaN or infinite)") from None
    return json.loads(_SURROGATES.sub("\ufffd", text)) if _SURROGATES.search(text) else row


def _check_role(role: Any) -> None:
    if role not in _ROLES:
        raise Unusable("a message has a role that no format knows")


def _call_with_object(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise Unusable("a tool call is not a function's")
    clean = _without_nulls(cast("JSON", call))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None
        # What is no object stays text: that is what the model wrote.
        arguments = parsed if isinstance(parsed, dict) else arguments
    return clean | {"function": {"name": function.get("name"), "arguments": arguments}}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str] = []
    for part in content if isinstance(content, Sequence) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind in ("text", "input_text", "output_text") else None
        if not isinstance(text, str):
            raise Unusable("it holds an image, audio or file")
        parts.append(text)
    return "\n".join(parts)


def _check_media(content: Any) -> None:
    if not isinstance(content, str | None) and _HASHED_MEDIA.search(json.dumps(content)):
        raise Unusable("an image, audio or file was recorded as its hash only")


def _without_nulls(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return value
    pairs = cast("JSON", value)
    return {
        key: _without_nulls(item) if isinstance(item, Mapping) else item
        for key, item in pairs.items()
        if item is not None
    }
