"""Two servers of one project, either of which is killed again and again while an app asks: the part `servers`."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from art_patch.store import open_store
from art_patch.types import Call
from tests.support.benchmark_report import Target, say
from tests.support.command_line import ENVIRONMENT, Serving
from tests.support.servers import serving
from tests.support.tiny import make_tiny_model

TAKEOVER_S = 4.0
"""The longest that a takeover on one machine should take: a look of the other server and one of the app, each twice."""
TARGETS = (
    Target("failed", None, 0, "calls that raised an error in the app"),
    Target("unserved", None, 0, f"calls upstream answered more than {TAKEOVER_S:g} s after a kill, though one lived"),
)
CALLERS = 4
# Not sampled: the tiny model is random, and would now and then answer nothing, which an app does not accept.
ASK = {"model": "gpt-x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
PAUSE_S = 0.02  # of a caller between two calls

APP = """
import json, pathlib, sys, threading, time
import openai
import art_patch as art

art.patch()
enough, failed = pathlib.Path(sys.argv[2]), []

def ask():
    client = openai.OpenAI(api_key="k", base_url=sys.argv[1], max_retries=0)
    while not enough.exists():
        try:
            client.chat.completions.create(**json.loads(sys.argv[5]))
        except openai.OpenAIError as error:
            failed.append(repr(error))
        time.sleep(float(sys.argv[4]))

callers = [threading.Thread(target=ask) for _ in range(int(sys.argv[3]))]
for each in callers:
    each.start()
for each in callers:
    each.join()
assert art.flush(60)
print(json.dumps({"failed": failed, "dropped": art.status().dropped}))
"""


def servers(kills: int, seed: int) -> dict[str, Any]:
    """Kill either of two servers at random, `kills` times, and start it again."""
    rng, killed = random.Random(seed), list[tuple[float, bool]]()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        home, enough = Path(place), Path(place) / "enough"
        base = make_tiny_model(home / "base")
        store = stack.enter_context(closing(open_store(f"sqlite:///{home}/default/store.db")))
        upstream = stack.enter_context(serving())
        running = [Serving(base, home, "--take-over", "--threads", "1") for _ in range(2)]
        stack.callback(lambda: [each.stop() for each in running])
        with _app(upstream.url, enough, home) as app:
            began = _wait_for_an_answer(store)
            for number in range(kills):
                time.sleep(rng.uniform(0.0, 3.0))
                which = rng.randrange(2)
                had_route = store.ledger.route().base_url == running[which].ready["base_url"]
                killed.append((time.time(), had_route))  # before: a call may fail before `stop` returns
                running[which].stop(signal.SIGKILL)
                time.sleep(TAKEOVER_S)
                running[which] = Serving(base, home, "--take-over", "--threads", "1")
                say(f"kill {number + 1} of {kills}")
            time.sleep(TAKEOVER_S)
            enough.touch()
            said = json.loads(app.communicate(timeout=120)[0])
        runs = store.read.recent(limit=1_000_000)
        calls = sorted((call for run in runs for call in run.calls), key=lambda call: call.started_at)
    for error in said["failed"][:5]:
        say(error)
    return _metrics([call for call in calls if call.started_at >= began], killed) | {
        "failed": len(said["failed"]),
        "not_recorded": said["dropped"],
    }


def _metrics(calls: list[Call], killed: list[tuple[float, bool]]) -> dict[str, Any]:
    upstreams = [call for call in calls if call.policy is None]
    times = [at for at, _ in killed]

    def since_kill(at: float) -> float:
        before = bisect_right(times, at)
        return at - times[before - 1] if before else at - calls[0].started_at

    # By the end of the call: its server may have been killed while it answered.
    late = [call for call in upstreams if since_kill(call.started_at + call.duration_ms / 1000) > TAKEOVER_S]
    for name, those in (("fell back", upstreams), ("unserved", late)):
        for reason, count in Counter(call.fallback for call in those).most_common():
            say(f"{name}: {count} because {reason}")
    # A call that begins after a kill cannot be answered by the server that was killed.
    answered = [call.started_at for call in calls if call.policy is not None]
    gaps = [next((each - at for each in answered if each > at), float("inf")) for at, had_route in killed if had_route]
    return {
        "kills": len(killed),
        "kills_of_the_route": len(gaps),
        "calls": len(calls),
        "unserved": len(late),
        "fell_back": len(upstreams),
        "takeover_p50_s": sorted(gaps)[len(gaps) // 2] if gaps else 0.0,
        "takeover_most_s": max(gaps, default=0.0),
    }


@contextmanager
def _app(url: str, enough: Path, home: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", APP, url, str(enough), str(CALLERS), str(PAUSE_S), json.dumps(ASK)]
    environment = ENVIRONMENT | {"ART_PATCH_HOME": str(home)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as app:
        try:
            yield app
        finally:
            app.kill()


def _wait_for_an_answer(store: Any) -> float:
    """Wait until a policy has answered a call, and return when that call began."""
    while True:
        for run in store.read.recent(limit=20):
            for call in run.calls:
                if call.policy is not None:
                    return call.started_at
        time.sleep(0.1)
