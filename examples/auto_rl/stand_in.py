"""Stand-ins for all three models, for whoever has neither a key nor a GPU. None of them is what it stands in for.

- The stand-in helper writes scenarios from a list: it answers over HTTP as a model would, code fence, repetitions and
  all, so that what reads a real helper's answers is what reads these.
- The stand-in judge scores by a rule: polite first words, few words, and the right sentence has to be among them.
  RULER's true prompt, client and parser carry it.
- The tiny base model has half a million parameters and knows customer questions about shipping alone, and mostly the
  wrong tone for them. Its prices and days are made up.

All three know `TASK` only.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from art_patch.demo.judge import serve_stand_in_judge
from art_patch.demo.tiny_model import Shape, tiny_base

TASK = "answer customer questions about shipping politely and briefly"
STAND_IN_HELPER = "stand-in-helper"

_PLACES = (
    *("Austria", "Belgium", "Brazil", "Canada", "Chile", "Denmark", "Egypt", "Finland", "France", "Ghana", "Greece"),
    *("Iceland", "India", "Ireland", "Italy", "Japan", "Kenya", "Mexico", "Norway", "Peru", "Poland", "Spain"),
    *("Sweden", "Turkey"),
)
_ASKED = {
    "How long does a parcel to {} take?": "It takes four days.",
    "What does shipping to {} cost?": "Shipping costs nine euros.",
    "My parcel to {} is late. What now?": "We look for it today.",
    "Can I send it to {} instead?": "You can until it leaves us.",
}
_ANSWERS = {question.format(place): said for question, said in _ASKED.items() for place in _PLACES}
_POLITE, _BLUNT = ("Thank you for asking!", "Gladly!"), ("As I said.", "Read our terms.", "Again?")
_EVASIVE = "That depends."
_PADDING = (
    "All of this is written down in our terms of service, which every customer has read and agreed to before the order."
)
_P_POLITE, _P_TO_THE_POINT, _P_BRIEF = 0.3, 0.7, 0.35
_FEW, _MANY = 10, 30


@contextmanager
def serve_judge() -> Generator[str]:
    """Serve the stand-in judge while the block runs; its address."""
    with serve_stand_in_judge(lambda messages: rule(messages[-2]["content"], messages[-1]["content"] or "")) as url:
        yield url


def rule(question: str, answer: str) -> float:
    """What the stand-in judge says of an answer: 0 off the point, else .2, plus up to .4 for tone and for brevity."""
    if question not in _ANSWERS or _ANSWERS[question] not in answer:
        return 0.0
    brevity = min(1.0, max(0.0, (_MANY - len(answer.split())) / (_MANY - _FEW)))
    return round(0.2 + 0.4 * answer.startswith(_POLITE) + 0.4 * brevity, 3)


@contextmanager
def serve_helper() -> Generator[str]:
    """Serve the stand-in helper while the block runs; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Helper)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def helped(asked: str) -> str:
    """What the stand-in helper answers to a request for questions, or for a system prompt."""
    if "JSON list" not in asked:
        return "Answer customers' questions about shipping. Be polite. Be brief."
    questions = list(_ANSWERS)
    random.Random("helper").shuffle(questions)
    count = int(re.search(r"Write (\d+)", asked)[1])
    new = [question for question in questions if question not in asked][:count]
    return f"Here they are:\n```json\n{json.dumps([*new, *(each.upper() for each in new[:2])])}\n```"


def tiny(seed: int, system_prompt: str, questions: Sequence[str]) -> Path:
    """The tiny base model: it has seen these questions answered at length, bluntly and off the point, mostly.

    Raises:
        ValueError: none of the questions is one that it knows.
    """
    asked = [question for question in questions if question in _ANSWERS]
    if not asked:
        raise ValueError(
            "the tiny stand-in for a base model knows the stand-in helper's questions alone; name a --base-model"
        )

    def beginner(rng: random.Random) -> list[dict[str, Any]]:
        question = rng.choice(asked)
        tone = rng.choice(_POLITE if rng.random() < _P_POLITE else _BLUNT)
        point = _ANSWERS[question] if rng.random() < _P_TO_THE_POINT else _EVASIVE
        said = [tone, point, *([] if rng.random() < _P_BRIEF else [_PADDING])]
        return [
            {"role": "system", "content": system_prompt},
            {"role": "user", "content": question},
            {"role": "assistant", "content": " ".join(said)},
        ]

    return tiny_base("auto_rl", beginner, seed=seed, words=_PLACES, shape=Shape(steps=150, batch=24, peak_lr=3e-3))


class _Helper(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": helped(body["messages"][-1]["content"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        whole = {"id": "s", "object": "chat.completion", "created": 0, "model": STAND_IN_HELPER, "choices": [choice]}
        sent = json.dumps(whole).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
