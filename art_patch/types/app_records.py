"""What the app's own threads make or read. `patch()` makes these classes, so they are few: each costs a millisecond."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

JSON = Mapping[str, Any]

CallStatus = Literal["ok", "error", "cancelled", "abandoned"]
Origin = Literal["explicit", "otel", "stitched", "single", "shadow", "imported", "resampled", "span"]

COPIES: tuple[Origin, ...] = ("shadow", "resampled", "span")
"""Origins of trajectories that the app never ran: made from calls of others, which their calls name in `shadow_of`."""

REPLAY = "replay"
"""Name in a run's metadata of the function that runs it again. Only `replayable()` writes it: data never names code."""
SpanKind = Literal["span", "agent", "node", "tool", "handoff", "guardrail", "retrieval"]
Mode = Literal["off", "record", "shadow", "canary", "route"]
Api = Literal["chat", "completions", "responses"]
PolicyState = Literal["candidate", "shadow", "canary", "champion", "retired", "rejected"]

UPSTREAM = None
"""`Call.policy` of an answer that came from the provider the app was written for."""


@dataclass(frozen=True, slots=True)
class TrajectoryInfo:
    """What is known of a trajectory besides its calls. Written again with `ended_at` when it ends.

    Attributes:
        id: uuid7 hex, the caller's own id, or the trace id of an OpenTelemetry trace.
        started_at: start of the first call or of the `trajectory()` block.
        origin: how its identity was found: `explicit`, `otel`, `stitched` (a call extends an earlier one), `single`;
            `shadow` holds one call that the app never saw; `imported` came from a file of another tool; `resampled`
            holds one turn of another run, answered again; `span` is the part of another run below one of its spans.
        ended_at: end of the `trajectory()` block; `None` for the other origins, which end by falling silent.
        name: given by the user.
        scenario_key: given by the user: trajectories with one key are the same task.
        group_key: given by `group()`: trajectories with one key are siblings.
        session_id: given by the user.
        user_id: given by the user.
        tags: given by the user.
        metadata: given by the user, JSON values only.
        error: the exception that ended the block.
    """

    id: str
    started_at: float
    origin: Origin = "single"
    ended_at: float | None = None
    name: str | None = None
    scenario_key: str | None = None
    group_key: str | None = None
    session_id: str | None = None
    user_id: str | None = None
    tags: tuple[str, ...] = ()
    metadata: JSON = field(default_factory=dict[str, Any])
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SpanInfo:
    """A named part of a trajectory, nested by `parent_id`. Written again, with its result, when it ends.

    Attributes:
        id: uuid7 hex, or the framework's own id of the step.
        trajectory_id: what it is a part of.
        name: of the node, the tool, the agent.
        started_at: when, seconds since the epoch.
        parent_id: the span around it.
        ended_at: when.
        kind: what it is in an agent framework; a plain `span` says nothing of it.
        attributes: JSON values; `input` and `output` of a tool, anything else that the framework tells.
        error: the exception that ended it.
    """

    id: str
    trajectory_id: str
    name: str
    started_at: float
    parent_id: str | None = None
    ended_at: float | None = None
    kind: SpanKind = "span"
    attributes: JSON = field(default_factory=dict[str, Any])
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """One judgement of one trajectory. Scores of different names and sources stand side by side.

    Attributes:
        id: uuid7 hex or the caller's own id; writing the same id again replaces the score.
        trajectory_id: what was judged.
        name: `reward`, `ruler`, `thumbs`, ...
        value: a finite number; RULER gives 0..1.
        source: `user`, `code` or `ruler`.
        at: when.
        comment: the judge's explanation or the user's words.
        group_id: the group it was ranked in; RULER scores only mean something within one group.
        rubric: version of the rubric that was used.
        judge: model that judged.
    """

    id: str
    trajectory_id: str
    name: str
    value: float
    source: str
    at: float
    comment: str | None = None
    group_id: str | None = None
    rubric: str | None = None
    judge: str | None = None


@dataclass(frozen=True, slots=True)
class Correction:
    """What an answer should have been. Never trained on by GRPO; it feeds SFT and preference pairs.

    Attributes:
        id: uuid7 hex or the caller's own id; writing the same id again replaces the correction.
        trajectory_id: the run that went wrong.
        at: when.
        source: `user` or `code`.
        message: the right assistant message, as OpenAI JSON.
        call_id: the call whose answer is corrected; `None` means the run's last one.
        comment: why.
    """

    id: str
    trajectory_id: str
    at: float
    source: str
    message: JSON
    call_id: str | None = None
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """Where calls go, read from the store while the app runs.

    Attributes:
        mode: one of `Mode`; `None` if the store does not overrule the app's own setting.
        canary_percent: share of sessions in mode `canary`; `None` if the store does not overrule the app's own.
        champion: policy that serves.
        base_url: OpenAI-compatible address of the engine, ending in `/v1`.
        key_file: file that holds the engine's API key; `None` on loopback without a key.
        engine_since: when the engine announced itself; another time is another engine, even at the same address.
        challenger: policy that is tested beside the champion, if one is.
        challenger_state: `shadow`, it is asked in the background; `canary`, it answers a share of the sessions.
        challenger_percent: which share, 0..100, of the sessions that a policy answers; only for `canary`.
        challenger_since: when it came into that state.
        project: whose store it is; `None` if it was made by a release that did not write that down.
    """

    mode: Mode | None = None
    champion: str | None = None
    base_url: str | None = None
    key_file: str | None = None
    canary_percent: float | None = None
    engine_since: float | None = None
    challenger: str | None = None
    challenger_state: Literal["shadow", "canary"] | None = None
    challenger_percent: float | None = None
    challenger_since: float | None = None
    project: str | None = None

    @property
    def serves(self) -> bool:
        """Whether a champion is served somewhere."""
        return self.champion is not None and self.base_url is not None
