"""What the writer thread makes of the app's traffic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from art_patch.types.app_records import JSON, UPSTREAM, Api, CallStatus, Correction, Score, SpanInfo, TrajectoryInfo


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
        fallback: why no policy answered although the call was meant for one; `None` if nothing fell back. It begins
            with `NAME@STEP: ` where a challenger was meant, and says nothing of a name where the champion was.
        untrainable: why the call cannot be trained on; `None` if it can.
        api: which of the SDK's surfaces was called; messages and choices are in the words of chat whatever it was.
        shadow_of: id of the call that this one repeats or copies without the app seeing it.
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


Record = Call | TrajectoryInfo | SpanInfo | Score | Correction | AppReport
"""What the recorder hands to the store."""
