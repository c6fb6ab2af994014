"""Records that the recorder's writer thread makes from the app's calls: `Call`, its `Choice`s, and `AppReport`."""

from dataclasses import dataclass, field
from typing import Any

from art_patch.types.app_records import JSON, UPSTREAM, Api, CallStatus, Correction, Score, SpanInfo, TrajectoryInfo


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a call, which has several if the request sets `n`."""

    index: int  # number of the answer among the call's answers, as the server gave it
    message: JSON  # the assistant message as OpenAI JSON (`role`, `content`, `tool_calls`)
    finish_reason: str | None = None  # `stop`, `length`, `tool_calls` or another reason; `None` if the stream was cut
    # Ids of the sampled tokens in order, including the stop token; `None` if the server returned none.
    token_ids: tuple[int, ...] | None = None
    # Natural log-probability of each sampled id at the sampling temperature, same length as `token_ids`.
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a model by the app, with the request and all answers."""

    id: str
    trajectory_id: str
    started_at: float  # when the request was sent
    requested_model: str
    messages: tuple[JSON, ...]  # the prompt, as OpenAI JSON
    choices: tuple[Choice, ...] = ()
    tools: tuple[JSON, ...] = ()  # the tools that were offered, as OpenAI JSON
    # Allow-listed sampling parameters (`temperature`, `top_p`, `max_tokens`, `n`, `seed`, `stop`, ...).
    params: JSON = field(default_factory=dict[str, Any])
    span_id: str | None = None  # id of the innermost span that was open when the call started
    duration_ms: float = 0.0  # time until the last byte reached the caller
    ttft_ms: float | None = None  # time until the first streamed chunk; `None` if the call did not stream
    policy: str | None = UPSTREAM  # `NAME@STEP` of the policy that answered; `None` for upstream
    prompt_token_ids: tuple[int, ...] | None = None  # exact prompt ids; `None` if the server did not return them
    prompt_tokens: int = 0  # number of prompt tokens in `usage`; 0 if unknown
    completion_tokens: int = 0  # number of tokens of all choices in `usage`; 0 if unknown
    # `ok`, `error` (no answer), `cancelled` (task cancelled), `abandoned` (stream not read to its end).
    status: CallStatus = "ok"
    error: str | None = None  # class name and message of the failure, with secrets removed
    # Why upstream answered a call that was meant for a policy; `None` if there was no fallback. The text begins with
    # `NAME@STEP: ` if the call was meant for the policy under test, and with no name if it was meant for the champion.
    fallback: str | None = None
    untrainable: str | None = None  # why the call cannot be trained on; `None` if it can
    # The API of the SDK that the app called. Whichever it is, messages and choices are stored in the format of chat
    # completions.
    api: Api = "chat"
    # Id of the app's call that this one repeats or copies in the background; `None` for the app's calls.
    shadow_of: str | None = None
    # Whether a policy could have answered the call, and its session belongs to the control group: upstream answered.
    in_control_group: bool = False
    # The model that upstream's answer names, with the provider's fingerprint if there is one, such as
    # `gpt-x-2026-06-01 fp_44709d6fcb`; `None` for policies' answers, and where no answer names a model.
    answered_by: str | None = None


@dataclass(frozen=True, slots=True)
class AppReport:
    """The state of the patch in one app process, which the process writes from time to time for `art-patch status`."""

    id: str  # `HOST:PID`, the host's name and the process id
    at: float
    facts: JSON  # the result of `art_patch.status()` in the process


Record = Call | TrajectoryInfo | SpanInfo | Score | Correction | AppReport
"""A record that the recorder hands to the store."""
