"""What an attacker reaches on `serve`, `proxy` and `feedback serve`, and what the attempts cost the other callers.

::

    python tests/benchmarks/attacks.py [--json]

With `--json` the last line of stdout is one object of named metrics, with `missed` listing the targets that were not
met. About two minutes.

- `attacks`, `succeeded`, `answers_500`: the attacks of `tests/support/attacked.py` on the three servers as processes.
- `engine_mib`, `proxy_mib`, `feedback_mib`: highest memory of the process above that before, under eight bodies of 64
  MiB at once, with and without a length; for the proxy also under a bomb of 300 MiB in 300 kB from upstream.
- `engine_large_mib` and so on: the same under eight bodies of almost 16 MiB at once that are accepted in size: text,
  lists of lists, wide characters, escapes, a great many messages.
- `app_mib`: the same for a patched app whose engine sends it that bomb, whole and streamed.
- `p99_ratio`: p99 of a proper request's time while 2,000 connections hold half a header, by p99 before; the worst of
  the three servers. `half_open_mib`: what these connections add to a server's memory, likewise.
"""

from __future__ import annotations

import argparse
import gzip
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.attacked import (  # noqa: E402 - the lines above make it importable
    CHAT,
    PROXY_KEY,
    Attacked,
    Upstream,
    attacked_feedback,
    attacked_proxy,
    attacked_serve,
)
from tests.support.attacks import JSON, Attack, Tally, answers, attempt, request  # noqa: E402
from tests.support.benchmark_report import Target, finish, percentile, say  # noqa: E402
from tests.support.tiny import make_tiny_adapter, make_tiny_model  # noqa: E402

TARGETS = (
    Target("attacks", 450, None, "attacks on the three servers"),
    Target("succeeded", None, 0, "attacks that changed or read something"),
    Target("answers_500", None, 0, "answers of 500"),
    *(Target(f"{name}_mib", None, 100, f"added memory of {name}") for name in ("engine", "proxy", "feedback", "app")),
    Target("half_open_mib", None, 100, "added memory of a server with 2,000 half-open connections"),
    Target("p99_ratio", None, 2, "p99 of others under 2,000 half-open connections, by p99 before"),
)
HALF_OPEN, CALLS = 2_000, 400
BOMB = gzip.compress(bytes(300 << 20))


def main() -> None:
    parser = argparse.ArgumentParser(description="What an attacker reaches, and what it costs the others.")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    as_json: bool = parser.parse_args().json
    metrics: dict[str, float] = {"attacks": 0, "succeeded": 0, "answers_500": 0, "p99_ratio": 0, "half_open_mib": 0}
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        base = make_tiny_model(home / "base", hidden=32, vocab_size=320)
        for step in (1, 2):
            make_tiny_adapter(home / "adapters", base, "agent", step, seed=step)
        upstream = Upstream()
        worlds = {
            "engine": partial(attacked_serve, base, home / "adapters", home / "serve"),
            "proxy": partial(attacked_proxy, _made(home / "proxy"), upstream),
            "feedback": partial(attacked_feedback, _made(home / "feedback")),
        }
        for name, world in worlds.items():
            with world() as server:
                tally = attempt(server.port, server.attacks, server.state)
                _tell(name, tally)
                metrics["attacks"] += tally.attacks
                metrics["succeeded"] += len(tally.succeeded) + len(tally.crashed)
                metrics["answers_500"] += len(tally.answers_500)
                ratio, half_open = _half_open_cost(server)
                metrics["p99_ratio"] = max(metrics["p99_ratio"], ratio)
                metrics["half_open_mib"] = max(metrics["half_open_mib"], half_open)
                before = _mib(server.process.pid, "VmRSS")
                huge, large = _bodies(server)
                metrics[f"{name}_mib"] = _added(server, before, huge)
                if name == "proxy":
                    metrics["proxy_mib"] = max(metrics["proxy_mib"], _bombed(server, upstream, before))
                metrics[f"{name}_large_mib"] = _added(server, before, large)
        upstream.close()
        metrics["app_mib"] = _app_mib(home)
    finish(metrics, TARGETS, as_json=as_json)


def _made(home: Path) -> Path:
    home.mkdir()
    return home


def _tell(name: str, tally: Tally) -> None:
    say(f"{name}: {tally.attacks} attacks")
    for what in (*tally.succeeded, *tally.answers_500, *tally.crashed):
        say(f"  {what}")


def _mib(pid: int, field: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise ValueError(field)


def _bodies(server: Attacked) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Requests with bodies of 64 MiB, and of what a server takes."""
    right = [JSON, ("x-art-key", PROXY_KEY)]
    path = CHAT if server.name != "feedback" else server.proper.split()[1].decode()
    ask = partial(request, "POST", path)
    length, most = 64 << 20, (16 << 20) - 200
    piece = b"%x\r\n%b\r\n" % (1 << 20, b"a" * (1 << 20))
    chunked = ask([*right, ("transfer-encoding", "chunked")])
    text = '{"model": "agent@0", "messages": [{"role": "user", "content": "%s"}]}'
    huge = {
        "64 MiB announced": ask([*right, ("content-length", str(length))]) + b"a" * length,
        "64 MiB in chunks": chunked + piece * 64 + b"0\r\n\r\n",
    }
    large = {
        "16 MiB in chunks": chunked + piece * 15 + b"0\r\n\r\n",
        "lists": ask(right, b"[" + b"[]," * (most // 3) + b"[]]"),
        "text": ask(right, text % ("a" * most)),
        "wide text": ask(right, text % ("\U0001f600" + "a" * most)),
        "escapes": ask(right, text % ("\\u20ac" * (most // 6))),
        "many messages": ask(right, text.replace("%s", '"}, {"role": "user", "content": "' * 100_000)),
    }
    return huge, large


def _added(server: Attacked, before: float, bodies: dict[str, bytes]) -> float:
    """The most memory above `before` while eight callers send each of these at once."""
    pid, worst = server.process.pid, 0.0
    with ThreadPoolExecutor(8) as pool:
        for name, data in bodies.items():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark begins anew
            got = list(pool.map(lambda _, data=data: answers(server.port, Attack("", data), timeout_s=120), range(8)))
            added = _mib(pid, "VmHWM") - before
            say(f"  {name}: {sorted({status for each in got for status, _ in each})}, {added:+.0f} MiB")
            worst = max(worst, added)
    return worst


def _bombed(proxy: Attacked, upstream: Upstream, before: float) -> float:
    """The same for the bomb as upstream's answer, whole and streamed."""
    pid, right = proxy.process.pid, [JSON, ("x-art-key", PROXY_KEY), ("accept-encoding", "gzip")]
    upstream.answer = _bomb
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    for body in ('{"model": "m", "messages": []}', '{"model": "m", "messages": [], "stream": true}'):
        got = answers(proxy.port, Attack("", request("POST", CHAT, right, body)))
        say(f"  bomb from upstream: {[status for status, _ in got]}")
    time.sleep(2)  # what is recorded of it is unpacked later
    upstream.answer = None
    say(f"  bombs from upstream: {(added := _mib(pid, 'VmHWM') - before):+.0f} MiB")
    return added


def _bomb(handler: BaseHTTPRequestHandler) -> bytes:
    handler.send_response(200)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-encoding", "gzip")
    return BOMB


@contextmanager
def _half_open(port: int) -> Iterator[None]:
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(HALF_OPEN)]
    for sock in sockets:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    try:
        yield
    finally:
        for sock in sockets:
            sock.close()


def _half_open_cost(server: Attacked) -> tuple[float, float]:
    """The ratio of p99 with half-open connections to that without, and the memory that they add."""
    pid = server.process.pid
    quiet, memory = _p99_s(server), _mib(pid, "VmRSS")
    with _half_open(server.port):
        during, added = _p99_s(server), _mib(pid, "VmRSS") - memory
    say(f"  half-open: p99 {quiet * 1000:.1f} -> {during * 1000:.1f} ms, {added:+.0f} MiB")
    return during / quiet, added


def _p99_s(server: Attacked) -> float:
    took: list[float] = []
    for _ in range(CALLS):
        began = time.perf_counter()
        ((status, _),) = answers(server.port, Attack("", server.proper))
        assert status == 200
        took.append(time.perf_counter() - began)
    return percentile(took, 0.99)


_APP = """
import json, sys, art_patch as art
from openai import OpenAI
from pathlib import Path
def mib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
upstream, home = sys.argv[1:]
art.patch(mode="route", home=home)
client = OpenAI(base_url=upstream, api_key="x", max_retries=0)
ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
client.chat.completions.create(**ask)
Path("/proc/self/clear_refs").write_text("5")
before = mib("VmRSS")
for stream in (False, True, False, True):
    answer = client.chat.completions.create(**ask, stream=stream)
    assert not stream or list(answer) is not None
art.flush(10)
print(mib("VmHWM") - before, art.status().fallbacks)
"""


def _app_mib(home: Path) -> float:
    from art_patch.store import open_store

    engine, upstream = Upstream(), Upstream()
    engine.answer = _bomb
    directory = home / "app" / "default"
    directory.mkdir(parents=True)
    store = open_store(f"sqlite:///{directory}/store.db")
    store.ledger.add_base("agent@0", "/models/tiny", "0" * 64, who="benchmark")
    store.ledger.set_engine(f"{engine.url}/v1", who="benchmark")
    store.close()
    done = subprocess.run(
        [sys.executable, "-c", _APP, f"{upstream.url}/v1", str(home / "app")],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    added, fallbacks = map(float, done.stdout.split())
    say(f"app: {added:+.0f} MiB, {fallbacks:g} calls fell back, {len(engine.paths)} asked the engine")
    assert engine.paths
    engine.close()
    upstream.close()
    return added


if __name__ == "__main__":
    main()
