"""Replaces the LLM judge in the demo by a Python rule, so that no large model is needed.

The stand-in receives over HTTP the same prompt that RULER sends to an LLM, and answers with the JSON of a judge. So the
demo runs the real prompt, client and parser; only the judge's opinion is replaced. Like an LLM judge, the rule reads
only the fenced transcripts in the prompt.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from art_patch._lib.http_server import listen, serve, url_of
from art_patch.demo.shop import COUNTS, ITEMS, is_lookup, question
from art_patch.rewards import JudgeReport, OnScored, OrderedJudge, read_prompt
from art_patch.types import Group, Score

# litellm's name of the stand-in; the demo's scores carry it, so that they cannot be taken for an LLM's.
STAND_IN_MODEL = "openai/stand-in-judge"

Rule = Callable[[list[dict[str, Any]]], float]
"""Function that scores a transcript (a list of OpenAI messages) from 0 to 1."""

_ASKED = {question(count, item): (count, item) for count in COUNTS for item in ITEMS}


@contextmanager
def serve_stand_in_judge(rule: Rule, *, port: int = 0) -> Generator[str, None, None]:
    """Serve the stand-in judge on loopback while the block runs, and yield its base URL, ending in `/v1`."""

    async def completions(request: Request) -> JSONResponse:
        body = await request.json()
        try:
            content = read_prompt(body["messages"])
        except (KeyError, ValueError) as error:
            return JSONResponse({"error": {"message": f"stand-in judge: {error}", "type": "invalid_request"}}, 400)
        values = [(name, rule(messages)) for name, messages in content.transcripts.items()]
        scores = [{"trajectory_id": name, "explanation": f"stand-in rule: {v:g}", "score": v} for name, v in values]
        return JSONResponse(_completion(str(body.get("model")), body["messages"], json.dumps({"scores": scores})))

    app = Starlette(routes=[Route("/v1/chat/completions", completions, methods=["POST"])])
    ready, stop = threading.Event(), threading.Event()
    with listen("127.0.0.1", port, key=None, what="the stand-in judge") as sock:
        options = {"drain_s": 5.0, "on_ready": ready.set, "stop": stop, "log_level": "error"}
        thread = threading.Thread(target=serve, args=(app, sock), kwargs=options, name="stand-in-judge", daemon=True)
        thread.start()
        while not ready.wait(0.05) and thread.is_alive():  # a server that cannot start must not leave us waiting
            pass
        try:
            yield f"{url_of('127.0.0.1', sock)}/v1"
        finally:
            stop.set()
            thread.join()


def shop_rule(messages: Sequence[Mapping[str, Any]]) -> float:
    """Score a transcript of the demo's shop (`shop.py`), which may be complete or end after any message of the agent.

    The score is 1.0 in two cases. Either the last message is the agent's call that looks up the item that was asked
    for, and nothing else. Or such a lookup was answered before, and the last message is the agent's answer: the product
    of count and price, and nothing else. In every other case the score is 0.0.
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
    """Return the id of the call if the message is one lookup of `item` and nothing else."""
    is_right = message.get("role") == "assistant" and is_lookup(message, item)
    return str(message["tool_calls"][0].get("id")) if is_right else None


def _completion(model: str, messages: Sequence[Mapping[str, Any]], text: str) -> dict[str, Any]:
    # There is no tokenizer here, so tokens are estimated at four characters each.
    prompt, completion = sum(len(str(message.get("content"))) for message in messages) // 4, len(text) // 4
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    head = {"id": "chatcmpl-stand-in", "object": "chat.completion", "created": int(time.time()), "model": model}
    return {**head, "choices": [choice], "usage": usage}


class ShuffledJudge:
    """The demo's control: a judge whose scores are shuffled among siblings, so that a policy cannot learn from them."""

    # Among siblings and not among transcripts: RULER shows answers that are alike once. A random score of such a
    # transcript would reward common answers by another rule than rare ones, and a policy would learn from that.

    def __init__(self, judge: OrderedJudge, seed: int) -> None:
        self._judge = judge
        self._random = random.Random(seed)

    def score_groups(
        self, groups: Sequence[Group], *, known: Iterable[Score] = (), on_scored: OnScored | None = None, **more: Any
    ) -> JudgeReport:
        """Return the real judge's report with each group's scores shuffled; those in `known` were shuffled before."""
        shuffled: dict[str, float] = {}

        def of(scores: Iterable[Score]) -> list[Score]:
            return [replace(score, value=shuffled.get(score.id, score.value)) for score in scores]

        def shuffle(group: Group, scores: Sequence[Score], usage: Any) -> None:
            values = [score.value for score in scores]
            self._random.shuffle(values)
            shuffled.update(zip((score.id for score in scores), values, strict=True))
            if on_scored is not None:
                on_scored(group, of(scores), usage)

        report = self._judge.score_groups(groups, known=known, on_scored=shuffle, **more)
        return replace(report, scores=tuple(of(report.scores)))
