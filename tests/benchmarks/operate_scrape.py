"""What a scrape of `/metrics` each second costs a routed call: the part `scrape`.

`python -m tests.benchmarks.operate_scrape HOME` is the server: the real front and the real metrics over a stand-in for
the engine, whose answers were made before. It prints its address, and serves until its standard input is closed.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event, Thread
from typing import Any

from art_patch.store import open_store
from art_patch.types import Call, Choice, TrajectoryInfo
from tests.benchmarks.stub import ASK, CHAMPION, answer
from tests.support.benchmark_report import Target, say
from tests.support.command_line import ENVIRONMENT

TARGETS = (Target("scrape_added_us_p50", None, 2.0, "what a scrape each second adds to a routed call, median"),)
CALLS = 20_000  # in the store
WARM_UP_S = 5.0
BEFORE_S, AFTER_S = 0.005, 0.05  # calls that begin in between may meet a scrape, which takes a few milliseconds
US = 1e6

APP = """
import json, sys, time
import openai
import art_patch as art

art.patch()
client = openai.OpenAI(api_key="k", base_url="http://127.0.0.1:9/v1", max_retries=0)
ask, until, made = json.loads(sys.argv[1]), time.time() + float(sys.argv[2]), []
while time.time() < until:
    at, began = time.time(), time.perf_counter()
    client.chat.completions.create(**ask)
    made.append((at, time.perf_counter() - began))
assert art.flush(60)
print(json.dumps({"made": made, "by_policy": art.status().served_by_policy}))
"""


def scrape(seconds: int, seed: int) -> dict[str, Any]:
    """Scrape in one of each two seconds, drawn at random, while an app makes calls."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        home = Path(place)
        store = stack.enter_context(closing(open_store(f"sqlite:///{home}/default/store.db", project="default")))
        _fill(store)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.operate_scrape", str(home)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        stack.callback(server.wait, 60)
        stack.callback(server.stdin.close)
        url = server.stdout.readline().strip()
        store.ledger.add_base(CHAMPION, "stub", "0" * 64, who="bench")
        store.ledger.set_engine(f"{url}/v1", who="bench")
        app = subprocess.Popen(
            [sys.executable, "-c", APP, json.dumps(ASK), str(seconds + WARM_UP_S)],
            stdout=subprocess.PIPE, text=True, env=ENVIRONMENT | {"ART_PATCH_HOME": str(home)},
        )  # fmt: skip
        began = time.time() + WARM_UP_S
        scraped, took_s = _scrape(url, began, seconds, rng)
        found = json.loads(app.communicate(timeout=120)[0])
        say(f"{len(found['made'])} calls, {found['by_policy']} by the policy, {len(scraped)} scrapes")
        assert found["by_policy"] >= 0.99 * len(found["made"]), "calls were not routed"
    blocks: list[list[float]] = [[] for _ in range(seconds)]
    every, far = list[float](), list[float]()
    for at, call_s in found["made"]:
        if at < began or (second := int(at - began)) >= seconds:
            continue
        blocks[second].append(call_s)
        if (asked := scraped.get(second)) is not None:
            every.append(call_s)
            # By when it began alone: a long call meets a scrape more often, whatever the scrape does to it.
            if not asked - BEFORE_S <= at <= asked + AFTER_S:
                far.append(call_s)
    medians = [statistics.median(block) for block in blocks]
    pairs = range(0, seconds - 1, 2)
    added = [(medians[n] - medians[n + 1]) * (1 if n in scraped else -1) for n in pairs]
    return {
        "scrape_added_us_p50": (statistics.median(every) - statistics.median(far)) * US,
        "scrape_slowed": 1 - len(far) / len(every),
        "scrape_seconds_us_p50": statistics.median(added) * US,
        "scrape_error_us": 1.25 * statistics.stdev(added) / len(added) ** 0.5 * US,
        "routed_call_us_p50": statistics.median(medians) * US,
        "scrape_ms": statistics.median(took_s) * 1_000,
        "observe_us": _observe_us(),
    }


def _scrape(url: str, began: float, seconds: int, rng: random.Random) -> tuple[dict[int, float], list[float]]:
    """Return in which seconds there was a scrape and when it began, and how long each took."""
    scraped, took_s = dict[int, float](), list[float]()
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=30)  # kept open, as Prometheus does
    for first in range(0, seconds - 1, 2):
        second = first + rng.randrange(2)
        time.sleep(max(0.0, began + second + rng.uniform(0.1, 0.8) - time.time()))
        scraped[second], asked = time.time(), time.perf_counter()
        connection.request("GET", "/metrics")
        page = connection.getresponse().read()
        took_s.append(time.perf_counter() - asked)
        assert b"art_patch_calls_total" in page, page
    connection.close()
    return scraped, took_s


def _observe_us() -> float:
    """What the front's counting of one request costs."""
    from art_patch.metrics import ServerMetrics, StoreWatch
    from art_patch.serving import POLICY
    from art_patch.settings import load_settings

    monitor = ServerMetrics("default", StandIn(), StoreWatch(load_settings()), Event())
    scope = {"path": "/v1/chat/completions", POLICY: CHAMPION}
    began, times = time.perf_counter(), 100_000
    for _ in range(times):
        monitor.observe(scope, 200, 0.01)
    return (time.perf_counter() - began) / times * US


def _fill(store: Any) -> None:
    now = time.time()
    for first in range(0, CALLS, 500):
        records: list[Any] = []
        for number in range(first, first + 500):
            run, at = f"run-{number}", now - number
            said = Choice(0, {"role": "assistant", "content": f"answer {number % 100}"}, "stop")
            prompt = ({"role": "user", "content": f"question {number % 100}"},)
            policy = CHAMPION if number % 2 else None
            call = Call(f"{run}-1", run, at, "gpt-x", prompt, (said,), policy=policy, untrainable="a benchmark's")
            records += [TrajectoryInfo(run, at), call]
        store.write(records)


class StandIn:
    """In place of an engine: it answers every chat completion at once."""

    healthy, max_model_len, base_policy = True, 4096, CHAMPION

    def policies(self) -> list[str]:
        return [CHAMPION]

    def stats(self) -> dict[str, int]:
        return {"running": 0, "waiting": 0}

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def close(self) -> None: ...


def _serve(home: Path) -> None:
    from art_patch._lib.asgi import Caller
    from art_patch.metrics import ServerMetrics, StoreWatch
    from art_patch.serving import run_server
    from art_patch.serving.request_checks import ChatRoute, parse_object
    from art_patch.settings import load_settings

    body, stop, engine = answer(engine=True), Event(), StandIn()

    class AtOnce(ChatRoute[str]):
        def understand(self, body: bytes) -> str:
            return parse_object(body)["model"]

        def policy_of(self, request: str) -> str:
            return request

        async def answer(self, caller: Caller, request: str) -> None:
            await caller.answer(200, [(b"content-type", b"application/json")], body)

    engine.chat = AtOnce()  # type: ignore[attr-defined]
    watch = StoreWatch(load_settings(home=home))
    monitor = ServerMetrics("default", engine, watch, stop)

    def on_ready(url: str) -> None:
        watch.start(stop)
        print(url, flush=True)

    Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    run_server(engine, port=0, on_ready=on_ready, stop=stop, monitor=monitor)  # type: ignore[arg-type]


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
