"""What is lost when a process ends too early, or makes more calls than can be written.

::

    python tests/benchmarks/loss.py [--json] [--quick] [--only lost|overload|exit] [--seed N]

With `--json` the last line of stdout is one object of named figures, with `missed` listing the targets that were not
met. `--quick` takes two minutes, the whole a quarter of an hour.

Every program is real: a process of its own with a patched OpenAI SDK, a fresh home, and a real HTTP server as its
provider. A call counts as made when it returned to the program at least `MARGIN_S` (at one CPU) or `SLOW_MARGIN_S` (at
0.1 CPU) before the program ended. What was recorded is counted by opening the store afterwards, as any command does.

- `lost`: calls that were made and are not in the store. `silent`: those of them of which the program's stderr says
  nothing. `programs`: how many programs ran. Ways to end: at the end of the script on a machine with a tenth, a fifth
  and half of a CPU (a cgroup; where none is allowed, the process is stopped and continued in that proportion); SIGKILL,
  SIGTERM and `os._exit` up to two seconds after the only call; a pool that is left by `terminate`, forked and spawned;
  a server of uvicorn that gets SIGTERM just after its first request; children that are forked up to a second after the
  parent's first call, while its store opens.
- `overload_kept`: share of its calls that are recorded of a process with two threads that call without a pause, and
  of one with a thousand calls at once. `overload_mib`: what its memory peaks above the same process without the patch.
  `overload_added_us`: processor time that the patch adds to a call, recorded and spooled.
- `exit_added_ms`: median time that the patch adds to the end of a program with one call, at one CPU, on a store that
  is there; both programs in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from art_patch.errors import StoreError  # noqa: E402 - the line above makes it importable
from art_patch.store import open_store  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402

MARGIN_S = 0.02
SLOW_MARGIN_S = 0.25

TARGETS = [
    Target("lost", None, 0, "calls that ended before the process did and are not in the store"),
    Target("silent", None, 0, "lost calls of which nothing was said"),
    Target("overload_kept", 1.0, None, "recorded calls / calls of a process that calls without a pause"),
    Target("overload_mib", None, 64, "memory above the same process without the patch, MiB"),
    Target("overload_added_us", None, 150, "processor time that the patch adds to a call, microseconds"),
    Target("exit_added_ms", None, 50, "time that the patch adds to the end of a program with one call, ms"),
]

UPSTREAM = """
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": "hello"}
        body = json.dumps({
            "id": "x", "object": "chat.completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }).encode()
        head = f"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n"
        self.wfile.write(head.encode() + body)

    def log_message(self, *_):
        pass

class Server(ThreadingHTTPServer):
    request_queue_size = 1024

server = Server(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""

PRELUDE = """
import os, signal, sys, threading, time

if os.environ.get("PATCH", "1") == "1":
    import art_patch as art
    art.patch()
import openai

client = openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)

def call(text="hi"):
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
"""

ONE_CALL = (
    PRELUDE
    + """
call()
"""
)

ENDS = (
    PRELUDE
    + """
call()
time.sleep(float(sys.argv[2]))
{"SIGKILL": lambda: os.kill(os.getpid(), 9), "SIGTERM": lambda: os.kill(os.getpid(), 15), "_exit": lambda: os._exit(0)}[
    sys.argv[1]
]()
time.sleep(60)
"""
)

POOL = (
    PRELUDE
    + """
import multiprocessing

def work(number):
    call(str(number))
    time.sleep(0.05)  # the margin

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        pool.map(work, range(4))
"""
)

UVICORN = (
    PRELUDE
    + """
import uvicorn

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    call()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})

def ask():
    import urllib.request
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    urllib.request.urlopen(f"http://127.0.0.1:{port}/").read()
    time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)

server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
threading.Thread(target=ask, daemon=True).start()
server.run()
"""
)

FORKS = (
    PRELUDE
    + """
call("parent")
begun = time.monotonic()
children = []
for moment in map(float, sys.argv[1].split(",")):
    time.sleep(max(0.0, begun + moment - time.monotonic()))
    child = os.fork()
    if child == 0:
        call(f"child {moment}")
        time.sleep(0.02)
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""
)

OVERLOAD = (
    PRELUDE
    + """
import json, resource

made = [0] * 2
end = time.monotonic() + float(sys.argv[1])

def work(place):
    own = openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)
    while time.monotonic() < end:
        text = f"{place} {made[place]} " + "word " * 200
        own.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
        made[place] += 1

used = time.process_time()
threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
used = time.process_time() - used
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"made": sum(made), "cpu_s": used, "peak_mib": peak}), flush=True)
"""
)

AT_ONCE = (
    PRELUDE
    + """
import asyncio, json, resource

async def main():
    own = openai.AsyncOpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)
    calls = (
        own.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{n} " + "word " * 200}])
        for n in range(1000)
    )
    await asyncio.gather(*calls)

used = time.process_time()
asyncio.run(main())
used = time.process_time() - used
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"made": 1000, "cpu_s": used, "peak_mib": peak}), flush=True)
"""
)


class World:
    """A provider, and programs with a home of their own."""

    def __init__(self, directory: Path, upstream: str) -> None:
        self.directory = directory
        self.upstream = upstream
        self.programs = 0

    def run(
        self, code: str, *arguments: str, share: float = 1.0, home: Path | None = None, patch: bool = True
    ) -> tuple[Path, str, str, float]:
        """Run a program to its end; return its home, its output, its stderr and how long its end took."""
        self.programs += 1
        home = home or self.directory / f"home-{self.programs}"
        script = self.directory / f"program-{self.programs}.py"
        script.write_text(code)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ART_PATCH_HOME": str(home),
            "ART_PATCH_MODE": "record",
            "UPSTREAM": self.upstream,
            "PATCH": str(int(patch)),
        }
        with subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as program, throttled(program.pid, share):  # fmt: skip
            out, err = program.communicate(timeout=600)
        return home, out, err, time.time()


@contextmanager
def throttled(pid: int, share: float) -> Iterator[None]:
    """Give a process this share of one CPU, by a cgroup or by stopping and continuing it."""
    if share >= 1:
        yield
        return
    group = Path(f"/sys/fs/cgroup/cpu/art-patch-{pid}")
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text(str(int(share * 100_000)))
        (group / "tasks").write_text(str(pid))
    except OSError:
        with _stopped_in_turns(pid, share):
            yield
        return
    try:
        yield
    finally:
        for _ in range(50):
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


@contextmanager
def _stopped_in_turns(pid: int, share: float, period_s: float = 0.1) -> Iterator[None]:
    ended = threading.Event()

    def stop_and_continue() -> None:
        with suppress(ProcessLookupError):
            while not ended.wait(period_s * share):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(period_s * (1 - share))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def recorded(home: Path) -> list[str]:
    """The last message of each recorded call."""
    try:
        store = open_store(f"sqlite:///{home}/default/store.db", create=False, project="default")
    except StoreError:
        return []
    try:
        calls = [call for found in store.read.recent(limit=1_000_000) for call in found.calls]
        return [str(call.messages[-1]["content"]) for call in calls]
    finally:
        store.close()


def lost(world: World, seed: int, *, quick: bool) -> dict[str, Any]:
    """Run programs that end in many ways, and count their calls that are not recorded."""
    rng = random.Random(seed)
    many = 4 if quick else 50
    total, silent, ways = 0, 0, dict[str, int]()

    def check(way: str, made: int, home: Path, err: str) -> None:
        nonlocal total, silent
        missing = made - len(recorded(home))
        ways[f"lost_{way}"] = ways.get(f"lost_{way}", 0) + missing
        total += missing
        silent += missing if "not recorded" not in err else 0

    for share in (0.1, 0.5) if quick else (0.1, 0.2, 0.5):
        for _ in range(max(2, many // 2) if quick else many):
            home, _, err, _ = world.run(ONE_CALL, share=share)
            check(f"at_{share}_cpu", 1, home, err)
        say(f"scripts at {share} CPU: {ways}")
    for how in ("SIGKILL", "SIGTERM", "_exit"):
        for _ in range(many):
            home, _, err, _ = world.run(ENDS, how, str(MARGIN_S + rng.uniform(0, 2) ** 2 / 2))
            check(how, 1, home, err)
    for _ in range(1 if quick else many // 5):
        home, _, err, _ = world.run(ENDS, "SIGKILL", str(SLOW_MARGIN_S), share=0.1)
        check("SIGKILL_at_0.1_cpu", 1, home, err)
    say(f"ended by signals: {ways}")
    for method in ("fork", "spawn"):
        for _ in range(1 if quick else many // 5):
            home, _, err, _ = world.run(POOL, method)
            check(f"pool_{method}", 4, home, err)
    for _ in range(1 if quick else many // 5):
        home, _, err, _ = world.run(UVICORN)
        check("uvicorn", 1, home, err)
    say(f"pools and servers: {ways}")
    moments = sorted(rng.uniform(0, 1) for _ in range(10 if quick else 50))
    home, _, err, _ = world.run(FORKS, ",".join(f"{moment:.3f}" for moment in moments))
    check("fork", 1 + len(moments), home, err)
    return {"lost": total, "silent": silent, "programs": world.programs, **ways}


def overload(world: World, *, quick: bool) -> dict[str, Any]:
    """Run processes that make more calls than the store takes, with and without the patch."""
    figures: dict[str, Any] = {}
    kept, above, added = [], [], []
    for name, code, arguments in (
        ("threads", OVERLOAD, [str(10 if quick else 120)]),
        ("at_once", AT_ONCE, []),
    ):
        _, out, _, _ = world.run(code, *arguments, patch=False)
        bare = json.loads(out)
        home, out, err, _ = world.run(code, *arguments)
        ours = json.loads(out)
        kept.append(len(recorded(home)) / ours["made"])
        above.append(ours["peak_mib"] - bare["peak_mib"])
        added.append((ours["cpu_s"] / ours["made"] - bare["cpu_s"] / bare["made"]) * 1e6)
        figures |= {
            f"overload_{name}_calls": ours["made"],
            f"overload_{name}_calls_unpatched": bare["made"],
            f"overload_{name}_kept": kept[-1],
            f"overload_{name}_mib": above[-1],
            f"overload_{name}_added_us": added[-1],
        }
        say(f"{name}: {figures} {err}")
    return {
        "overload_kept": min(kept), "overload_mib": max(above), "overload_added_us": added[0], **figures,
    }  # fmt: skip


def at_exit(world: World, *, quick: bool) -> dict[str, Any]:
    """Time the end of a program with one call, from the return of the call to the end of the process."""
    code = ONE_CALL + "print(time.time(), flush=True)\n"
    home = world.directory / "home-of-exits"
    world.run(ONE_CALL, home=home)
    recorded(home)
    took: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(5 if quick else 20):
        for patch in (True, False):
            _, out, _, ended = world.run(code, home=home, patch=patch)
            took[patch].append((ended - float(out)) * 1000)
    return {"exit_added_ms": statistics.median(took[True]) - statistics.median(took[False])}


def main() -> None:
    """Parse the options, measure, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="fewer programs, shorter")
    parser.add_argument("--only", choices=("lost", "overload", "exit"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen([sys.executable, "-c", UPSTREAM], stdout=subprocess.PIPE, text=True) as upstream,
    ):
        try:
            assert upstream.stdout is not None
            world = World(Path(directory), f"http://127.0.0.1:{upstream.stdout.readline().strip()}/v1")
            if options.only in (None, "lost"):
                figures |= lost(world, options.seed, quick=options.quick)
            if options.only in (None, "overload"):
                figures |= overload(world, quick=options.quick)
            if options.only in (None, "exit"):
                figures |= at_exit(world, quick=options.quick)
        finally:
            upstream.kill()
    finish(figures, TARGETS, as_json=options.json)


if __name__ == "__main__":
    main()
