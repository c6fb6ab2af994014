"""Constrained decoding: `response_format` and a forced `tool_choice` become a grammar that masks the sampled tokens.

`answer_grammar` writes the grammar of a request in llguidance's form of Lark; `Grammars` compiles it for the model's
tokenizer. At each step the scheduler asks the compiled grammar which tokens may come next, and only those are sampled.

A schema comes from outside, and some schemas take llguidance unlimited time and memory to compile, whatever limits it
is given. So each new one is compiled in a process of its own first, which may use `_CPU_S` and `_MEMORY_BYTES`.
"""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from art_patch._lib.http_guard import ApiError
from art_patch._lib.loose_json import as_object
from art_patch.serving.embedded.text import CLOSE_TAG, OPEN_TAG
from art_patch.serving.request_checks import short, unsupported

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
        """Returns the matcher, or why there is none."""
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
