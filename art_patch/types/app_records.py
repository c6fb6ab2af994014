"""Records that are made or read by the app's own threads, inside `patch()` and the patched calls.

`patch()` loads this module in the app, and each class takes a millisecond to load. So records that the app's threads do
not need are in other modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

JSON = Mapping[str, Any]

# The store keeps these values as text. A new value needs no migration; one that is removed may still be in a store.
CallStatus = Literal["ok", "error", "cancelled", "abandoned"]
Origin = Literal["explicit", "otel", "stitched", "single", "shadow", "imported", "resampled", "span", "branch"]

COPIES: tuple[Origin, ...] = ("shadow", "resampled", "span", "branch")
"""Origins of trajectories that the app never ran. Their calls repeat or copy calls that they name in `shadow_of`."""

REPLAY = "replay"
"""Key in a run's metadata for the function that can repeat the run. Only `replayable()` may write it: imported data
must not name code that the job would run."""

REPLAY_OF = "replay_of"
"""Key in the metadata of a repeated run: the id of its original."""

REPLAY_FROM = "replay_from"
"""Key in the metadata of a repeated run that began at a turn of its original: the id of the call."""

SpanKind = Literal["span", "agent", "node", "tool", "handoff", "guardrail", "retrieval"]
Mode = Literal["off", "record", "shadow", "canary", "route"]
Api = Literal["chat", "completions", "messages", "responses"]
PolicyState = Literal["candidate", "learner", "shadow", "canary", "champion", "retired", "rejected"]

UPSTREAM = None  # `Call.policy` of an answer that came from the provider the app was written for

ENGINE_FULL = "the engine is full"
"""`Call.fallback` of a call that the engine had no room for. It tells nothing about the policy that was to answer."""
UNREACHABLE = "the engine cannot be reached"
"""Begin of `Call.fallback` of a call that found no engine. It tells nothing about the policy, either."""
LEFT_ALONE = "the engine failed repeatedly and is left alone for a moment"
"""`Call.fallback` while a circuit breaker is open: the champion's, or that of the policy under test."""
REFUSED = "the engine's address or key cannot be used"
"""`Call.fallback` in a process that may ask no policy at all, because of its own settings: nothing was assigned."""

LEARN_HEADER = "x-art-patch-learn"
"""Header of the app's call, for us alone: unless it says yes, nothing is learned from the call's run."""

WAIT_HEADER = "x-art-patch-wait"
"""Header of a request to the engine: how many seconds it may have to wait for its turn, else it is refused at once."""


@dataclass(frozen=True, slots=True)
class TrajectoryInfo:
    """The description of a trajectory without its calls.

    It is written before the trajectory's first call, score or correction, and again, with `ended_at`, when its block
    ends. A `trajectory()` in which nothing is recorded is not written.
    """

    id: str  # uuid7 hex, the caller's own id, or the trace id of an OpenTelemetry trace
    started_at: float  # start of the first call or of the `trajectory()` block
    # How the trajectory was identified. `explicit`: by a `trajectory()` block, an outermost `span()` or an integration.
    # `otel`: by an active trace. `stitched`: a call's prompt continues the conversation of an earlier call. `single`:
    # one call that belongs to no other. `shadow`: a copy of one call, made in the background. `imported`: read from a
    # file. `resampled`: a new answer to one turn of another run. `span`: a copy of the part of another run that is
    # inside one of its spans. `branch`: a copy of the part of another run that begins with one of its turns.
    origin: Origin = "single"
    # End of the block, or of an integration's run; `None` if there was none or it has not ended.
    ended_at: float | None = None
    name: str | None = None
    scenario_key: str | None = None  # trajectories with the same key are the same task
    group_key: str | None = None  # the key that the app gave to `group()`; trajectories with the same key are siblings
    session_id: str | None = None
    user_id: str | None = None
    tags: tuple[str, ...] = ()
    metadata: JSON = field(default_factory=dict[str, Any])
    error: str | None = None  # the exception that ended the block
    # Whether the run may be judged, asked again, used by the gate and trained on. Once it is false, it stays false.
    learn: bool = True


@dataclass(frozen=True, slots=True)
class SpanInfo:
    """A named part of a trajectory, nested by `parent_id`. It is written again, with its result, when it ends."""

    id: str  # uuid7 hex, or the framework's own id of the step
    trajectory_id: str
    name: str  # name of the node, the tool or the agent
    started_at: float
    parent_id: str | None = None
    ended_at: float | None = None
    # Role of the span in an agent framework, such as a tool or an agent; `span` if the framework gives none.
    kind: SpanKind = "span"
    # JSON values: `input` and `output` of a tool, and other data that the framework reports.
    attributes: JSON = field(default_factory=dict[str, Any])
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """One score of one trajectory. A trajectory may have several scores, with different names and sources."""

    id: str  # uuid7 hex or the caller's own id; writing the same id again replaces the score
    trajectory_id: str
    name: str  # `reward`, `ruler`, `thumbs` or any other name
    value: float  # a finite number; RULER's scores are between 0 and 1
    source: str  # `user`, `code`, `ruler`, or `combined` for a reward that was computed from other scores
    at: float
    comment: str | None = None  # the judge's explanation or the user's words
    # The group in which the judge ranked the trajectory or a reward was combined; `None` for scores of users and code.
    # RULER's scores can be compared within one group only.
    group_id: str | None = None
    rubric: str | None = None  # version of the rubric that the judge used
    judge: str | None = None


@dataclass(frozen=True, slots=True)
class Correction:
    """The answer that a run should have given. It is used for SFT and for preference pairs, never for GRPO."""

    id: str  # uuid7 hex or the caller's own id; writing the same id again replaces the correction
    trajectory_id: str
    at: float
    source: str  # who made the correction: `user`, or `code` for the app's own code
    message: JSON  # the assistant message that would have been right, as OpenAI JSON
    call_id: str | None = None  # the call whose answer is corrected; `None` means the run's last call
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """The route: where the app's calls go. Each app reads it from the store twice a second by default."""

    mode: Mode | None = None  # the mode for all apps; `None` if each app uses the mode of its own settings
    champion: str | None = None  # name of the policy that serves; `None`: upstream answers
    learner: str | None = None  # the policy that is trained while upstream answers; it gets copies of calls
    base_url: str | None = None  # OpenAI-compatible address of the engine, ending in `/v1`
    # File with the engine's API key; `None` for an engine on this machine that needs no key.
    key_file: str | None = None
    # Share of sessions that a policy answers in mode `canary`; `None` if each app uses the share of its own settings.
    canary_percent: float | None = None
    # When the engine announced itself. If this time changes, another engine is running, even at the same address.
    engine_since: float | None = None
    challenger: str | None = None  # name of the policy under test; `None` if no test is running
    # `shadow`: the policy under test gets copies of calls in the background. `canary`: it answers a share of the
    # sessions.
    challenger_state: Literal["shadow", "canary"] | None = None
    challenger_percent: float | None = None  # that share of all sessions, 0..100; `None` in `shadow`
    challenger_since: float | None = None  # when the policy under test came into this state
    control_percent: float = 0.0  # share of the sessions that stay with upstream: the control group

    @property
    def serves(self) -> bool:
        """Whether there is a champion and an engine that serves it."""
        return self.champion is not None and self.base_url is not None
