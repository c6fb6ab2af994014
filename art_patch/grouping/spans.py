"""Sibling spans: attempts at one task within one run, such as best of n under one parent span.

They are siblings if they have the same parent, the same name and the same beginning: the first call of each holds the
same prompt, volatile parts masked. Parallel work on different tasks, and attempts that know of earlier ones, begin
differently. Each becomes a trajectory of its own, a copy of the calls below the span; a copy names its original in
`Call.shadow_of`, so that erasing the one erases the other.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from art_patch.grouping.masks import normalise
from art_patch.grouping.scenario import digest, tools_key
from art_patch.trajectories import number_tool_calls
from art_patch.types import Call, SpanInfo, Trajectory, TrajectoryInfo


def sibling_spans(
    trajectory: Trajectory, *, new_id: Callable[[], str], is_useful: Callable[[Trajectory], bool]
) -> Iterator[tuple[str, list[Trajectory]]]:
    """Yield `(name and beginning, the attempts as trajectories)`; no call is in two of them.

    Args:
        trajectory: a run with its spans.
        new_id: makes ids.
        is_useful: whether an attempt is worth anything as a sibling.
    """
    inside = _calls_inside(trajectory)
    alike: dict[tuple[str | None, str, str], list[SpanInfo]] = defaultdict(list)
    for span in trajectory.spans:
        if calls := inside[span.id]:
            alike[span.parent_id, span.name, _beginning(calls[0])].append(span)
    used: set[str] = set()
    # Outer attempts first: what an inner span tells of them would be told twice.
    for (_, name, beginning), spans in sorted(alike.items(), key=lambda item: -len(inside[item[1][0].parent_id or ""])):
        attempts = [
            (attempt, {call.id for call in inside[span.id]})
            for span in spans
            if is_useful(attempt := _derived(trajectory.info, span, inside[span.id], new_id))
        ]
        if len(attempts) >= 2 and not any(used & ids for _, ids in attempts):
            used.update(*(ids for _, ids in attempts))
            yield f"{name}#{beginning}", [attempt for attempt, _ in attempts]


def _calls_inside(trajectory: Trajectory) -> dict[str, list[Call]]:
    """The calls below each span, in order; below `""` all."""
    parents = {span.id: span.parent_id for span in trajectory.spans}
    inside: dict[str, list[Call]] = defaultdict(list)
    for call in trajectory.calls:
        inside[""].append(call)
        above, seen = call.span_id, set[str]()
        while above is not None and above not in seen:  # a loop is possible in what other tools wrote
            seen.add(above)
            inside[above].append(call)
            above = parents.get(above)
    return inside


def _beginning(call: Call) -> str:
    prompt = json.dumps(number_tool_calls(call.messages), sort_keys=True, ensure_ascii=False, default=repr)
    return digest([normalise(prompt), tools_key(call)])[:16]


def _derived(source: TrajectoryInfo, span: SpanInfo, calls: list[Call], new_id: Callable[[], str]) -> Trajectory:
    key = new_id()
    info = TrajectoryInfo(
        key,
        span.started_at,
        "span",
        ended_at=span.ended_at,
        name=span.name,
        session_id=source.session_id,
        user_id=source.user_id,
        tags=source.tags,
    )
    copies = (replace(c, id=new_id(), trajectory_id=key, span_id=None, shadow_of=c.id) for c in calls)
    return Trajectory(info, tuple(copies))
