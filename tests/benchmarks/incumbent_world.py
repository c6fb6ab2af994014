"""The world of `incumbent_loop.py`: a provider, a bot that is patched, and the server beside them, all real processes.

The bot is the demo's shop agent. It asks with temperature 0, names a session for each conversation, and reports a
reward for each. Its provider is a server that answers after half a second or so and is right in `RIGHT` of the
conversations, by a draw for each answer. The engine is `art-patch serve`, the judge the demo's stand-in. The rests of
the canary test are seconds, and everything else runs in real time.

A policy that is asked with temperature 0 is right on a question or it is not. That is its true success there, and
`World.truths` measures it, by the same bot without its two lines of art-patch.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from art_patch import pipeline, promotion, rewards, serving
from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge, shop_rule
from art_patch.demo.processes import Agent, Process, Program, agent_source, unpatched
from art_patch.demo.shop import ITEMS, Task, is_success, make_tasks, triples
from art_patch.demo.shop_model import build_model
from art_patch.settings import Settings, load_settings
from art_patch.store import Store, open_store
from art_patch.types import Trajectory
from tests.support.benchmark_report import say

RIGHT = 0.91  # of the conversations with the provider
_RIGHT_LOOKUPS = 0.97
MODEL = "gpt-4.1-mini"
DATED = "gpt-4.1-mini-2025-04-14"
QUICK = 12  # conversations at once
REST_S = 3.0

# --- the provider ---


class Provider:
    """An OpenAI-compatible server that looks prices up and multiplies, and is wrong now and then."""

    def __init__(self, seed: int, *, delay_s: float = 0.5) -> None:
        """Listen on a free port."""
        self._rng, self._lock, self._delay_s = random.Random(f"provider|{seed}"), threading.Lock(), delay_s
        provider = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                answer = json.dumps(provider.answer(body["messages"])).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def answer(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The completion, after some time."""
        with self._lock:
            wrong, other, delay_s = self._rng.random(), self._rng.random(), self._rng.lognormvariate(0, 0.3)
        time.sleep(self._delay_s * delay_s)
        said = next(m["content"] for m in messages if m["role"] == "user")
        _, _, count, item = said.rstrip("?").split(" ")
        message: dict[str, Any] = {"role": "assistant", "content": None}
        if messages[-1]["role"] == "user":
            if wrong > _RIGHT_LOOKUPS:
                item = [each for each in ITEMS if each != item][int(other * (len(ITEMS) - 1))]
            function = {"name": "lookup", "arguments": json.dumps({"item": item})}
            message["tool_calls"] = [{"id": f"call_{int(other * 1e9)}", "type": "function", "function": function}]
        else:
            right = int(count) * int(messages[-1]["content"])
            message["content"] = str(right if wrong <= RIGHT / _RIGHT_LOOKUPS else right + 1 + int(other * 9))
        finish = "tool_calls" if "tool_calls" in message else "stop"
        usage = {"prompt_tokens": 50, "completion_tokens": 8, "total_tokens": 58}
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        head = {"id": f"chatcmpl-{int(other * 1e9)}", "object": "chat.completion", "created": int(time.time())}
        return head | {"model": DATED, "choices": [choice], "usage": usage}

    def close(self) -> None:
        """Stop."""
        self._http.shutdown()
        self._http.server_close()


# --- the bot and the server ---

_RUN, _ITS = '{"id": task["id"], "messages": run(task)}', '{"id": task["id"], "messages": session(task)}'
_SESSION = """
def session(task):
    from art_patch.demo.shop import Task, is_success

    with art.trajectory("shop", session_id=task["session"]):
        messages = run(task)
        asked = Task("", task["count"], task["item"], task["prices"])
        art.reward(float(is_success(asked, messages)))
    return messages


def answer(line):
"""


def bot() -> Program:
    """The example agent, with a session and a reward for each conversation."""
    source = agent_source()
    assert source.count(_RUN) == source.count("\ndef answer(line):\n") == 1, "the example agent was changed"
    return Program(source.replace(_RUN, _ITS).replace("\ndef answer(line):\n", _SESSION))


class Server(Process):
    """`art-patch serve` on a free port."""

    def __init__(self, base: Path, settings: Settings, *options: str) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "art_patch", "serve", "--base", str(base), "--port", "0", "--json"]
        command += ["--engine", "embedded", "--home", str(settings.home), "--project", settings.project]
        rests = {f"ART_PATCH_CANARY_{name}_S": str(REST_S) for name in ("REST", "SILENCE")}
        super().__init__([*command, "--threads", "1", *options], rests, settings.directory / "engine.log")
        assert self.stdout is not None
        first = json.loads(self.stdout.readline() or "{}")
        if "base_url" not in first:
            self.stop()
            sys.exit(f"the engine did not start: {first.get('message') or self.last_words()}")
        self.base_url, self.champion, self.learner = (first[key] for key in ("base_url", "champion", "learner"))


@dataclass(slots=True)
class Asked:
    """A conversation as the bot saw it."""

    task: Task
    right: bool
    error: str | None


class World:
    """Provider, bot and store; `serve` adds the server."""

    def __init__(self, stack: ExitStack, home: Path, name: str, seed: int, *, delay_s: float = 0.5) -> None:
        """Start provider and bot."""
        self._stack, self.seed = stack, seed
        self.settings = load_settings(home=home, project=name)
        self.settings.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Like the user's own, in one place for all runs.
        self.base = build_model(home / "models" / f"shop-{seed}", seed=seed)
        self.provider = Provider(seed, delay_s=delay_s)
        stack.callback(self.provider.close)
        self.store: Store = open_store(self.settings.store_url, project=name)
        stack.callback(self.store.close)
        url = stack.enter_context(serve_stand_in_judge(shop_rule))
        rubric = rewards.load_rubric(self.settings.rubric)
        self.judge = rewards.Judge(STAND_IN_MODEL, base_url=url, api_key="none", rubric=rubric, max_siblings=64)
        ours = {"OPENAI_BASE_URL": self.provider.url, "SHOP_MODEL": MODEL}
        ours |= {"ART_PATCH_HOME": str(home), "ART_PATCH_PROJECT": name}
        directory = self.settings.directory
        self.bot = stack.enter_context(Agent(bot(), directory / "bot.py", ours, directory / "bot.log"))
        self._tasks = self._stream()
        self.asked = dict[str, Asked]()  # by session
        self._lock = threading.Lock()

    def _stream(self) -> Iterator[Task]:
        for number in range(1_000_000):
            yield from make_tasks("traffic", len(triples("traffic")), seed=self.seed * 1_000 + number)

    def serve(self, *options: str) -> Server:
        """Start the server."""
        self.server = self._stack.enter_context(Server(self.base, self.settings, *options))
        self.client = serving.EngineClient.of_project(self.settings, self.server.base_url, None)
        self._stack.callback(self.client.close)
        return self.server

    def session(self, _: object = None) -> None:
        """Have one conversation."""
        with self._lock:
            task = next(self._tasks)
            self.asked[key := f"v{len(self.asked)}"] = Asked(task, False, "not answered")
        about = {"question": task.question, "prices": dict(task.prices), "temperature": 0}
        about |= {"session": key, "count": task.count, "item": task.item}
        (result,) = self.bot.ask([about])
        messages = result.get("messages", ())
        self.asked[key] = Asked(task, is_success(task, messages), result.get("error"))

    def sessions(self, count: int) -> None:
        """Have so many conversations."""
        with ThreadPoolExecutor(QUICK) as pool:
            list(pool.map(self.session, range(count)))

    @contextmanager
    def traffic(self, at_once: int) -> Generator[None]:
        """Have conversations, so many at once, while the block runs."""
        stop, failed = threading.Event(), list[BaseException]()

        def go_on() -> None:
            try:
                while not stop.is_set():
                    self.session()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=go_on, daemon=True) for _ in range(at_once)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if failed:
            raise failed[0]

    def cycle(self, config: pipeline.CycleConfig) -> pipeline.CycleReport:
        """Run one cycle."""
        began = time.monotonic()
        report = pipeline.retrain(
            self.store, self.client, self.judge, self.settings.adapters, config, who="benchmark",
            progress=lambda *_: None,
        )  # fmt: skip
        say(f"  {len(self.asked)} sessions, {time.monotonic() - began:.0f} s: {report.outcome}: {report.reason}")
        return report

    def wait_until_recorded(self, calls_of: int) -> list[Trajectory]:
        """The runs of the bot's sessions, in their order, once they are all in the store."""
        deadline = time.monotonic() + 60
        while True:
            runs = [
                run for run in self.store.read.recent(limit=1_000_000) if run.info.origin not in ("shadow", "resampled")
            ]
            if len(runs) >= calls_of or time.monotonic() > deadline:
                return sorted(runs, key=lambda run: run.info.started_at)
            time.sleep(1)

    def truths(self, policy: str, of: Iterable[Task]) -> dict[tuple[int, str, int], bool]:
        """Whether a policy is right on these questions with temperature 0, by (count, item, price)."""
        promotion.ensure_loaded(self.client, policy)
        tasks = list({triple(task): task for task in of}.values())
        theirs = {"OPENAI_BASE_URL": self.server.base_url, "SHOP_MODEL": policy}
        directory = self.settings.directory
        program = unpatched(Program(agent_source()))
        with Agent(program, directory / "unpatched.py", theirs, directory / "unpatched.log") as agent:
            asked = ({"question": t.question, "prices": dict(t.prices), "temperature": 0} for t in tasks)
            results = agent.ask(asked)
        found = zip(tasks, results, strict=True)
        return {triple(task): is_success(task, result.get("messages", ())) for task, result in found}


def triple(task: Task) -> tuple[int, str, int]:
    """All that a policy's success depends on: it meets no other price unless it is wrong already."""
    return task.count, task.item, task.prices[task.item]
