"""How the tests of both engines ask: the real OpenAI client, ids and log-probabilities with every answer."""

from __future__ import annotations

import time
from typing import Any

from openai import OpenAI

HELLO: Any = [{"role": "user", "content": "what is the price of 3 plums?"}]
PROOF: dict[str, Any] = {"logprobs": True, "extra_body": {"return_token_ids": True}}
LOOKUP_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}


def ask(client: OpenAI, policy: str = "agent@0", messages: Any = HELLO, **options: Any) -> dict[str, Any]:
    return client.chat.completions.create(model=policy, messages=messages, **options).to_dict()


def greedy(client: OpenAI, policy: str, content: str, tokens: int = 24) -> list[int]:
    messages = [{"role": "user", "content": content}]
    answer = ask(client, policy, messages, temperature=0, max_tokens=tokens, **PROOF)
    return answer["choices"][0]["token_ids"]


def assembled(stream: Any) -> dict[str, Any]:
    """Puts a stream together; checks what must hold of every chunk."""
    out: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in stream:
        chunk = chunk.to_dict()
        assert chunk["object"] == "chat.completion.chunk"
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            state = out.setdefault(
                choice["index"],
                {"content": "", "ids": [], "logprobs": [], "calls": [], "reason": None, "prompt": None},
            )
            assert state["reason"] is None, "nothing may follow the finish reason"
            state["prompt"] = state["prompt"] or chunk.get("prompt_token_ids")
            state["content"] += choice["delta"].get("content") or ""
            state["ids"] += choice.get("token_ids") or []
            state["logprobs"] += [e["logprob"] for e in (choice.get("logprobs") or {"content": []})["content"]]
            state["calls"] += choice["delta"].get("tool_calls") or []
            state["reason"] = choice["finish_reason"]
    return {"choices": [out[index] for index in sorted(out)], "usage": usage}


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
