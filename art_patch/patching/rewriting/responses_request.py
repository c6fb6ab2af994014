"""Translates a Responses request into a chat request, if a chat request can express all of it.

The translation is an allow-list: each field, input item and part is checked, and a request with an unknown one goes
upstream unchanged. Therefore a field that a later version of the API adds is never silently dropped.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

from art_patch._lib.loose_json import as_list, as_object
from art_patch.patching.rewriting.engine_request import merged_body, why_not_carried
from art_patch.patching.rewriting.responses_rewriter import ResponsesRewriter
from art_patch.recording import read_responses_request
from art_patch.settings import Settings

# These say who asks, and how the provider should bill or cache. The answer repeats them.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
        "service_tier", "user",
    }
)  # fmt: skip


# How `surfaces.Translated` reads a request body of this API.
read_request = read_responses_request


def rewriter(options: Any, local: Any) -> ResponsesRewriter:
    """Return the rewriter for the answer to `local`, the request to the engine that was made from `options`."""
    policy, given = local.json_data["model"], merged_body(options)
    return ResponsesRewriter(policy, given["model"], n=1, keeps_logprobs=False, keeps_token_ids=False, request=given)


def why_not_routed(options: Any, stream: bool, settings: Settings) -> str | None:
    """Return the reason why the champion cannot answer this Responses call; `None` if it can.

    With `store` unset the provider would keep the answer, and a later call could refer to it by its id. The setting
    `stateless_responses` is the app's promise that it never does so; then such calls can be routed too.
    """
    body = merged_body(options)
    reason = why_not_carried(options, body, stream)
    if reason is not None:
        return reason
    store = body.get("store")
    if store is not False and not (store is None and settings.stateless_responses):
        return "the provider keeps the answer"
    return why_no_chat(body)


def why_no_chat(body: dict[str, Any]) -> str | None:
    """Return the reason why a chat completion cannot express this request; `None` if it can."""
    if not isinstance(body.get("model"), str):
        return "no model"
    if body.get("input") is None:
        return "no input"
    given = {name: value for name, value in body.items() if value is not None and name not in _WITHOUT_EFFECT}
    return _first(_field(name, value) for name, value in given.items())


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _field(name: str, value: Any) -> str | None:
    """Return why a field of the request keeps the call upstream; `None` if it does not."""
    if name in _ONLY:
        return None if value == _ONLY[name] else f"{name} is the provider's own"
    if name not in _FIELDS:
        return f"{name} is the provider's own"
    kind, check = _FIELDS[name]
    if not isinstance(value, kind):
        return f"{name} of another kind than we know"
    return None if check is None else check(value)


def _unknown(what: str, given: dict[str, Any], *known: str) -> str | None:
    """Return the reason if a key that is not `known` holds a value."""
    extra = next((key for key, value in given.items() if value is not None and key not in known), None)
    return None if extra is None else f"{what}{extra} is the provider's own"


# The checks of single fields, whose kind was looked at before.


def _tools(tools: Any) -> str | None:
    for given in map(as_object, tools):
        if given.get("type") != "function":
            return "a tool that the provider hosts"
        if not isinstance(given.get("name"), str):
            return "a tool without a name"
        # `defer_loading: false` and an empty list ask for nothing, but `strict: false` does.
        asking = {key: value for key, value in given.items() if value or key == "strict"}
        reason = _unknown("a tool's ", asking, "type", "name", "description", "parameters", "strict")
        if reason is not None:
            return reason
    return None


def _tool_choice(choice: Any) -> str | None:
    given = as_object(choice)
    if choice in ("auto", "none", "required"):
        return None
    if given.get("type") != "function":
        return "a tool that the provider hosts"
    known = isinstance(given.get("name"), str) and _unknown("", given, "type", "name") is None
    return None if known else "a choice of tools that chat does not know"


def _text(text: Any) -> str | None:
    form = text.get("format")
    reason = _unknown("text.", text, "format", "verbosity")
    if reason is not None or form is None:
        return reason
    if not isinstance(form, dict):
        return "a text format of another kind than we know"
    kind = as_object(form).get("type")
    known = ("type", "name", "description", "schema", "strict") if kind == "json_schema" else ("type",)
    if kind not in ("text", "json_object", "json_schema") or _unknown("", as_object(form), *known) is not None:
        return "a text format that chat does not know"
    return None


def _stream_options(stream_options: Any) -> str | None:
    # Obfuscation is padding against eavesdroppers; a stream of the champion has none.
    known = stream_options in ({}, {"include_obfuscation": False}, {"include_obfuscation": None})
    return None if known else "a stream option that chat does not know"


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
    called: set[Any] = set()
    return _first(_item(item, called) for item in cast("list[Any]", given))


# The kinds of input items, and their fields beside `type`, `id` and `status`.
_ITEM_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments", "parsed_arguments"),
    "function_call_output": ("call_id", "output"),
}


def _item(given: Any, called: set[Any]) -> str | None:
    """Return why an input item keeps the call upstream. `called` collects the ids of function calls."""
    if not isinstance(given, dict):
        return "an input item of another kind than we know"
    item = as_object(given)
    kind, call_id = item.get("type") or ("message" if "role" in item else None), item.get("call_id")
    if kind == "message":
        reason = _message(item)
    elif kind == "function_call":
        is_whole = all(isinstance(text, str) for text in (call_id, item.get("name"), item.get("arguments")))
        reason = None if is_whole else "a function call without id or name"
        if is_whole:
            called.add(call_id)
    elif kind == "function_call_output":
        if not isinstance(call_id, str) or call_id not in called:
            return "the result of a call that only the provider knows"
        reason = _content(item.get("output"), "input_text")
    else:
        # Reasoning, too: it is the provider's own, and mostly encrypted.
        return f"an input item that chat does not know: {kind}"
    return _unknown("an input item's ", item, "type", "id", "status", *_ITEM_FIELDS[kind]) or reason


def _message(item: dict[str, Any]) -> str | None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
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
    for given in map(as_object, cast("list[Any]", content)):
        kind: Any = given.get("type")
        if kind not in kinds:
            return f"a part that chat does not know: {kind}"
        fields = _PART_FIELDS[kind]
        if not isinstance(given.get(fields[0]), str):
            return "a part without text"
        if given.get("annotations"):
            return "a text with references"
        reason = _unknown("a part's ", given, "type", *fields)
        if reason is not None:
            return reason
    return None


# What can be translated. Every other field that holds a value keeps the call upstream.

_Check = Callable[[Any], str | None]

# Field -> the kind of its value, and a further check of the value.
_FIELDS: dict[str, tuple[type | tuple[type, ...], _Check | None]] = {
    "include": (object, _include),
    "input": (object, _input),
    "instructions": (str, None),
    "max_output_tokens": (int, None),
    "model": (object, None),
    "parallel_tool_calls": (bool, None),
    "reasoning": (dict, lambda given: _unknown("reasoning.", given, "effort")),
    "store": (object, None),
    "stream": (object, None),
    "stream_options": (object, _stream_options),
    "temperature": ((int, float), None),
    "text": (dict, _text),
    "tool_choice": (object, _tool_choice),
    "tools": (list, _tools),
    "top_p": ((int, float), None),
}

# Field -> its only value that chat knows, too.
_ONLY: dict[str, Any] = {"background": False, "top_logprobs": 0, "truncation": "disabled"}
