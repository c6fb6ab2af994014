"""The records that stages hand to each other: frozen dataclasses, standard library only.

Flow: the patch makes a `Call`; the store keeps it under a `TrajectoryInfo`; the job reads `Trajectory` back, forms a
`Group` of siblings, gets a `Score` for each, trains, and publishes a `Policy`. A stage takes records and returns
records; only `cycle.py` and the recorder's writer thread talk to the store.

Units: `*_at` is seconds since the Unix epoch, `*_ms` milliseconds. Ids are uuid7 hex strings unless a caller gave one.
Absent means `None`; an empty tuple means "known to be empty".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

JSON = Mapping[str, Any]

CallStatus = Literal["ok", "error", "cancelled", "abandoned"]
Origin = Literal["explicit", "otel", "stitched", "single", "shadow"]
Mode = Literal["off", "record", "shadow", "canary", "route"]
Api = Literal["chat", "completions", "responses"]
PolicyState = Literal["candidate", "champion", "retired", "rejected"]

UPSTREAM = None
"""`Call.policy` of an answer that came from the provider the app was written for."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the `n` answers to a call.

    Attributes:
        index: position among the choices, as the server numbered it.
        message: the assistant message as OpenAI JSON (`role`, `content`, `tool_calls`).
        finish_reason: `stop`, `length`, `tool_calls`, ... or `None` where the stream was cut.
        token_ids: sampled ids in order, the stop token included; `None` where the server did not tell.
        logprobs: natural log-probability of each sampled id at the sampling temperature, same length as `token_ids`.
    """

    index: int
    message: JSON
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the SDK and its answer, all choices included.

    Attributes:
        id: uuid7 hex.
        trajectory_id: the trajectory that the call belongs to.
        span_id: innermost span when the call started.
        started_at: when the request left.
        duration_ms: until the last byte reached the caller.
        ttft_ms: until the first streamed chunk; `None` where the call did not stream.
        requested_model: the model that the app asked for.
        policy: `NAME@STEP` that answered, `None` for upstream.
        messages: the prompt, as OpenAI JSON.
        tools: the tools offered, as OpenAI JSON.
        params: allow-listed sampling parameters (`temperature`, `top_p`, `max_tokens`, `n`, `seed`, `stop`, ...).
        choices: the answers.
        prompt_token_ids: exact prompt ids; `None` where the server did not tell.
        prompt_tokens: from `usage`; 0 where unknown.
        completion_tokens: from `usage`, all choices together; 0 where unknown.
        status: `ok`, `error` (no answer), `cancelled` (task cancelled), `abandoned` (stream not read to its end).
        error: class name and message of what failed, secrets removed.
        fallback: why the champion did not answer although the call was meant for it; `None` if nothing fell back.
        untrainable: why the call cannot be trained on; `None` if it can.
        api: which of the SDK's surfaces was called; messages and choices are in the words of chat whatever it was.
        shadow_of: id of the call that this one repeats at the champion without the app seeing it.
    """

    id: str
    trajectory_id: str
    started_at: float
    requested_model: str
    messages: tuple[JSON, ...]
    choices: tuple[Choice, ...] = ()
    tools: tuple[JSON, ...] = ()
    params: JSON = field(default_factory=dict[str, Any])
    span_id: str | None = None
    duration_ms: float = 0.0
    ttft_ms: float | None = None
    policy: str | None = UPSTREAM
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    status: CallStatus = "ok"
    error: str | None = None
    fallback: str | None = None
    untrainable: str | None = None
    api: Api = "chat"
    shadow_of: str | None = None


@dataclass(frozen=True, slots=True)
class TrajectoryInfo:
    """What is known of a trajectory besides its calls. Written again with `ended_at` when it ends.

    Attributes:
        id: uuid7 hex, the caller's own id, or the trace id of an OpenTelemetry trace.
        started_at: start of the first call or of the `trajectory()` block.
        origin: how its identity was found: `explicit`, `otel`, `stitched` (a call extends an earlier one), `single`;
            `shadow` holds one call that the app never saw.
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
    """A named part of a trajectory, nested by `parent_id`."""

    id: str
    trajectory_id: str
    name: str
    started_at: float
    parent_id: str | None = None
    ended_at: float | None = None


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
class AppReport:
    """What an app's process says of its own patch, from time to time, for `art-patch status`.

    Attributes:
        id: host, process id and start of the process.
        at: when.
        facts: what `art_patch.status()` says in the process.
    """

    id: str
    at: float
    facts: JSON


Record = Call | TrajectoryInfo | SpanInfo | Score | AppReport
"""What the recorder hands to the store."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A trajectory as the job reads it: its calls in the order they started, and its scores."""

    info: TrajectoryInfo
    calls: tuple[Call, ...]
    scores: tuple[Score, ...] = ()

    @property
    def id(self) -> str:
        """The trajectory's id."""
        return self.info.id


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings: trajectories of one scenario that are scored and learned from together.

    Attributes:
        id: uuid7 hex.
        scenario_key: key of the scenario.
        how: how the group came about: `group_key`, `scenario_key` or `same_task`.
        trajectories: two or more siblings.
        held_out: a scenario kept for the gate; never trained on.
    """

    id: str
    scenario_key: str
    how: str
    trajectories: tuple[Trajectory, ...]
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """Base model + LoRA at one step; immutable; served under its own name.

    Attributes:
        name: `NAME@STEP`.
        base: model directory or hub id of the base.
        base_sha256: fingerprint of the base (`serving.adapters.base_fingerprint`).
        state: where it stands; the table of moves is `promotion.states`.
        created_at: when it was published.
        path: adapter directory; `None` for step 0, which is the base model alone.
        parent: the policy it was trained from.
        figures: what was measured while it was trained and gated.
    """

    name: str
    base: str
    base_sha256: str
    state: PolicyState
    created_at: float
    path: str | None = None
    parent: str | None = None
    figures: JSON = field(default_factory=dict[str, Any])

    @property
    def model(self) -> str:
        """`NAME` of `NAME@STEP`."""
        return self.name.rpartition("@")[0]

    @property
    def step(self) -> int:
        """`STEP` of `NAME@STEP`."""
        return int(self.name.rpartition("@")[2])


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
    """

    mode: Mode | None = None
    champion: str | None = None
    base_url: str | None = None
    key_file: str | None = None
    canary_percent: float | None = None
    engine_since: float | None = None

    @property
    def serves(self) -> bool:
        """Whether a champion is served somewhere."""
        return self.champion is not None and self.base_url is not None
