"""Records that the recorder's writer thread makes of the app's traffic."""

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
        finish_reason: `stop`, `length`, `tool_calls` or another reason; `None` if the stream was cut.
        token_ids: sampled ids in order, with the stop token; `None` if the server did not return them.
        logprobs: natural log-probability of each sampled id at the sampling temperature, same length as `token_ids`.
    """

    index: int
    message: JSON
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the SDK and its answer with all choices.

    Attributes:
        span_id: innermost span when the call started.
        started_at: when the request left.
        duration_ms: time until the last byte reached the caller.
        ttft_ms: time until the first streamed chunk; `None` if the call did not stream.
        policy: `NAME@STEP` of the policy that answered; `None` for upstream.
        messages: the prompt, as OpenAI JSON.
        tools: the tools that were offered, as OpenAI JSON.
        params: allow-listed sampling parameters (`temperature`, `top_p`, `max_tokens`, `n`, `seed`, `stop`, ...).
        prompt_token_ids: exact prompt ids; `None` if the server did not return them.
        prompt_tokens: number of prompt tokens in `usage`; 0 if unknown.
        completion_tokens: number of tokens of all choices in `usage`; 0 if unknown.
        status: `ok`, `error` (no answer), `cancelled` (task cancelled), `abandoned` (stream not read to its end).
        error: class name and message of the failure, with secrets removed.
        fallback: why upstream answered a call that was meant for a policy; `None` if it was not. It begins with
            `NAME@STEP: ` if the policy was a challenger, and has no name if it was the champion.
        untrainable: why the call cannot be trained on; `None` if it can.
        api: the SDK's interface that was called. Messages and choices are in the form of chat completions in any case.
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
    """The state of the patch in one app process, which the process writes from time to time for `art-patch status`.

    Attributes:
        id: host, process id and start time of the process.
        facts: the result of `art_patch.status()` in the process.
    """

    id: str
    at: float
    facts: JSON


Record = Call | TrajectoryInfo | SpanInfo | Score | Correction | AppReport
"""A record that the recorder hands to the store."""
