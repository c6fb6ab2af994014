"""Shared by the tests of the judge: groups made of plain messages, and a scripted judge on a real socket.

The fixtures are of session scope where they hold no state, so that hypothesis may use them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from art_patch.rewards import read_prompt
from art_patch.types import Call, Choice, Group, Trajectory, TrajectoryInfo

Messages = Sequence[dict[str, Any]]


def make_trajectory(name: str, messages: Messages, tools: Messages = ()) -> Trajectory:
    """A trajectory of one call whose answer is the last of `messages`; of no call if there are none."""
    if not messages:
        return Trajectory(TrajectoryInfo(name, 0.0), ())
    *prompt, answer = messages
    call = Call(f"{name}-call", name, 0.0, "m", tuple(prompt), (Choice(0, answer),), tools=tuple(tools))
    return Trajectory(TrajectoryInfo(name, 0.0), (call,))


def make_group(transcripts: Sequence[Messages], tools: Messages = (), name: str = "g") -> Group:
    """Siblings `NAME-0`, `NAME-1`, ... with these transcripts."""
    siblings = tuple(make_trajectory(f"{name}-{i}", messages, tools) for i, messages in enumerate(transcripts))
    return Group(name, f"scenario-{name}", "scenario_key", siblings)


def make_groups(count: int, siblings: int = 3) -> list[Group]:
    """Groups `g0`, `g1`, ... whose siblings answer `answer 0`, `answer 1`, ... to one question."""
    return [
        make_group(
            [
                [{"role": "user", "content": f"question {g}"}, {"role": "assistant", "content": f"answer {i}"}]
                for i in range(siblings)
            ],
            name=f"g{g}",
        )
        for g in range(count)
    ]


@dataclass
class Reply:
    """What the scripted judge sends back; `text` goes into a completion unless `body` is given."""

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    delay_s: float = 0.0


@dataclass
class Asked:
    """One request that the scripted judge got."""

    number: int
    body: dict[str, Any]
    headers: dict[str, str]
    at: float

    @property
    def transcripts(self) -> dict[str, list[dict[str, Any]]]:
        return read_prompt(self.body["messages"]).transcripts

    @property
    def ids(self) -> list[str]:
        return list(self.transcripts)


Respond = Callable[[Asked], Reply]


@dataclass
class JudgeServer:
    base_url: str
    asked: list[Asked] = field(default_factory=list)


def verdict(scores: dict[str, Any]) -> str:
    """The answer of a judge that gives these scores."""
    return json.dumps(
        {"scores": [{"trajectory_id": k, "explanation": f"why {v}", "score": v} for k, v in scores.items()]}
    )


def all_half(asked: Asked) -> Reply:
    return Reply(verdict(dict.fromkeys(asked.ids, 0.5)))


def _completion(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps(
        {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
        }
    ).encode()


@contextmanager
def serve(respond: Respond) -> Generator[JudgeServer, None, None]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                asked = Asked(len(judge.asked), body, {k.lower(): v for k, v in self.headers.items()}, time.monotonic())
                judge.asked.append(asked)
            reply = respond(asked)
            time.sleep(reply.delay_s)
            if reply.body is not None:
                data = reply.body
            elif reply.status == 200:
                data = _completion(reply.text)
            else:
                data = json.dumps({"error": {"message": reply.text or f"status {reply.status}"}}).encode()
            try:
                self.send_response(reply.status)
                for key, value in {"content-type": "application/json", **reply.headers}.items():
                    self.send_header(key, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):  # the client did not wait
                pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    judge = JudgeServer(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def judge_server() -> Generator[Callable[[Respond], JudgeServer], None, None]:
    """Start a judge that answers each request with what `respond(asked)` returns."""
    with ExitStack() as stack:
        yield lambda respond: stack.enter_context(serve(respond))


@pytest.fixture(scope="session")
def group_of() -> Callable[..., Group]:
    return make_group


@pytest.fixture(scope="session")
def groups_of() -> Callable[..., list[Group]]:
    return make_groups


@pytest.fixture(scope="session")
def reply() -> type[Reply]:
    return Reply


@pytest.fixture(scope="session")
def verdict_text() -> Callable[[dict[str, Any]], str]:
    return verdict


@pytest.fixture(scope="session")
def half_for_all() -> Respond:
    return all_half
