"""One request in the app's words, and the record that it leaves: answered by the champion, or by upstream."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from art_patch.types import Call, Choice
from tests.support.patched_sdk import CHAMPION
from tests.support.servers import TEXT, Answer, completion

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": "gpt-x", "messages": MESSAGES}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SAID = {"role": "assistant", "content": "".join(TEXT)}
ANSWER = Choice(0, SAID | {"refusal": None}, "stop", (10, 11, 12), (-0.25, -0.25, -0.25))


def settled(call: Call) -> Call:
    """The call with what differs from run to run taken out, after a look at it."""
    assert len(call.id) == 32
    assert call.trajectory_id
    assert call.duration_ms > 0
    assert call.ttft_ms is None or 0 < call.ttft_ms <= call.duration_ms
    return replace(call, id="", trajectory_id="", started_at=0.0, duration_ms=0.0, ttft_ms=None)


LOCAL = Call(
    id="",
    trajectory_id="",
    started_at=0.0,
    requested_model="gpt-x",
    messages=tuple(MESSAGES),
    choices=(ANSWER,),
    policy=CHAMPION,
    prompt_token_ids=(1, 2, 3),
    prompt_tokens=3,
    completion_tokens=3,
)
UPSTREAM = replace(
    LOCAL,
    policy=None,
    prompt_token_ids=None,
    choices=(replace(ANSWER, token_ids=None, logprobs=None),),
    untrainable="answered by upstream",
    answered_by="gpt-x",
)


def streamed(call: Call) -> Call:
    return replace(call, choices=tuple(replace(choice, message=SAID) for choice in call.choices))


LOCAL_BODY = ASK | {"model": CHAMPION, "logprobs": True, "return_token_ids": True}
"""The request as the engine gets it."""
GOES_ON: dict[str, Any] = {**ASK, "messages": [*MESSAGES, SAID, {"role": "user", "content": "And now?"}]}
"""The request that follows the answer."""


def whole(**changes: Any) -> Answer:
    return Answer(body=json.dumps(completion(LOCAL_BODY, **changes)).encode())


def saying(*messages: Any, finish: str = "stop") -> Answer:
    """A whole answer with these messages."""
    return whole(choices=[{"index": i, "message": said, "finish_reason": finish} for i, said in enumerate(messages)])
