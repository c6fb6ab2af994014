"""Letting a policy answer a recorded call once more: the same prompt to the token, no tool run.

The gate compares policies on such answers, and re-sampling makes siblings of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from art_patch.errors import EngineError
from art_patch.serving import Engine
from art_patch.types import Call, Choice

_KEPT = ("max_tokens", "max_completion_tokens", "stop", "chat_template_kwargs")
"""Of a call's parameters, what decides where an answer ends and how its prompt is rendered."""


class OtherPrompt(EngineError):
    """The engine renders another prompt than the one that was recorded; what it answers is worth nothing."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a policy answered.

    Attributes:
        prompt_token_ids: exact.
        choices: the answers with their token ids, and their log-probabilities if they were asked for.
        completion_tokens: of all of them, as the engine counted.
        duration_ms: how long they took.
    """

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    completion_tokens: int
    duration_ms: float


def answer_again(
    engine: Engine,
    policy: str,
    call: Call,
    samples: int,
    *,
    temperature: float | None,
    logprobs: bool = False,
    priority: int = 0,
) -> Answers:
    """Return what `policy` answers to the prompt of `call`.

    Args:
        engine: where the policy is served.
        policy: `NAME@STEP`.
        call: whose messages, tools and limits are sent.
        samples: how many answers.
        temperature: of the sampling; `None` leaves it to the engine, which takes 1.
        logprobs: whether the log-probability of each sampled token is wanted.
        priority: as vLLM has it: larger waits for smaller, and the app's own calls have 0.

    Raises:
        OtherPrompt: the prompt is not the recorded one; where no ids were recorded, as upstream's, it is not checked.
        EngineError: the engine failed.
    """
    body: dict[str, Any] = {"model": policy, "messages": list(call.messages), "n": samples}
    body |= {name: call.params[name] for name in _KEPT if name in call.params}
    if temperature is not None:
        body["temperature"] = temperature
    if call.tools:
        body["tools"] = list(call.tools)
    if logprobs:
        body["logprobs"] = True
    if priority:
        body["priority"] = priority
    started = time.monotonic()
    answer = engine.chat(**body, return_token_ids=True)
    prompt = tuple(answer["prompt_token_ids"])
    if call.prompt_token_ids is not None and prompt != call.prompt_token_ids:
        raise OtherPrompt(
            f"call {call.id} has another prompt now than when it was recorded (another chat template?); "
            "serve the base with the template that traffic was recorded with"
        )
    return Answers(
        prompt,
        tuple(_choice(choice) for choice in answer["choices"]),
        int((answer.get("usage") or {}).get("completion_tokens") or 0),
        (time.monotonic() - started) * 1000,
    )


def _choice(choice: dict[str, Any]) -> Choice:
    tokens = (choice.get("logprobs") or {}).get("content")
    return Choice(
        choice["index"],
        choice["message"],
        choice["finish_reason"],
        tuple(choice.get("token_ids") or ()),
        None if tokens is None else tuple(float(token["logprob"]) for token in tokens),
    )
