"""Prints a trajectory on a terminal: its facts and scores, the tree of its steps, and the messages of each call."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text
from rich.tree import Tree

from art_patch import formats, insights, store
from art_patch.cli.output import ago, grid, one_line, seconds, visible
from art_patch.trajectories import canonical
from art_patch.types import JSON, Call, Choice, Score, SpanInfo

_LONGEST_TEXT = 1_500  # characters of a message
_LINES = 24
_LONGEST_VALUE = 200  # characters of a step's input or output
_REMEMBERED = 50  # calls of a session
_COLOURS = {"system": "magenta", "developer": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


@dataclass(frozen=True, slots=True)
class Page:
    """The console, and whether to print long texts in `full`, messages as `raw` JSON, and numbers of `tokens`."""

    console: Console
    full: bool = False
    raw: bool = False
    tokens: bool = False

    def message(self, message: JSON, label: str = "") -> None:
        """Print a message under a heading, which is `label` if given, else the role of the message."""
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
            self._text(insights.content_words(message["content"]))
        for call in insights.tool_calls_of(message):
            self._text(insights.tool_call_words(call), style="yellow")
        # Said, because an empty answer is often the fault that one looks for.
        if not (message.get("content") or message.get("tool_calls")):
            self._text("(nothing)", style="dim")

    def note(self, words: str, style: str = "dim") -> None:
        """Print an indented line that adds something to the message printed before it."""
        self.console.print(Padding(Text(words, style=style), (0, 0, 0, 2)))

    def _text(self, text: str, style: str = "") -> None:
        kept = text if self.full else "\n".join(text[:_LONGEST_TEXT].split("\n")[:_LINES])
        left = len(text) - len(kept)
        if left <= _LONGEST_TEXT // 10:  # not worth a note that text is missing
            kept, left = text, 0
        self.console.print(Padding(Text(visible(kept), style=style), (0, 0, 0, 2)))
        if left:
            self.note(f"... {left:,} more characters; --full shows them")


def print_trajectory(page: Page, bundle: formats.Bundle, summary: store.Summary) -> None:
    """Print a trajectory with its scores, steps and calls."""
    _print_facts(page, bundle, summary, time.time())
    if bundle.spans:
        page.console.print()
        page.console.print(steps_tree(bundle.spans, bundle.trajectory.calls, full=page.full, raw=page.raw))
    said: list[list[bytes]] = []
    for number, call in enumerate(bundle.trajectory.calls, 1):
        _print_call(page, bundle, number, call, said)
    if not bundle.trajectory.calls:
        page.console.print()
        page.note("no call was recorded")


def print_session(
    page: Page,
    session: str,
    bundles: Sequence[formats.Bundle],
    summaries: Mapping[str, store.Summary],
    *,
    matching: int,
) -> None:
    """Print what the user of a session said and was answered in these runs, each under its time, policy and scores."""
    users = sorted({bundle.trajectory.info.user_id for bundle in bundles} - {None, ""}, key=str)
    head = Text(f"session {one_line(session)}", style="bold")
    page.console.print(head.append(f"  {', '.join(map(one_line, users))}", style="not bold") if users else head)
    said: list[list[bytes]] = []
    for bundle in bundles:
        info, summary = bundle.trajectory.info, summaries[bundle.trajectory.id]
        page.console.print()
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.started_at))
        by = ", ".join(map(one_line, summary.policies)) or "nobody"
        reward = "no reward" if summary.reward is None else f"reward {summary.reward:.3g}"
        head = Text(f"{began}  {by}", style="bold").append(f"  {reward}", style="not bold")
        page.console.print(Rule(head, align="left", style="dim", characters="\u2500"))
        page.note(f"run {one_line(info.id)}" + (f"  {one_line(info.name)}" if info.name else ""))
        for score in bundle.trajectory.scores:
            page.console.print(Padding(_score(score), (0, 0, 0, 2)))
        for call in bundle.trajectory.calls:
            for message in _new_messages(call, said):
                if message.get("role") in ("user", "assistant"):
                    page.message(message)
            if call.error:
                page.note(one_line(call.error), "red")
            if call.fallback:
                page.note(f"fell back: {one_line(call.fallback)}", "yellow")
        if info.error:
            page.note(f"failed: {one_line(info.error)}", "red")
    if len(bundles) < matching:
        page.console.print()
        page.note(f"the newest {len(bundles)} of {matching} runs")


def _new_messages(call: Call, said: list[list[bytes]]) -> list[JSON]:
    """Return what the call adds to the session, its first answer included, and remember its conversation in `said`."""
    messages = [*call.messages, *(choice.message for choice in call.choices[:1])]
    conversation = [canonical(message) for message in messages]
    shared, _ = insights.said_before(conversation, said)
    answers = (place for place, message in enumerate(call.messages, 1) if message.get("role") == "assistant")
    # A question that is asked again is new, and the older messages of an app that forgets the first ones are not.
    asked = max(answers, default=0) if said else 0
    said.append(conversation)
    del said[:-_REMEMBERED]
    return messages[min(shared, asked) if shared else asked :]


def _print_facts(page: Page, bundle: formats.Bundle, summary: store.Summary, now: float) -> None:
    info = bundle.trajectory.info
    table = grid("dim", "")
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.started_at))
    took = f"; took {seconds(summary.duration_s)}" if summary.calls else ""
    trainable = f"{summary.trainable_calls} trainable, {summary.failed_calls} failed"
    calls = f"{summary.calls} ({trainable}) by {', '.join(summary.policies)}" if summary.calls else "none"
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
        ("calls", calls),
        ("tokens", f"{summary.prompt_tokens:,} in, {summary.completion_tokens:,} out"),
        ("reward", None if summary.reward is None else f"{summary.reward:.3g}"),
    ]
    for name, value in facts:
        if value not in (None, ""):
            table.add_row(name, Text(one_line(value)))
    if info.error:
        table.add_row("failed", Text(one_line(info.error), style="red"))
    for score in bundle.trajectory.scores:
        table.add_row("score", _score(score))
    for correction in bundle.corrections:
        of_call = "" if correction.call_id is None else f"of call {one_line(correction.call_id)}, "
        by = f"  {of_call}by {one_line(correction.source)}"
        line = Text("it should have been", style="bold").append(by, style="not bold dim")
        said = filter(None, (insights.words_of(correction.message), correction.comment))
        line.append("".join(f"\n{visible(part)}" for part in said), style="not bold")
        table.add_row("correction", line)
    page.console.print(table)


def _score(score: Score) -> Text:
    by = f"  by {one_line(score.judge or score.source)}"
    line = Text(f"{one_line(score.name)} {score.value:.3g}", style="bold").append(by, style="not bold dim")
    return line.append("\n" + visible(score.comment), style="not bold") if score.comment else line


def _group(bundle: formats.Bundle) -> str | None:
    info, group = bundle.trajectory.info, bundle.group
    if group is None:
        return info.group_key
    held_out = ", held out" if group["held_out"] else ""
    return f"{group['id']} ({group['scenario_key']}, by {group['how']}, {group['state']}{held_out})"


# --- calls ---


def _print_call(page: Page, bundle: formats.Bundle, number: int, call: Call, said: list[list[bytes]]) -> None:
    """Print the messages of the call that no earlier call has, and append the call's conversation to `said`."""
    prompt = [canonical(message) for message in call.messages]
    shared, before = insights.said_before(prompt, said)
    answer = [canonical(call.choices[0].message)] if call.choices else []
    said.append(prompt + answer)
    page.console.print()
    head = Text(f"call {number}", style="bold").append(f"  {one_line(call.policy or 'upstream')}", style="not bold")
    page.console.print(Rule(head, align="left", style="dim", characters="\u2500"))
    span = next((span.name for span in bundle.spans if span.id == call.span_id), None)
    page.note(_metrics(call) + (f"  in {one_line(span)}" if span else ""))
    for prefix, reason, style in (
        ("", call.error, "red"), ("fell back: ", call.fallback, "yellow"), ("not trainable: ", call.untrainable, "dim"),
    ):  # fmt: skip
        if reason:
            page.note(prefix + one_line(reason), style)
    if shared and shared < before:
        page.note(f"goes on after message {shared} of what was said before")
    elif number > 1 and not shared and prompt:
        page.note("another conversation")
    # Once: an agent offers the same tools with each call.
    if call.tools and number == 1:
        page.note(f"tools: {', '.join(one_line(insights.tool_name(tool)) for tool in call.tools)}")
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


def _metrics(call: Call) -> str:
    parts = [one_line(call.requested_model) if call.policy is None else f"asked for {one_line(call.requested_model)}"]
    if call.status != "ok":
        parts.append(call.status)
    # An answer without a finish reason was cut: the stream ended early.
    parts += sorted({one_line(choice.finish_reason or "cut") for choice in call.choices})
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
    mean = insights.logprob_mean(choice)
    if mean is None:
        return f"{words}, no log-probabilities"
    finite = [value for value in choice.logprobs or () if math.isfinite(value)]
    return f"{words}, log-probability mean {mean:.3f}, lowest {min(finite):.3f}, perplexity {math.exp(-mean):.2f}"


# --- the tree of steps ---


def steps_tree(spans: Sequence[SpanInfo], calls: Sequence[Call], *, full: bool = False, raw: bool = False) -> Tree:
    """Return the spans and calls of a trajectory as a tree; the children of a span are in the order of their start.

    Each span and each call is in the tree once, as `insights.steps_of` has them.
    """
    root = Tree(Text("steps", style="bold"), guide_style="dim")
    branches = [root]
    for step in insights.steps_of(spans, calls):
        if step.span is not None:
            label = _step(step.span, full=full, raw=raw)
        else:
            number = step.call or 0
            label = _step_call(number, calls[number - 1])
        branches[step.depth + 1 :] = [branches[step.depth].add(label)]
    return root


def _step(span: SpanInfo, *, full: bool, raw: bool) -> Text:
    label = Text("" if span.kind == "span" else f"{span.kind} ", style="yellow" if span.kind == "tool" else "cyan")
    label.append(one_line(span.name), style="not dim bold")
    ended = "has not ended" if span.ended_at is None else seconds(max(span.ended_at - span.started_at, 0.0))
    label.append(f"  {ended}", style="dim")
    if span.error is not None:
        label.append(f"\nfailed: {_value(span.error, full)}", style="red")
    if raw:
        lines = [visible(json.dumps(dict(span.attributes), indent=2))] if span.attributes else []
    else:
        # Input and output first, whatever the order in which a framework reports attributes.
        names = sorted(span.attributes, key=lambda name: {"input": 0, "output": 1}.get(name, 2))
        lines = [f"{one_line(name)}: {_value(span.attributes[name], full)}" for name in names]
    for line in lines:
        label.append(f"\n{line}", style="default")
    return label


def _step_call(number: int, call: Call) -> Text:
    label = Text(f"call {number}").append(f"  {one_line(call.policy or 'upstream')}", style="dim")
    return label if call.status == "ok" else label.append(f"  {call.status}", style="red")


def _value(value: object, full: bool) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if full:
        return visible(text)
    left = len(text) - _LONGEST_VALUE
    if left <= _LONGEST_VALUE // 10:  # not worth a note that text is missing
        return one_line(text)
    return f"{one_line(text[:_LONGEST_VALUE])} ... {left:,} more characters; --full shows them"
