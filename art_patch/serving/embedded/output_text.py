"""From sampled ids to what a caller reads: text, cut at stop strings, with tool calls taken out.

In: token ids, as few or as many at a time as there are. Out: pieces of text and `ToolCall`s. Put together they are the
same however the ids were delivered: text is held back while a character, a stop string or a tool call may be
incomplete; `close` gives out the rest. Of several stop strings that one token completes, the leftmost counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from art_patch.serving.embedded.tool_calls import ToolCall, ToolCallParser

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"
_MAX_PENDING_IDS = 64  # a model that samples nothing but broken bytes must not cost quadratic time


class TextStream:
    """Incremental detokenisation.

    Decodes a short window, never the whole answer again. The window starts one piece back, because some tokenizers
    write a token differently when it comes first.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._known = 0  # how many ids of the window have been turned into text already

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that the new ids complete."""
        self._ids.extend(ids)
        return self._take(final=False)

    def close(self) -> str:
        """Returns the text of ids that never became a whole character."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        if self._known == len(self._ids):
            return ""
        text = self._decode(self._ids)
        pending = len(self._ids) - self._known
        if text.endswith(_REPLACEMENT) and not final and pending <= _MAX_PENDING_IDS:
            return ""  # perhaps half a character; the next token tells
        known = self._decode(self._ids[: self._known]) if self._known else ""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return text[len(known) :]


class StopCutter:
    """Ends a text before the first stop string in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Returns text that is certainly before any stop string."""
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(position, stop) for stop in self._stops if (position := text.find(stop)) >= 0]
        if found:
            position, self.hit = min(found, key=lambda item: item[0])
            self._held = ""
            return text[:position]
        keep = max(map(len, self._stops), default=1) - 1
        cut = max(len(text) - keep, 0)
        # Only what really begins a stop string is worth holding back.
        while cut < len(text) and not any(stop.startswith(text[cut:]) for stop in self._stops):
            cut += 1
        self._held = text[cut:]
        return text[:cut]

    def close(self) -> str:
        """Returns what was held back."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """The three stages together, for one choice."""

    def __init__(
        self, decode: Decode, *, stops: Sequence[str] = (), parse_tools: bool = False, one_call: bool = False
    ) -> None:
        self._text = TextStream(decode)
        self._cutter = StopCutter(stops) if stops else None
        self._parser = ToolCallParser() if parse_tools else None
        self._one_call = one_call
        self._called = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._cutter.hit if self._cutter else None

    @property
    def done(self) -> bool:
        """Whether the text has ended, so that sampling more would be for nothing."""
        return self.stop_string is not None or (self._one_call and self._called)

    def push(self, ids: Sequence[int]) -> list[str | ToolCall]:
        """Takes the next ids."""
        return self._pass_on(self._text.push(ids))

    def close(self) -> list[str | ToolCall]:
        """Ends the text; returns everything held back."""
        out = self._pass_on(self._text.close())
        if self._cutter:
            out += self._parse(self._cutter.close())
        if self._parser and not (self._one_call and self._called):
            out += self._parser.close()
        return out

    def _pass_on(self, text: str) -> list[str | ToolCall]:
        return self._parse(self._cutter.feed(text) if self._cutter else text)

    def _parse(self, text: str) -> list[str | ToolCall]:
        if not self._parser:
            return [text] if text else []
        if self._one_call and self._called:
            return []
        parts = self._parser.feed(text)
        for index, part in enumerate(parts):
            if isinstance(part, ToolCall):
                self._called = True
                if self._one_call:
                    return parts[: index + 1]
        return parts
