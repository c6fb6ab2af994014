"""Runs as rows of two tables: one row a run, newest first, and one row a tool. Pure; knows no tracker.

A cell is a number, a text, `True`, `False` or `None`. Cells hold texts of people and models only with `content`.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeAlias

from art_patch.otel import input_messages, output_messages
from art_patch.trackers.episodes import Episode

Cell: TypeAlias = str | float | bool | None

EPISODE_COLUMNS = (
    "trajectory", "name", "started", "duration_s", "policies", "calls", "prompt_tokens", "completion_tokens",
    "tool_calls", "reward", "failed", "error", "task", "session", "user", "tags",
)  # fmt: skip
CONTENT_COLUMNS = ("input", "output")
"""Of the last call, as OpenTelemetry's GenAI conventions write messages."""

ACTION_COLUMNS = (
    "tool", "times", "share", "runs", "results", "failed_results", "success_share", "mean_reward",
)  # fmt: skip
"""Results come from spans of the kind `tool`, which a framework or the app reported; the reward is the mean of the runs
that asked for the tool. A rate or mean of nothing is `None`."""


def episode_row(episode: Episode, *, content: bool) -> tuple[Cell, ...]:
    """Return a run in the order of `EPISODE_COLUMNS`, with `CONTENT_COLUMNS` if asked for."""
    info, calls = episode.trajectory.info, episode.trajectory.calls
    row: tuple[Cell, ...] = (
        info.id,
        info.name,
        datetime.fromtimestamp(info.started_at, UTC).isoformat(timespec="seconds"),
        round(episode.ended_at - info.started_at, 3),
        ", ".join(sorted({call.policy or "upstream" for call in calls})),
        len(calls),
        sum(call.prompt_tokens for call in calls),
        sum(call.completion_tokens for call in calls),
        episode.actions.total(),
        episode.reward,
        episode.failed,
        info.error or next((call.error for call in calls if call.error), None),
        info.scenario_key,
        info.session_id,
        info.user_id,
        ", ".join(info.tags),
    )
    if not content:
        return row
    said = (input_messages(calls[-1]), output_messages(calls[-1])) if calls else (None, None)
    return (*row, *(None if some is None else json.dumps(some, ensure_ascii=False) for some in said))


class ActionTable:
    """Counts what the agent did, run by run."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self._times, self._runs = Counter[str](), Counter[str]()
        self._results, self._failed = Counter[str](), Counter[str]()
        self._rewards: dict[str, list[float]] = defaultdict(list)

    def add(self, episode: Episode) -> None:
        """Count a run."""
        asked = episode.actions
        self._times.update(asked)
        self._runs.update(asked.keys())
        for name in asked if episode.reward is not None else ():
            self._rewards[name].append(episode.reward or 0.0)
        # A tool that was still at work when the run ended has no result.
        done = [span for span in episode.trajectory.spans if span.kind == "tool" and span.ended_at is not None]
        self._results.update(span.name for span in done)
        self._failed.update(span.name for span in done if span.error is not None)

    def rows(self) -> list[tuple[Cell, ...]]:
        """Return the tools in the order of `ACTION_COLUMNS`, most frequent first."""
        # Tools may have results without having been asked for by a model: the app called them itself.
        names = sorted({*self._times, *self._results}, key=lambda name: (-self._times[name], name))
        return [self._row(name) for name in names]

    def _row(self, name: str) -> tuple[Cell, ...]:
        total, results, failed = self._times.total(), self._results[name], self._failed[name]
        return (
            name,
            self._times[name],
            self._times[name] / total if total else None,
            self._runs[name],
            results,
            failed,
            (results - failed) / results if results else None,
            _mean(self._rewards.get(name, ())),
        )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
