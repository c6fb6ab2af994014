"""A trajectory on a terminal: what is known of it, how it was judged, its steps, what was said call by call."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from art_patch.cli.views.output import ago, seconds
from art_patch.cli.views.safe_text import one_line, visible
from art_patch.cli.views.steps import steps_tree
from art_patch.types import JSON, Call, Choice

if TYPE_CHECKING:
    from art_patch.formats import Bundle
    from art_patch.store import Summary

_LONGEST = 1_500  # characters of one text
_LINES = 24
_COLOURS = {"system": "magenta", "developer": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


class _Page:
    def __init__(self, console: Console, *, full: bool, raw: bool, tokens: bool) -> None:
        self.console = console
        self.full, self.raw, self.tokens = full, raw, tokens

    def message(self, message: JSON, label: str = "") -> None:
        role = one_line(message.get("role", "?"))
        head = Text(label or role, style=f"bold {_COLOURS.get(role, 'white')}")
        for key in ("name", "tool_call_id"):
            if message.get(key):
                head.append(f" {one_line(message[key])}", style="dim")
        self.console.print(head)
        if self.raw:
            self._text(json.dumps(message, indent=2))
            return
        for key in ("reasoning_content", "reasoning", "refusal"):
            if isinstance(message.get(key), str) and message[key]:
                self._text(f"({key.removesuffix('_content')}) {message[key]}", style="dim")
        if message.get("content"):
            self._text(_content(message["content"]))
        for call in message.get("tool_calls") or ():
            self._text(_tool_call(call), style="yellow")
        if not (message.get("content") or message.get("tool_calls")):
            self._text("(nothing)", style="dim")

    def _text(self, text: str, style: str = "") -> None:
        text, left = (text, 0) if self.full else _cut(text)
        self.console.print(Padding(Text(visible(text), style=style), (0, 0, 0, 2)))
        if left:
            self.note(f"... {left:,} more characters; --full shows them")

    def note(self, words: str, style: str = "dim") -> None:
        self.console.print(Padding(Text(words, style=style), (0, 0, 0, 2)))


def print_trajectory(
    console: Console, bundle: Bundle, summary: Summary, *, full: bool, raw: bool, tokens: bool, now: float | None = None
) -> None:
    """Print all of it.

    Args:
        console: where.
        bundle: the trajectory.
        summary: the same in metrics.
        full: long texts to their end.
        raw: messages, and what is known of steps, as JSON.
        tokens: metrics of token ids and log-probabilities.
        now: seconds since the epoch.
    """
    page = _Page(console, full=full, raw=raw, tokens=tokens)
    at = time.time() if now is None else now
    _print_facts(page, bundle, summary, at)
    if bundle.spans:
        console.print()
        console.print(steps_tree(bundle.spans, bundle.trajectory.calls, full=full, raw=raw))
    said: list[list[bytes]] = []
    for number, call in enumerate(bundle.trajectory.calls, 1):
        _print_call(page, bundle, number, call, said)
    if not bundle.trajectory.calls:
        console.print()
        page.note("no call was recorded")


def _print_facts(page: _Page, bundle: Bundle, summary: Summary, now: float) -> None:
    info = bundle.trajectory.info
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.started_at))
    took = f"; took {seconds(summary.duration_s)}" if summary.calls else ""
    trainable = f"{summary.trainable_calls} trainable"
    facts: list[tuple[str, object]] = [
        ("trajectory", info.id),
        ("name", info.name),
        ("started", f"{started}, {ago(now - info.started_at)} ago{took}"),
        ("identity", info.origin),
        ("user", info.user_id),
        ("session", info.session_id),
        ("task", info.scenario_key),
        ("tags", ", ".join(info.tags)),
        ("metadata", json.dumps(dict(info.metadata)) if info.metadata else None),
        ("group", _group(bundle)),
        ("calls", f"{summary.calls} ({trainable}, {summary.failed_calls} failed) by {', '.join(summary.policies)}"
                  if summary.calls else "none"),
        ("tokens", f"{summary.prompt_tokens:,} in, {summary.completion_tokens:,} out"),
        ("reward", None if summary.reward is None else f"{summary.reward:.3g}"),
    ]  # fmt: skip
    for name, value in facts:
        if value not in (None, ""):
            table.add_row(name, Text(one_line(value)))
    if info.error:
        table.add_row("failed", Text(one_line(info.error), style="red"))
    for score in bundle.trajectory.scores:
        by = one_line(score.judge or score.source)
        line = Text(f"{one_line(score.name)} {score.value:.3g}", style="bold").append(
            f"  by {by}", style="not bold dim"
        )
        if score.comment:
            line.append("\n" + visible(score.comment), style="not bold")
        table.add_row("score", line)
    for correction in bundle.corrections:
        of_call = "" if correction.call_id is None else f"of call {one_line(correction.call_id)}, "
        line = Text("it should have been", style="bold").append(
            f"  {of_call}by {one_line(correction.source)}", style="not bold dim"
        )
        said = [_content(correction.message.get("content") or ""), correction.comment or ""]
        said[1:1] = [_tool_call(call) for call in correction.message.get("tool_calls") or ()]
        line.append("".join(f"\n{visible(part)}" for part in said if part), style="not bold")
        table.add_row("correction", line)
    page.console.print(table)


def _group(bundle: Bundle) -> str | None:
    info, group = bundle.trajectory.info, bundle.group
    if group is None:
        return info.group_key
    held_out = ", held out" if group["held_out"] else ""
    return f"{group['id']} ({group['scenario_key']}, by {group['how']}, {group['state']}{held_out})"


def _print_call(page: _Page, bundle: Bundle, number: int, call: Call, said: list[list[bytes]]) -> None:
    """Print what the call adds to what was said before it, and add it to that."""
    from art_patch.trajectories import canonical

    prompt = [canonical(message) for message in call.messages]
    shared, before = max(((_shared(prompt, other), len(other)) for other in said), default=(0, 0))
    answer = [canonical(call.choices[0].message)] if call.choices else []
    said.append(prompt + answer)
    page.console.print()
    page.console.print(Rule(_head(number, call), align="left", style="dim", characters="\u2500"))
    span = next((span.name for span in bundle.spans if span.id == call.span_id), None)
    page.note(_metrics(call) + (f"  in {one_line(span)}" if span else ""))
    for reason, style in ((call.error, "red"), (call.fallback and f"fell back: {call.fallback}", "yellow")):
        if reason:
            page.note(one_line(reason), style)
    if call.untrainable:
        page.note(f"not trainable: {one_line(call.untrainable)}")
    if shared and shared < before:
        page.note(f"goes on after message {shared} of what was said before")
    elif number > 1 and not shared and prompt:
        page.note("another conversation")
    if call.tools and number == 1:
        page.note(f"tools: {', '.join(_tool_name(tool) for tool in call.tools)}")
    for message in call.messages[shared:]:
        page.message(message)
    if page.tokens:
        ids = call.prompt_token_ids
        page.note(f"prompt: {'token ids are not known' if ids is None else f'{len(ids):,} token ids'}")
    for choice in call.choices:
        label = "" if len(call.choices) == 1 else f"assistant, answer {choice.index + 1} of {len(call.choices)}"
        page.message(choice.message, label)
        if page.tokens:
            page.note(_token_metrics(choice))
    if not call.choices:
        page.note("no answer")


def _shared(prompt: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many messages both begin with."""
    shared = 0
    while shared < min(len(prompt), len(other)) and prompt[shared] == other[shared]:
        shared += 1
    return shared


def _head(number: int, call: Call) -> Text:
    by = one_line(call.policy or "upstream")
    return Text(f"call {number}", style="bold").append(f"  {by}", style="not bold")


def _metrics(call: Call) -> str:
    parts = [one_line(call.requested_model) if call.policy is None else f"asked for {one_line(call.requested_model)}"]
    if call.status != "ok":
        parts.append(call.status)
    ends = {one_line(choice.finish_reason or "cut") for choice in call.choices}
    parts += sorted(ends)
    if call.prompt_tokens or call.completion_tokens:
        parts.append(f"{call.prompt_tokens:,} + {call.completion_tokens:,} tokens")
    if call.duration_ms:
        first = f" (first token {seconds(call.ttft_ms / 1000)})" if call.ttft_ms is not None else ""
        parts.append(seconds(call.duration_ms / 1000) + first)
    named = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "n", "seed")
    parts += [f"{name} {call.params[name]}" for name in named if call.params.get(name) is not None]
    return one_line(" \u00b7 ".join(parts))


def _token_metrics(choice: Choice) -> str:
    if choice.token_ids is None:
        return "answer: token ids are not known"
    words = f"answer: {len(choice.token_ids):,} token ids"
    finite = [value for value in choice.logprobs or () if math.isfinite(value)]
    if not finite:
        return f"{words}, no log-probabilities"
    mean = sum(finite) / len(finite)
    return f"{words}, log-probability mean {mean:.3f}, lowest {min(finite):.3f}, perplexity {math.exp(-mean):.2f}"


def _tool_name(tool: JSON) -> str:
    function: Any = tool.get("function", tool)
    return one_line(cast(JSON, function).get("name", "?") if isinstance(function, Mapping) else "?")


def _tool_call(call: Any) -> str:
    pairs = cast(JSON, call) if isinstance(call, Mapping) else {}
    function: Any = pairs.get("function") or pairs.get("custom") or {}
    inner = cast(JSON, function) if isinstance(function, Mapping) else {}
    arguments: Any = inner.get("arguments", inner.get("input", ""))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f"\u2192 {inner.get('name', '?')}({text})  {pairs.get('id') or ''}".rstrip()


def words_of(message: JSON) -> str:
    """Return what a message says, and which tools it calls, as plain text; not yet safe to show."""
    said = [_content(message.get("content") or "")]
    said += [_tool_call(call) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in said if part)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for part in cast("Sequence[Any]", content) if isinstance(content, Sequence) else (content,):
        pairs = cast(JSON, part) if isinstance(part, Mapping) else {}
        text = pairs.get("text")
        parts.append(text if isinstance(text, str) else f"[{pairs.get('type', '?')}] {json.dumps(part)[:200]}")
    return "\n".join(parts)


def _cut(text: str) -> tuple[str, int]:
    kept = "\n".join(text[:_LONGEST].split("\n")[:_LINES])
    left = len(text) - len(kept)
    return (kept, left) if left > _LONGEST // 10 else (text, 0)
