"""A run as a person reads it: its steps as a tree, what each call adds to what was said before, messages as words.

And a group of runs: its siblings with their scores, and what its state and the way in which it was found mean.

What providers and frameworks recorded may have any shape, and spans may be damaged: nothing here raises for it. Texts
are returned as they were recorded; whoever shows them makes them harmless.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from operator import eq
from typing import Any, cast

from art_patch import store
from art_patch.types import JSON, Call, Choice, SpanInfo

# --- steps ---

_Started = tuple[float, SpanInfo | None, int | None]  # when a step began, and its span or the number of its call


@dataclass(frozen=True, slots=True)
class Step:
    """A span, or a call, in the tree of a run's steps; `depth` is 0 for those at the top."""

    depth: int
    span: SpanInfo | None = None
    call: int | None = None  # number of the call, from 1; `None` for a span


def steps_of(spans: Sequence[SpanInfo], calls: Sequence[Call]) -> Iterator[Step]:
    """Yield the spans and calls of a run, each before those inside it; the children of a span in order of their start.

    Each span and each call comes once, below its parent span. It is at the top if its parent is unknown, or if a
    damaged record makes a span its own ancestor. Calls are numbered in the order of `calls`.
    """
    known = {span.id for span in spans}
    below: dict[str | None, list[_Started]] = defaultdict(list)
    for span in spans:
        below[span.parent_id if span.parent_id in known else None].append((span.started_at, span, None))
    for number, call in enumerate(calls, 1):
        below[call.span_id if call.span_id in known else None].append((call.started_at, None, number))
    below.setdefault(None, [])
    # A second round is needed only for spans that are their own ancestors: no walk from the top reaches them.
    while below:
        waiting = [(0, each) for each in _by_start(below.pop(None if None in below else next(iter(below))))]
        while waiting:
            depth, (_, span, number) = waiting.pop()
            yield Step(depth, span, number)
            if span is not None:
                waiting += [(depth + 1, each) for each in _by_start(below.pop(span.id, []))]


def _by_start(steps: list[_Started]) -> list[_Started]:
    """Return the steps with the first one last, as they are taken from a stack."""
    return sorted(steps, key=lambda step: step[0])[::-1]


# --- what was said ---


def said_before(prompt: Sequence[bytes], said: Sequence[Sequence[bytes]]) -> tuple[int, int]:
    """Return how many messages of a prompt were said before, and the length of the conversation that it goes on.

    Messages are in canonical form (`trajectories.canonical`). An agent sends the whole conversation with each call.
    Sub-agents branch off, so any earlier conversation of `said` may be the one that the prompt continues: the one with
    the longest common beginning.
    """
    return max(((sum(takewhile(bool, map(eq, prompt, other))), len(other)) for other in said), default=(0, 0))


def logprob_mean(choice: Choice) -> float | None:
    """Return the mean log-probability of an answer's tokens; `None` if none is known.

    Engines give -inf for tokens that sampling had excluded; a mean over them says nothing, so they are left out.
    """
    finite = [value for value in choice.logprobs or () if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


# --- messages as words ---


def words_of(message: JSON) -> str:
    """Return a message's text and tool calls as plain text. Pass it to `visible` before showing it."""
    said = [content_words(message.get("content") or ""), *map(tool_call_words, tool_calls_of(message))]
    return "\n".join(filter(None, said))


def content_words(content: Any) -> str:
    """Return the content of a message as text: a text, or parts."""
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for part in cast("Sequence[Any]", content) if isinstance(content, Sequence) else (content,):
        pairs = pairs_of(part)
        text = pairs.get("text")
        # An image or a sound is shown by its type and the beginning of its JSON.
        parts.append(text if isinstance(text, str) else f"[{pairs.get('type', '?')}] {json.dumps(part)[:200]}")
    return "\n".join(parts)


def tool_calls_of(message: JSON) -> Sequence[Any]:
    """Return the tool calls of a message."""
    calls: Any = message.get("tool_calls")
    return cast("Sequence[Any]", calls) if isinstance(calls, list | tuple) else ()


def tool_call_parts(call: Any) -> tuple[str, str, str]:
    """Return the name of the called tool, its arguments as text, and the call's id; `""` for no id."""
    pairs = pairs_of(call)
    inner = pairs_of(pairs.get("function") or pairs.get("custom"))
    arguments: Any = inner.get("arguments", inner.get("input", ""))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return str(inner.get("name", "?")), text, str(pairs.get("id") or "")


def tool_call_words(call: Any) -> str:
    """Return a tool call as one text: an arrow, `name(arguments)` and the id."""
    name, arguments, key = tool_call_parts(call)
    return f"\u2192 {name}({arguments})  {key}".rstrip()


def tool_name(tool: JSON) -> str:
    """Return the name of a tool that the app offered."""
    return str(pairs_of(tool.get("function", tool)).get("name", "?"))


def pairs_of(value: Any) -> JSON:
    """Return the value if it is a JSON object, else an empty one."""
    return cast("JSON", value) if isinstance(value, Mapping) else {}


# --- a group ---

WAYS: Mapping[str, str] = {
    "group_key": "art.group(key) was around them",
    "scenario_key": "trajectory(scenario=...) names their task",
    "sibling_spans": "attempts at one task within a run",
    "same_task": "asked in the same words",
    "near_duplicate": "asked in nearly the same words",
    "resampled": "a turn of a lone run, answered again",
    "branched": "a lone run, run again from one of its turns",
    "single": "one run, for the gate",
}
"""The ways in which siblings are found, the most certain first, with their description."""

STATES: Mapping[str, str] = {
    "formed": "the judge has not scored its siblings, as those of each held-out group",
    "scored": "an update may learn from it",
    "trained": "an update has learned from it",
    "dead": "it teaches nothing, so no update learns from it",
    "stale": "its answers are too old or too far for an update",
    "quarantined": "its scores are not believed, so no update learns from it",
    "spent": "it is used up and is not learned from",
}
"""State of a group -> what it means."""

_COPIED = "its run has copies that are siblings in other groups"


def state_in_words(state: str) -> str:
    """Return what a group's state means."""
    return STATES.get(state, _COPIED)


def way_in_words(how: str) -> str:
    """Return how a group's siblings were found."""
    return WAYS.get(how, "not known to this release")


def group_facts(
    opened: store.Store, one: store.GroupFacts, *, openings: bool = True, most: int | None = None
) -> dict[str, Any]:
    """Return a group with its siblings, their scores and the judgements.

    The scores are those that were given in this group, or by users and code, oldest first. `openings` adds the first
    words of the user, which is slow; at most `most` siblings are read.
    """
    runs = one.runs[:most]
    summaries = opened.browse.summaries(runs, openings=openings)
    scores = opened.groups.scores(runs)
    siblings: list[dict[str, Any]] = [
        {
            **asdict(each),
            "status": each.status,
            "scores": [asdict(score) for score in scores.get(each.id, ()) if score.group_id in (None, one.id)],
        }
        for each in summaries
    ]
    return asdict(one) | {"siblings": siblings}


def best_first(siblings: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the siblings of a group by their rewards, those without one first."""
    return sorted(map(dict, siblings), key=lambda run: (-2.0 if run["reward"] is None else -run["reward"], run["id"]))
