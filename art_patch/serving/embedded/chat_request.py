"""Checks an OpenAI chat-completion body: returns it as a `ChatRequest`, or raises the error to answer with.

A parameter that this engine cannot honour exactly is refused with a 400 that names it. The one exception is `strict` in
a tool's definition: it is ignored, as vLLM does. The arguments of a tool call surely follow the schema only where a
`response_format` or `tool_choice` constrains the answer.

`answer_grammar` writes these two as a grammar, in llguidance's form of Lark; `Grammars` compiles it for the model's
tokenizer. A schema comes from outside, and some schemas take llguidance unlimited time and memory to compile, whatever
limits it is given. So each new one is compiled in a process of its own first, which may use `_CPU_S` and
`_MEMORY_BYTES`.
"""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

from art_patch._lib.asgi import ApiError
from art_patch._lib.loose_json import as_object
from art_patch.serving.embedded.generation import SamplingParams
from art_patch.serving.embedded.text import CLOSE_TAG, OPEN_TAG
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


_CPU_S, _MEMORY_BYTES, _WALL_S = 2, 2 << 30, 60.0
_MAX_BYTES = 256 << 10  # of a grammar
# White space between JSON's tokens is bounded: a small model that starts to indent may otherwise never stop.
_GUIDANCE = {"x-guidance": {"whitespace_pattern": r"[ \n\r\t]{0,32}"}}
_TRIAL = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({_CPU_S}, {_CPU_S}))
resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY_BYTES}, {_MEMORY_BYTES}))
sys.path.append(sys.argv[1])
from llguidance import LLMatcher
LLMatcher.validate_grammar(sys.stdin.read())
"""

_log = logging.getLogger(__name__)


def answer_grammar(fields: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], *, one_call: bool) -> str | None:
    """Returns the grammar of the answer to a request, or `None` if any text is allowed; raises an `ApiError` (400)."""
    schema, forced = _response_schema(fields.get("response_format")), forced_tool(fields)
    if schema is None and forced is None:
        return None
    rules: list[str] = []
    for tool in tools:
        function = tool["function"]
        if forced in (None, "", function["name"]):
            name = json.dumps(function["name"], ensure_ascii=False)
            # An object, even where the tool's schema leaves that open: arguments of another kind are no tool call.
            arguments = {**as_object(function.get("parameters")), "type": "object"}
            begin, at = json.dumps(f'\n{{"name": {name}, "arguments": ', ensure_ascii=False), len(rules)
            rules.append(f'call_{at}: open {begin} args_{at} "}}\\n" close\nargs_{at}: {_json(arguments)}')
    ways: list[str] = []
    if rules:
        ways.append("call" if one_call or forced else r"call (/\n?/ call)*")
        rules.append("call: " + " | ".join(f"call_{at}" for at in range(len(rules))))
    elif forced is not None:
        raise ApiError(400, "tool_choice names no function of tools", param="tool_choice")
    if schema is not None and forced is None:
        ways.append("answer")
        rules.append(f"answer: {_json(schema)}")
    return "\n".join([f"start: {' | '.join(ways)}", *rules])


def forced_tool(fields: Mapping[str, Any]) -> str | None:
    """Returns the function that `tool_choice` forces, `""` for any, `None` if it forces none; may raise `ApiError`."""
    match fields.get("tool_choice", "auto"):
        case "auto" | "none":
            return None
        case "required":
            return ""
        case {"type": "function", "function": {"name": str(name)}} if name:
            return name
        case choice:
            raise unsupported(f"tool_choice = {short(choice)} is not supported by this engine", "tool_choice")


def _response_schema(given: Any) -> Any:
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": {**schema}}}:
            return schema
        case _:
            raise unsupported(f"response_format = {short(given)} is not supported by this engine", "response_format")


def _json(schema: Mapping[str, Any]) -> str:
    # After the schema, so that it cannot choose options of its own, such as one that ignores unknown keywords.
    try:
        return "%json " + json.dumps({**schema, **_GUIDANCE})
    except RecursionError:
        raise ApiError(400, "a schema is nested too deeply") from None


class Grammars:
    """Compiles grammars for one model's tokenizer, one at a time on a thread of its own, and keeps the latest 32."""

    def __init__(self, tokenizer: Any) -> None:
        """Reads the tokenizer, which may take seconds. If that fails, `compile` refuses every grammar."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="art-patch-grammar")
        self._compiled = lru_cache(32)(self._compile)
        self._tags, self._missing = "", ""
        try:
            from llguidance import hf

            self._tokenizer = hf.from_tokenizer(tokenizer)
        except Exception as error:  # the library may raise anything, and the model serves free text without it
            self._missing = f"answers cannot be constrained: {type(error).__name__}: {error}"
            _log.warning("response_format and forced tools are refused, %s", self._missing)
            return
        for rule, tag in (("open", OPEN_TAG), ("close", CLOSE_TAG)):
            ids = tokenizer.encode(tag, add_special_tokens=False)
            # llguidance names a token that it takes for special, and otherwise spells the tag.
            special = len(ids) == 1 and self._tokenizer.is_special_token(ids[0])
            self._tags += f"\n{rule}: {tag if special else json.dumps(tag)}"

    async def compile(self, grammar: str) -> Any:
        """Returns a matcher at the grammar's beginning, to be copied for each choice; or raises an `ApiError` (400)."""
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._compiled, grammar)
        if isinstance(found, str):
            raise ApiError(400, f"response_format, tools: {found}", code="unsupported_parameter")
        return found

    def close(self) -> None:
        """Drops the grammars that wait for the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> Any:
        if self._missing or len(grammar) > _MAX_BYTES:
            return self._missing or f"the schemas are larger than {_MAX_BYTES} bytes"
        import llguidance

        spelt = f'\nopen: "{OPEN_TAG}"\nclose: "{CLOSE_TAG}"'
        command = [sys.executable, "-I", "-S", "-c", _TRIAL, str(Path(llguidance.__file__).parents[1])]
        try:
            subprocess.run(command, input=(grammar + spelt).encode(), capture_output=True, check=True, timeout=_WALL_S)
        except (subprocess.SubprocessError, OSError, UnicodeError):
            return "the schemas are too complex for this engine"
        limits = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar + self._tags, log_level=0, limits=limits)
        matcher.compute_bitmask()  # the first mask finds what is too large to be followed
        return matcher.get_error()[:300] if matcher.is_error() else matcher
