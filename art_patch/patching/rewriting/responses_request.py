"""Translates a Responses request into a chat request, if a chat request can express all of it.

The translation is an allow-list: each field, input item and part is checked, and a request with an unknown one goes
upstream unchanged. Therefore a field that a later version of the API adds is never silently dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from art_patch._lib.loose_json import as_list, as_object
from art_patch.patching.rewriting.engine_request import merged_body, redirected, why_not_carried
from art_patch.patching.routing.target import Target
from art_patch.recording import read_responses_request

# These say who asks, and how the provider should bill or cache. The answer repeats them.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
        "service_tier", "user",
    }
)  # fmt: skip

_ROLES = frozenset({"user", "assistant", "system", "developer"})


def to_engine_request(options: Any, target: Target, client: Any) -> Any:
    """Return request options that ask the champion for a chat completion, for a call that `why_not_routed` accepts."""
    given = merged_body(options)
    asked = read_responses_request(given)
    body: dict[str, Any] = {"model": target.champion, "messages": list(asked.messages), **asked.params}
    if asked.tools:
        body["tools"] = list(asked.tools)
    if given.get("stream"):
        # The last event of a Responses stream always holds the usage.
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= {"logprobs": True, "return_token_ids": True}
    return redirected(options, target, client, body, url="/chat/completions")


def why_not_routed(options: Any, stream: bool, *, stateless: bool) -> str | None:
    """Return the reason why the champion cannot answer this Responses call; `None` if it can.

    With `store` unset the provider would keep the answer, and a later call could refer to it by its id. `stateless` is
    the app's promise that it never does so; then such calls can be routed too.
    """
    body = merged_body(options)
    reason = why_not_carried(options, body, stream)
    if reason is not None:
        return reason
    store = body.get("store")
    # The provider stores every answer unless `store` is false, and the app may refer to it later.
    if store is not False and not (store is None and stateless):
        return "the provider keeps the answer"
    if not isinstance(body.get("model"), str):
        return "no model"
    if body.get("input") is None:
        return "no input"
    for name, value in body.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        check = _FIELDS.get(name)
        reason = f"{name} is the provider's own" if check is None else check(value)
        if reason is not None:
            return reason
    return None


# The checks of the fields: each takes a value, and returns why the value keeps the call upstream.

_Check = Callable[[Any], str | None]


def _anything(value: Any) -> str | None:
    return None


def _a(kind: type | tuple[type, ...], name: str) -> _Check:
    return lambda value: None if isinstance(value, kind) else f"{name} of another kind than we know"


def _only(name: str, *known: Any) -> _Check:
    return lambda value: None if any(value == one for one in known) else f"{name} is the provider's own"


def _unknown(given: dict[str, Any], *known: str) -> str | None:
    """Return an unknown key that holds a value; `None` if there is none."""
    return next((str(key) for key, value in given.items() if value is not None and key not in known), None)


def _tools(tools: Any) -> str | None:
    if not isinstance(tools, list):
        return "tools of another kind than we know"
    for given in map(as_object, cast(list[Any], tools)):
        if given.get("type") != "function":
            return "a tool that the provider hosts"
        if not isinstance(given.get("name"), str):
            return "a tool without a name"
        # `defer_loading: false` and an empty list ask for nothing, but `strict: false` does.
        asking = {key: value for key, value in given.items() if value or key == "strict"}
        extra = _unknown(asking, "type", "name", "description", "parameters", "strict")
        if extra is not None:
            return f"a tool's {extra} is the provider's own"
    return None


def _tool_choice(choice: Any) -> str | None:
    given = as_object(choice)
    if choice in ("auto", "none", "required"):
        return None
    if given.get("type") != "function":
        return "a tool that the provider hosts"
    known = isinstance(given.get("name"), str) and _unknown(given, "type", "name") is None
    return None if known else "a choice of tools that chat does not know"


def _text(text: Any) -> str | None:
    if not isinstance(text, dict):
        return "text of another kind than we know"
    given = as_object(text)
    extra = _unknown(given, "format", "verbosity")
    if extra is not None:
        return f"text.{extra} is the provider's own"
    form = given.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        return "a text format of another kind than we know"
    wanted = as_object(form)
    known = ("type", "name", "description", "schema", "strict") if wanted.get("type") == "json_schema" else ("type",)
    if wanted.get("type") not in ("text", "json_object", "json_schema") or _unknown(wanted, *known) is not None:
        return "a text format that chat does not know"
    return None


def _reasoning(reasoning: Any) -> str | None:
    if not isinstance(reasoning, dict):
        return "reasoning of another kind than we know"
    extra = _unknown(as_object(reasoning), "effort")
    return None if extra is None else f"reasoning.{extra} is the provider's own"


def _stream_options(stream_options: Any) -> str | None:
    # Obfuscation is padding against eavesdroppers; a stream of the champion has none.
    if stream_options in ({}, {"include_obfuscation": False}, {"include_obfuscation": None}):
        return None
    return "a stream option that chat does not know"


def _include(include: Any) -> str | None:
    # The champion's answers hold no reasoning items, so there is nothing to include with them.
    known = isinstance(include, list) and all(one == "reasoning.encrypted_content" for one in as_list(include))
    return None if known else "include asks for what only the provider has"


# The checks of the input.


def _input(given: Any) -> str | None:
    if isinstance(given, str):
        return None
    if not isinstance(given, list) or not given:
        return "no input"
    called: set[str] = set()
    for item in cast(list[Any], given):
        if not isinstance(item, dict):
            return "an input item of another kind than we know"
        reason = _item(as_object(item), called)
        if reason is not None:
            return reason
    return None


def _item(item: dict[str, Any], called: set[str]) -> str | None:
    kind = item.get("type") or ("message" if "role" in item else None)
    known: tuple[str, ...]
    if kind == "message":
        known = ("type", "id", "status", "role", "content")
        reason = _message(item)
    elif kind == "function_call":
        known = ("type", "id", "status", "call_id", "name", "arguments", "parsed_arguments")
        texts = (item.get("call_id"), item.get("name"), item.get("arguments"))
        reason = None if all(isinstance(text, str) for text in texts) else "a function call without id or name"
        if reason is None:
            called.add(item["call_id"])
    elif kind == "function_call_output":
        known = ("type", "id", "status", "call_id", "output")
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or call_id not in called:
            return "the result of a call that only the provider knows"
        reason = _content(item.get("output"), "input_text")
    else:
        # Reasoning, too: it is the provider's own, and mostly encrypted.
        return f"an input item that chat does not know: {kind}"
    extra = _unknown(item, *known)
    return reason if extra is None else f"an input item's {extra} is the provider's own"


def _message(item: dict[str, Any]) -> str | None:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        return "a message of somebody unknown"
    return _content(item.get("content"), *(("output_text", "refusal") if role == "assistant" else ("input_text",)))


# Fields of a part besides its type. The first holds its text.
_PART_FIELDS = {
    "input_text": ("text",),
    "output_text": ("text", "annotations", "logprobs", "parsed"),
    "refusal": ("refusal",),
}


def _content(content: Any, *kinds: str) -> str | None:
    if isinstance(content, str):
        return None
    if not isinstance(content, list):
        return "content of another kind than we know"
    for given in map(as_object, cast(list[Any], content)):
        kind: Any = given.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            return f"a part that chat does not know: {kind}"
        fields = _PART_FIELDS[kind]
        if not isinstance(given.get(fields[0]), str):
            return "a part without text"
        if given.get("annotations"):
            return "a text with references"
        extra = _unknown(given, "type", *fields)
        if extra is not None:
            return f"a part's {extra} is the provider's own"
    return None


# What can be translated. Every other field that holds a value keeps the call upstream.
_FIELDS: dict[str, _Check] = {
    "background": _only("background", False),
    "include": _include,
    "input": _input,
    "instructions": _a(str, "instructions"),
    "max_output_tokens": _a(int, "max_output_tokens"),
    "model": _anything,
    "parallel_tool_calls": _a(bool, "parallel_tool_calls"),
    "reasoning": _reasoning,
    "store": _anything,
    "stream": _anything,
    "stream_options": _stream_options,
    "temperature": _a((int, float), "temperature"),
    "text": _text,
    "tool_choice": _tool_choice,
    "tools": _tools,
    "top_logprobs": _only("top_logprobs", 0),
    "top_p": _a((int, float), "top_p"),
    "truncation": _only("truncation", "disabled"),
}
