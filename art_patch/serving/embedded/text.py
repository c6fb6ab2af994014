"""Converts chat messages to prompt token ids, and sampled token ids to the text and tool calls that a caller reads.

Prompts go through the model's own tokenizer and chat template. Before that, messages are normalised: contents become
strings, tool-call arguments become objects if they parse, and the role `developer` becomes `system`.

Text from a stop string on is cut off; if one token completes several stop strings, the leftmost counts. A stream adds
up to the unstreamed answer, however the ids were split: text is held back while a character, a stop string or a tool
call may be incomplete.

A tool call is `<tool_call>{"name": str, "arguments": object}</tool_call>`, as Hermes and Qwen models write it. Anything
else between the tags, and a tag that is never closed, stays plain text with its tags. White space next to a tool call
is dropped: the chat template adds it again, so rendering the answer again gives the text that was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from art_patch._lib.loose_json import as_object

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"  # stands for bytes that are no character
_COUNTED_AT_ONCE = 64 << 10  # characters
_MAX_PENDING_IDS = 64  # a model that samples nothing but broken bytes must not cost quadratic time


class PromptError(ValueError):
    """The model's chat template refused the messages of a request."""


class PromptTooLong(PromptError):
    """The messages surely have more tokens than the engine takes."""


class PromptEncoder:
    """A tokenizer with its chat template: renders prompts and decodes ids; several threads may share it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # In characters; a token of a byte-level tokenizer is written with one for each byte.
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._entries: dict[int, tuple[str, list[int] | None]] = {}

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None, *, most_tokens: int = 1 << 30,
    ) -> list[int]:  # fmt: skip
        """Returns the prompt's token ids, up to where the assistant's answer begins; may raise a `PromptError`.

        Raises `PromptTooLong` before the work for a prompt that cannot have `most_tokens` tokens or fewer.
        """
        # Each message begins with a token of its own, and a token stands for at most the longest one's characters.
        if len(messages) > most_tokens or _characters(messages) > most_tokens * self._longest:
            raise PromptTooLong("the messages have more text than that")
        try:
            text = self._tokenizer.apply_chat_template(
                [_normal(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except Exception as error:  # a template may raise anything: jinja's errors, TypeError, KeyError
            raise PromptError(f"the model's chat template refused the messages: {error}") from error
        # A token takes the tokenizer 200 bytes. So a text that is long for its tokens is first counted in pieces, up to
        # twice the limit: at the ends of the pieces, tokens may be shorter than in the whole text.
        if len(text) > 4 * most_tokens:
            counted = 0
            for start in range(0, len(text), _COUNTED_AT_ONCE):
                counted += len(self._ids(text[start : start + _COUNTED_AT_ONCE]))
                if counted > 2 * most_tokens:
                    raise PromptTooLong(f"the prompt has more than {counted // 2}")
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        # The template wrote the special tokens already; the tokenizer would add a second <bos>.
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of sampled ids, without special tokens such as the end-of-turn token."""
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_entry(self, token_id: int) -> tuple[str, list[int] | None]:
        """Returns a token's text and UTF-8 bytes for OpenAI's `logprobs`; bytes are `None` for part of a character."""
        if token_id not in self._entries:
            text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
            self._entries[token_id] = text, None if _REPLACEMENT in text else list(text.encode())
        return self._entries[token_id]


def _characters(messages: Sequence[Mapping[str, Any]]) -> int:
    contents = [message.get("content") or "" for message in messages]
    return sum(len(text) if isinstance(text, str) else sum(len(part["text"]) for part in text) for text in contents)


def _normal(message: Mapping[str, Any]) -> dict[str, Any]:
    normal = dict(message)
    if normal["role"] == "developer":
        normal["role"] = "system"
    if isinstance(normal.get("content"), list):
        normal["content"] = "".join(part["text"] for part in normal["content"])
    elif normal.get("content") is None:
        normal["content"] = ""
    if normal.get("tool_calls"):
        normal["tool_calls"] = [_normal_call(call) for call in normal["tool_calls"]]
    else:
        normal.pop("tool_calls", None)
    return normal


def _normal_call(call: Mapping[str, Any]) -> dict[str, Any]:
    # OpenAI sends arguments as a string of JSON; most templates render an object and would quote a string once more.
    function = dict(call["function"])
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    if isinstance(arguments, dict):
        function["arguments"] = cast("dict[str, Any]", arguments)
    return {**call, "function": function}


class _TextStream:
    """Converts ids to text as they arrive; each time it decodes a short window of ids again, not the full answer."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        # The window. It starts one piece back, because some tokenizers write a token differently when it comes first.
        self._ids: list[int] = []
        self._known = 0  # how many ids of the window have been turned into text already

    def push(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Adds ids and returns the new text; unless `final`, none while the newest character may be incomplete."""
        self._ids.extend(ids)
        if self._known == len(self._ids):
            return ""
        text = self._decode(self._ids)
        pending = len(self._ids) - self._known
        if text.endswith(_REPLACEMENT) and not final and pending <= _MAX_PENDING_IDS:
            return ""  # perhaps half a character, which the next token completes
        # The known part of the window is decoded again and cut off: alone, the new tokens may decode differently.
        known = self._decode(self._ids[: self._known]) if self._known else ""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return text[len(known) :]


class StopCutter:
    """Cuts a text before the first stop string in it; `hit` is the stop string that was found, or `None`."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Adds text; returns the part that cannot belong to a stop string, and holds back the rest."""
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(position, stop) for stop in self._stops if (position := text.find(stop)) >= 0]
        if found:
            position, self.hit = min(found, key=lambda item: item[0])
            self._held = ""
            return text[:position]
        # A stop string may begin in the last characters and end in text that is not sampled yet.
        keep = max(map(len, self._stops), default=1) - 1
        cut = max(len(text) - keep, 0)
        # Text is held back only where it really begins a stop string.
        while cut < len(text) and not any(stop.startswith(text[cut:]) for stop in self._stops):
            cut += 1
        self._held = text[cut:]
        return text[:cut]

    def close(self) -> str:
        """Returns the text that was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """Converts the ids of one choice to text, cuts it at stop strings and extracts tool calls."""

    def __init__(
        self, decode: Decode, *, stops: Sequence[str] = (), parse_tools: bool = False, one_call: bool = False
    ) -> None:
        self._text = _TextStream(decode)
        self._cutter = StopCutter(stops)
        self._parser = ToolCallParser() if parse_tools else None
        self._one_call = one_call
        self._called = False

    @property
    def stop_string(self) -> str | None:
        """The stop string at which the text was cut, or `None` if there was none."""
        return self._cutter.hit

    @property
    def done(self) -> bool:
        """Whether the text has ended at a stop string or a single tool call, so that sampling can stop."""
        return self.stop_string is not None or self._has_its_call

    @property
    def _has_its_call(self) -> bool:
        return self._one_call and self._called

    def push(self, ids: Sequence[int]) -> list[str | ToolCall]:
        """Adds ids; returns new text and tool calls, and holds back what further ids may still change."""
        return self._parse(self._cutter.feed(self._text.push(ids)))

    def close(self) -> list[str | ToolCall]:
        """Ends the text and returns the text and tool calls that were held back."""
        out = self._parse(self._cutter.feed(self._text.push((), final=True))) + self._parse(self._cutter.close())
        if self._parser and not self._has_its_call:
            out += self._parser.close()
        return out

    def _parse(self, text: str) -> list[str | ToolCall]:
        if not self._parser:
            return [text] if text else []
        out: list[str | ToolCall] = []
        for part in () if self._has_its_call else self._parser.feed(text):
            out.append(part)
            self._called |= isinstance(part, ToolCall)
            if self._has_its_call:
                break
        return out


OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One well-formed tool call of an answer; `arguments` is a JSON object as a string, as in OpenAI's API."""

    name: str  # as the model wrote it; not checked against the request's tools
    arguments: str


class ToolCallParser:
    """Splits a text into plain text and tool calls; call `feed` with each part of the text, then `close`."""

    def __init__(self) -> None:
        self._buffer = ""
        self._in_call = False
        self._space = ""  # white space that is content only if text follows it
        self._after_call = False

    def feed(self, text: str) -> list[str | ToolCall]:
        """Adds text; returns new plain text and tool calls, and holds back what may belong to an unfinished call."""
        out: list[str | ToolCall] = []
        self._buffer += text
        while self._advance(out):
            pass
        return out

    def close(self) -> list[str | ToolCall]:
        """Returns the text that was held back; call it once, after the last `feed`."""
        out: list[str | ToolCall] = []
        rest = OPEN_TAG + self._buffer if self._in_call else self._buffer
        self._buffer, self._in_call = "", False
        self._emit_text(rest, out)
        if self._space:
            out.append(self._space)
            self._space = ""
        return out

    def _advance(self, out: list[str | ToolCall]) -> bool:
        """Consumes the buffer up to the next tag; returns False when more text is needed."""
        if self._in_call:
            body, tag, rest = self._buffer.partition(CLOSE_TAG)
            if not tag:
                return False
            self._buffer, self._in_call = rest, False
            if (call := _parse_call(body)) is None:  # not repaired: the caller gets what the model wrote
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
            text = text.lstrip()  # the template's line break after a call
        if not text:
            return
        self._after_call = False
        text = self._space + text
        solid = text.rstrip()
        self._space = text[len(solid) :]
        if solid:
            out.append(solid)


def _overlap(text: str, tag: str) -> int:
    """Returns how many of the last characters of `text` may begin `tag`."""
    # The longest first: of `<tool_<tool_` only the last six characters may begin a tag.
    sizes = range(min(len(text), len(tag) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)


def _parse_call(body: str) -> ToolCall | None:
    try:
        fields = as_object(json.loads(body, parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        return None
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
