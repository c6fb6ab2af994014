"""A stand-in for the judge, so that the demo runs without a model to rank siblings. It is not a judge.

In: the very prompt that RULER sends, over HTTP. Out: an answer in the judge's JSON, where each score comes from a plain
Python rule on the sibling's whole transcript. So the demo exercises the true prompt, client and parser, and only the
opinion is replaced. What the rule cannot see, an LLM judge cannot see either: it gets the fenced text and nothing else.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from art_patch.demo.shop import COUNTS, ITEMS, question
from art_patch.rewards import read_prompt

STAND_IN_MODEL = "openai/stand-in-judge"
"""litellm's name for it; the demo's scores carry it, so nobody takes them for an LLM's."""

Rule = Callable[[list[dict[str, Any]]], float]
"""A transcript as OpenAI messages -> score from 0 to 1."""

_ASKED = {question(count, item): (count, item) for count in COUNTS for item in ITEMS}


@contextmanager
def serve_stand_in_judge(rule: Rule, *, port: int = 0) -> Generator[str, None, None]:
    """Serve the stand-in on loopback while the block runs, and yield its base URL (ending in `/v1`).

    Args:
        rule: scores one transcript.
        port: 0 for any free one.
    """

    async def completions(request: Request) -> JSONResponse:
        body = await request.json()
        try:
            content = read_prompt(body["messages"])
        except (KeyError, ValueError) as error:
            return JSONResponse({"error": {"message": f"stand-in judge: {error}", "type": "invalid_request"}}, 400)
        values = [rule(messages) for messages in content.transcripts.values()]
        scores = [
            {"trajectory_id": name, "explanation": f"stand-in rule: {value:g}", "score": value}
            for name, value in zip(content.transcripts, values, strict=True)
        ]
        return JSONResponse(_completion(str(body.get("model")), body["messages"], json.dumps({"scores": scores})))

    app = Starlette(routes=[Route("/v1/chat/completions", completions, methods=["POST"])])
    # The protocol is named because asyncio sets TCP_NODELAY only then; without it each answer waits 40 ms for an ACK.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, args=([listener],), name="stand-in-judge", daemon=True)
        thread.start()
        while not server.started and thread.is_alive():  # else an early `should_exit` would be overlooked
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


def shop_rule(messages: Sequence[Mapping[str, Any]]) -> float:
    """Score a run in the demo's shop (`shop.py`), whole or broken off after any of the agent's turns.

    Returns:
        1.0 if the last message is the agent's and right: exactly one lookup of the item that was asked for, or, after
        such a lookup was answered, count times the price and nothing else. 0.0 otherwise.
    """
    asked = next((_ASKED.get(str(m.get("content"))) for m in reversed(messages) if m.get("role") == "user"), None)
    if asked is None or messages[-1].get("role") != "assistant":
        return 0.0
    count, item = asked
    if messages[-1].get("tool_calls"):
        return float(_right_lookup(messages[-1], item) is not None)
    right_ids = {_right_lookup(message, item) for message in messages} - {None}
    prices = [m.get("content") for m in messages if m.get("role") == "tool" and m.get("tool_call_id") in right_ids]
    answers = {str(count * int(price)) for price in prices if isinstance(price, str) and price.isdecimal()}
    return float(messages[-1].get("content") in answers)


def _right_lookup(message: Mapping[str, Any], item: str) -> str | None:
    """The id of the call if the message is one lookup of `item` and nothing else."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    if message.get("role") != "assistant" or message.get("content") or len(calls) != 1:
        return None
    function: Mapping[str, Any] = calls[0].get("function") or {}
    try:
        arguments: Any = json.loads(str(function.get("arguments")))
    except ValueError:
        return None
    return str(calls[0].get("id")) if function.get("name") == "lookup" and arguments == {"item": item} else None


def _completion(model: str, messages: Sequence[Mapping[str, Any]], text: str) -> dict[str, Any]:
    """OpenAI's answer object. There is no tokenizer here, so tokens are estimated at four characters each."""
    prompt_tokens = sum(len(str(message.get("content"))) for message in messages) // 4
    completion_tokens = len(text) // 4
    return {
        "id": "chatcmpl-stand-in",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
