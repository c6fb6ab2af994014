"""Finds Hermes / Qwen tool calls in a model's text, in one go or piece by piece.

In: text pieces as they are decoded. Out: plain text and `ToolCall`s in order. How the text was cut into pieces never
changes what comes out, so a stream and a whole answer agree.

A call is `<tool_call>{"name": str, "arguments": object}</tool_call>`. Anything else between the tags, and an open tag
that is never closed, stays plain text, tags included. White space next to a call belongs to the template, not to the
content: it is dropped, so that rendering the answer again gives the text that was sampled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn, cast

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One well-formed call.

    Attributes:
        name: The function's name as the model wrote it; not checked against the request's tools.
        arguments: A JSON object as a string, the way OpenAI sends it.
    """

    name: str
    arguments: str


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Splits a whole answer into content and calls."""
    parser = ToolCallParser()
    parts = [*parser.feed(text), *parser.close()]
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [part for part in parts if isinstance(part, ToolCall)]


class ToolCallParser:
    """The incremental form: `feed` pieces, then `close`."""

    def __init__(self) -> None:
        self._buffer = ""
        self._in_call = False
        self._space = ""  # white space that is content only if text follows it
        self._after_call = False

    def feed(self, text: str) -> list[str | ToolCall]:
        """Takes the next piece and returns what is certain by now."""
        out: list[str | ToolCall] = []
        self._buffer += text
        while self._advance(out):
            pass
        return out

    def close(self) -> list[str | ToolCall]:
        """Returns what was held back; call once, at the end of the text."""
        out: list[str | ToolCall] = []
        rest = OPEN_TAG + self._buffer if self._in_call else self._buffer
        self._buffer, self._in_call = "", False
        self._emit_text(rest, out)
        if self._space:
            out.append(self._space)
            self._space = ""
        return out

    def _advance(self, out: list[str | ToolCall]) -> bool:
        """Consumes up to the next tag; False when more text is needed."""
        if self._in_call:
            body, tag, rest = self._buffer.partition(CLOSE_TAG)
            if not tag:
                return False
            self._buffer, self._in_call = rest, False
            call = _parse_call(body)
            if call is None:
                self._emit_text(OPEN_TAG + body + CLOSE_TAG, out)
            else:
                self._space, self._after_call = "", True
                out.append(call)
            return True
        before, tag, rest = self._buffer.partition(OPEN_TAG)
        if tag:
            self._buffer, self._in_call = rest, True
        else:
            held = _overlap(before, OPEN_TAG)
            before, self._buffer = before[: len(before) - held], before[len(before) - held :]
        self._emit_text(before, out)
        return bool(tag)

    def _emit_text(self, text: str, out: list[str | ToolCall]) -> None:
        if self._after_call:
            text = text.lstrip()
        if not text:
            return
        self._after_call = False
        text = self._space + text
        solid = text.rstrip()
        self._space = text[len(solid) :]
        if solid:
            out.append(solid)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` with which `tag` begins."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


def _parse_call(body: str) -> ToolCall | None:
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    fields = cast("dict[str, Any]", call)
    name, arguments = fields.get("name"), fields.get("arguments")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    encoded = json.dumps(arguments, ensure_ascii=False)
    try:
        encoded.encode()
    except UnicodeEncodeError:  # the model escaped half a surrogate pair: keep it escaped, or no client can read it
        encoded = json.dumps(arguments)
    return ToolCall(name, encoded)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
