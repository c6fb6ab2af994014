"""Checks an OpenAI chat-completion body: returns it as a `ChatRequest`, or raises the error to answer with.

A parameter that this engine cannot honour exactly is refused with a 400 that names it. The one exception is `strict` in
a tool's definition: it is ignored, as vLLM does. The arguments of a tool call surely follow the schema only where a
`response_format` or `tool_choice` constrains the answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from art_patch._lib.http_guard import ApiError
from art_patch._lib.loose_json import as_object
from art_patch.serving.embedded.generation import SamplingParams
from art_patch.serving.embedded.grammar import answer_grammar
from art_patch.serving.request_checks import refuse_unsupported, short, unsupported

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_UNDERSTOOD = frozenset({
    "model", "messages", "tools", "tool_choice", "n", "temperature", "top_p", "max_tokens", "max_completion_tokens",
    "stop", "seed", "logprobs", "stream", "stream_options", "return_token_ids", "parallel_tool_calls", "ignore_eos",
    "chat_template_kwargs", "priority", "response_format",
})  # fmt: skip
_MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat-completion request whose body `parse_chat_request` has checked."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]  # function definitions that the model is shown; empty where it may not call any
    max_tokens: int | None  # `None` where the caller set no limit
    params: SamplingParams  # everything about sampling but the final `max_tokens`
    stream: bool
    include_usage: bool  # whether a stream ends with a usage chunk
    logprobs: bool
    return_token_ids: bool  # whether the answer has the ids of the prompt and of the sampled tokens
    template_kwargs: dict[str, Any]  # extra variables for the chat template
    grammar: str | None  # what `response_format` and `tool_choice` demand of the answer


def parse_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Checks a request body; raises an `ApiError` (400) that names the parameter that is wrong or not supported."""
    # Checks by hand and no model class: this runs once a call, on the thread that also feeds the engine.
    fields = {key: value for key, value in body.items() if value is not None}
    refuse_unsupported(fields, _UNDERSTOOD)
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model must be a string", param="model")
    tools = _tools(fields)
    # OpenAI's newer name wins where both are given.
    limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    params = SamplingParams(
        temperature=_number(fields, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(fields, "top_p", 1.0, 5e-324, 1.0),  # above 0
        n=_integer(fields, "n", 1, 1, 128),
        # Choice i of up to 128 draws with seed + i, which must stay a signed 64-bit number.
        seed=_integer(fields, "seed", 0, -(1 << 63), (1 << 63) - 129) if "seed" in fields else None,
        ignore_eos=_flag(fields, "ignore_eos"),
        stops=_stops(fields),
        one_call=bool(tools) and not _flag(fields, "parallel_tool_calls", True),
        parse_tools=bool(tools),
        priority=_integer(fields, "priority", 0, -(1 << 31), 1 << 31),
    )
    grammar = answer_grammar(fields, tools, one_call=params.one_call)
    if grammar is not None and params.ignore_eos:
        raise unsupported("ignore_eos is not supported beside response_format or a forced tool", "ignore_eos")
    return ChatRequest(
        model=model,
        messages=_messages(fields.get("messages")),
        tools=tools,
        max_tokens=_integer(fields, limit, 1, 1, 1 << 40) if limit in fields else None,
        params=params,
        stream=_flag(fields, "stream"),
        include_usage=_include_usage(fields),
        logprobs=_flag(fields, "logprobs"),
        return_token_ids=_flag(fields, "return_token_ids"),
        template_kwargs=_template_kwargs(fields.get("chat_template_kwargs", {})),
        grammar=grammar,
    )


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _tools(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = fields.get("tools", [])
    if not _is_list(tools):
        raise ApiError(400, "tools must be a list", param="tools")
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        if not _is_object(tool):
            raise ApiError(400, f"{param} must be an object", param=param)
        if (kind := tool.get("type")) != "function":
            raise unsupported(f"{param}: type {short(kind)} is not supported by this engine; only 'function' is", param)
        if not isinstance(as_object(tool.get("function")).get("name"), str):
            raise ApiError(400, f"{param} needs a function with a name", param=param)
    return tools if fields.get("tool_choice") != "none" else []


def _messages(messages: object) -> list[dict[str, Any]]:
    if not _is_list(messages) or not messages:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    return messages


def _check_message(message: object, param: str) -> None:
    if not _is_object(message):
        raise ApiError(400, f"{param} must be an object", param=param)
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(400, f"{param}: role {short(role)} is not supported", param=param)
    for key in ("audio", "function_call", "refusal"):
        if message.get(key) is not None:
            raise unsupported(f"{param}: {key} is not supported by this engine", param)
    if _is_list(content):
        for part in map(as_object, content):
            kind = part.get("type")
            if kind != "text" or not isinstance(part.get("text"), str):
                why = f"{param}: content part of type {short(kind)} is not supported; this engine reads text only"
                raise unsupported(why, param)
    elif content is not None and not isinstance(content, str):
        raise ApiError(400, f"{param}: content must be a string or a list of text parts", param=param)
    if calls is not None:
        _check_calls(calls, param)
    if content is None and not (role == "assistant" and calls):
        raise ApiError(400, f"{param}: content is missing", param=param)


def _check_calls(calls: object, param: str) -> None:
    if not _is_list(calls):
        raise ApiError(400, f"{param}: tool_calls must be a list", param=param)
    for call in calls:
        function = as_object(call).get("function")
        if not _is_object(function):
            raise ApiError(400, f"{param}: only function tool calls are supported", param=param)
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments", ""), str):
            raise ApiError(400, f"{param}: a tool call needs name and arguments, both strings", param=param)


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not _is_list(stops) or len(stops) > _MAX_STOPS:
        raise ApiError(400, f"stop must be a string or a list of at most {_MAX_STOPS}", param="stop")
    if not all(isinstance(item, str) and item for item in stops):
        raise ApiError(400, "stop strings must not be empty", param="stop")
    return tuple(stops)


def _include_usage(fields: Mapping[str, Any]) -> bool:
    options = fields.get("stream_options", {})
    if not _is_object(options):
        raise ApiError(400, "stream_options must be an object", param="stream_options")
    for key, value in options.items():
        if key not in ("include_usage", "include_obfuscation") and value:
            raise unsupported(f"stream_options.{key} is not supported by this engine", "stream_options")
    return bool(options.get("include_usage"))


def _template_kwargs(kwargs: object) -> dict[str, Any]:
    if not _is_object(kwargs):
        raise ApiError(400, "chat_template_kwargs must be an object", param="chat_template_kwargs")
    # Arguments of `apply_chat_template` itself would change the type of its result; `chat_template` runs code.
    if reserved := set(kwargs) & _RESERVED_KWARGS:
        names = ", ".join(sorted(reserved))
        raise ApiError(400, f"chat_template_kwargs may not set {names}", param="chat_template_kwargs")
    return kwargs


_RESERVED_KWARGS = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "padding", "continue_final_message", "truncation", "max_length", "return_tensors", "return_dict",
    "tokenizer_kwargs", "return_assistant_tokens_mask", "processor_kwargs",
})  # fmt: skip


def _integer(fields: Mapping[str, Any], key: str, default: int, low: int, high: int) -> int:
    if not isinstance(fields.get(key, default), int):
        raise ApiError(400, f"{key} must be an integer", param=key)
    return int(_number(fields, key, default, low, high))


def _number(fields: Mapping[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ApiError(400, f"{key} must be a number", param=key)
    if not low <= value <= high:  # NaN is in no range
        raise ApiError(400, f"{key} = {value} is out of range ({low} to {high})", param=key)
    return value


def _flag(fields: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = fields.get(key, default)
    if not isinstance(value, bool):
        raise ApiError(400, f"{key} must be true or false", param=key)
    return value
