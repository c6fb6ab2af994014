"""The steps of a trajectory as a tree on a terminal: agents, nodes, tools and what came of them, calls in their places.

In: spans and calls, in any order. Out: a tree for rich; each span and each call stands in it once, below the step that
it was made in, in the order in which they started. What is below an unknown step is below the root, and so is what a
broken record put below itself.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree

from art_patch.cli.views.output import seconds
from art_patch.cli.views.safe_text import one_line, visible
from art_patch.types import Call, SpanInfo

_LONGEST = 200  # characters of what went in or came out


def steps_tree(spans: Sequence[SpanInfo], calls: Sequence[Call], *, full: bool = False, raw: bool = False) -> Tree:
    """Return the tree.

    Args:
        spans: of the trajectory.
        calls: of the trajectory; they are numbered as they come.
        full: long texts to their end.
        raw: attributes as the JSON that was recorded.
    """
    known = {span.id for span in spans}
    below: dict[str | None, list[tuple[float, SpanInfo | None, Text]]] = defaultdict(list)
    for span in spans:
        above = span.parent_id if span.parent_id in known else None
        below[above].append((span.started_at, span, _step(span, full=full, raw=raw)))
    for number, call in enumerate(calls, 1):
        above = call.span_id if call.span_id in known else None
        below[above].append((call.started_at, None, _call(number, call)))
    root = Tree(Text("steps", style="bold"), guide_style="dim")
    below.setdefault(None, [])
    while below:  # more than once only if steps stand below themselves
        waiting: list[tuple[Tree, str | None]] = [(root, next(iter(below)) if None not in below else None)]
        while waiting:
            branch, key = waiting.pop()
            for _, span, label in sorted(below.pop(key, ()), key=lambda one: one[0]):
                added = branch.add(label)
                if span is not None:
                    waiting.append((added, span.id))
    return root


def _step(span: SpanInfo, *, full: bool, raw: bool) -> Text:
    label = Text("" if span.kind == "span" else f"{span.kind} ", style="yellow" if span.kind == "tool" else "cyan")
    label.append(one_line(span.name), style="not dim bold")
    ended = "has not ended" if span.ended_at is None else seconds(max(span.ended_at - span.started_at, 0.0))
    label.append(f"  {ended}", style="dim")
    if span.error is not None:
        label.append(f"\nfailed: {_cut(span.error, full)}", style="red")
    if raw:
        told = [visible(json.dumps(dict(span.attributes), indent=2))] if span.attributes else []
    else:
        first = [name for name in ("input", "output") if name in span.attributes]
        rest = [name for name in span.attributes if name not in first]
        told = [f"{one_line(name)}: {_cut(span.attributes[name], full)}" for name in (*first, *rest)]
    for text in told:
        label.append(f"\n{text}", style="default")
    return label


def _call(number: int, call: Call) -> Text:
    label = Text(f"call {number}").append(f"  {one_line(call.policy or 'upstream')}", style="dim")
    return label if call.status == "ok" else label.append(f"  {call.status}", style="red")


def _cut(value: object, full: bool) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if full:
        return visible(text)
    left = len(text) - _LONGEST
    if left <= _LONGEST // 10:
        return one_line(text)
    return f"{one_line(text[:_LONGEST])} ... {left:,} more characters; --full shows them"
