"""How many calls are lost when processes end early, in any way, or make more calls than they can record.

::

    python tests/benchmarks/loss.py [--json] [--full] [--only ends,pools,forks,overload,exit]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met; without it, a table. About seven minutes; with `--full` ten times as many
scripts.

How it is measured:

- Each app is a process of its own with a fresh store, whose calls a server in another process answers at once. The app
  writes the time at which each call ended to a file. When the app has ended, what it left in the spool is taken over,
  and the calls in the store are compared with those of that file.
- A call counts if it had ended `MARGIN_S` before the process did, in wall time; with a tenth of a CPU, `SLOW_MARGIN_S`.
  `lost`: such calls that are not in the store. `silent`: of these, the ones that no line on stderr told of.
- `ends`: one call, then the end of the program, with 0.1, 0.2 and 0.5 CPU (a cgroup, or where none may be made, SIGSTOP
  and SIGCONT in turns); or SIGTERM, SIGKILL or `os._exit` from 0 to 2 s later, with a whole CPU. `pools`: `with Pool`,
  spawned and forked, which ends its workers by SIGTERM; `uvicorn --reload`. `forks`: a fork at a moment from 0 to 1 s
  after the first call; parent and child make a call each.
- `overload_kept`: of the calls that two threads make without a pause, those that are in the store after the next
  process has taken over what was left; and of 1,000 asynchronous calls at once. `overload_mib`: the process's peak of
  memory above that of the same unpatched. `overload_added_us`: the time of the process per call (1 / calls a second)
  above that of the same unpatched; the two run half a second each in turns, and this is the median of the pairs.
  `overload_said`: calls that were counted as dropped.
- `exit_added_ms`: from the last line of a script with one call to its end, median, above that of the same unpatched.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from art_patch.recording import take_over  # noqa: E402 - the line above makes ours importable
from art_patch.settings import Settings  # noqa: E402
from art_patch.store import open_store  # noqa: E402
from tests.support.benchmark_report import Target, finish, say  # noqa: E402

TARGETS = (
    Target("lost", None, 0, "calls that are not in the store"),
    Target("silent", None, 0, "of these, not told of"),
    Target("overload_kept", 1, None, "of two threads' calls without a pause"),
    Target("overload_async_kept", 1, None, "of 1,000 asynchronous calls at once"),
    Target("overload_mib", None, 64, "peak of memory above unpatched, MiB"),
    Target("overload_added_us", None, 150, "added to the process's time per call, microseconds"),
    Target("exit_added_ms", None, 50, "added to the exit of a script, ms"),
)
MARGIN_S, SLOW_MARGIN_S = 0.02, 0.25
# The first seconds of a process are not timed: there the store's packages are imported, once. Then it is stopped while
# the other one runs.
WARM_UP_S, TURN_S = 4, 0.5

PRELUDE = """
import os, sys, time
import openai
if os.environ["PATCHED"] == "1":
    import art_patch
    art_patch.patch(mode="record")
client = openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)

def note(name):
    ended = os.open(os.environ["ENDED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(ended, f"{name} {time.monotonic()}\\n".encode())
    os.close(ended)

def call(name):
    client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": str(name)}])
    note(name)
"""

ENDS = {
    "end": "call('one')",
    "sigterm": "call('one'); time.sleep(float(sys.argv[1])); os.kill(os.getpid(), 15); time.sleep(9)",
    "sigkill": "call('one'); time.sleep(float(sys.argv[1])); os.kill(os.getpid(), 9); time.sleep(9)",
    "os._exit": "call('one'); time.sleep(float(sys.argv[1])); os._exit(0)",
}

POOL = """
import multiprocessing
def work(number):
    call(number)
if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        pool.map(work, range(6))
        time.sleep(0.03)
"""

RELOADED = """
import threading
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    call(f"{os.getpid()}-{time.monotonic()}")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})
"""

FORK = """
import threading
# The SDK and the socket import and ask for these at the first use, under locks that a forked child would wait for,
# patched or not.
client.chat.completions, client.default_headers, "host".encode("idna")
threading.Thread(target=call, args=("first",)).start()
time.sleep(float(sys.argv[1]))
child = os.fork()
# A client of its own, as the threads of the parent may hold the locks of the other one.
client = openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)
call("child" if child == 0 else "parent")
if child == 0:
    time.sleep(0.03)
    os._exit(0)
os.waitpid(child, 0)
"""

OVERLOAD = """
import json, mmap, struct, threading
seconds, numbers = float(sys.argv[1]), open("made", "r+b")
made = mmap.mmap(numbers.fileno(), 16)
def client_of(place):
    until, calls = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": f"{place} {calls}"}])
        calls += 1
        struct.pack_into("q", made, place, calls)
threads = [threading.Thread(target=client_of, args=(place,)) for place in (0, 8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
dropped = 0
if os.environ["PATCHED"] == "1":
    dropped = art_patch.status().dropped
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([sum(struct.unpack("qq", made)), peak, dropped]), flush=True)
"""

ASYNC = """
import asyncio
async def main():
    async with openai.AsyncOpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0) as many:
        await asyncio.gather(*[many.chat.completions.create(
            model="gpt-x", messages=[{"role": "user", "content": f"async {number}"}]) for number in range(1000)])
asyncio.run(main())
"""

EXIT = "call('one'); note('exit')"


class App:
    """An app that has ended: when its calls did, when it did, what it said and what the store has."""

    def __init__(self, home: Path, said: str, out: str, calls: dict[str, float], ended: float) -> None:
        self.home, self.said, self.out, self.calls, self.ended = home, said, out, calls, ended
        settings = Settings(home=home)
        with closing(open_store(settings.store_url, project="default")) as store:
            take_over(settings, lambda: store)
            found = store.read.recent(limit=1_000_000)
            self.stored = {str(call.messages[-1]["content"]) for run in found for call in run.calls}

    def lost(self, margin_s: float) -> list[str]:
        """The calls that had ended so long before the process did, and are not in the store."""
        return [name for name, at in self.calls.items() if at <= self.ended - margin_s and name not in self.stored]


def run(
    upstream: str,
    code: str,
    *arguments: str,
    patched: bool = True,
    cpu: float | None = None,
    command: list[str] | None = None,
    meanwhile: Callable[[subprocess.Popen[str], Path], None] | None = None,
) -> App:
    """Run an app and return how it ended."""
    home = Path(tempfile.mkdtemp(prefix="loss-"))
    (home / "app.py").write_text(PRELUDE + code)
    (home / "made").write_bytes(bytes(16))
    environment = os.environ | {
        "PATCHED": str(int(patched)), "UPSTREAM": upstream, "ENDED": str(home / "ended"), "ART_PATCH_HOME": str(home),
        "PYTHONPATH": f"{ROOT}:{home}",
    }  # fmt: skip
    with limited(cpu) as (start, throttle):
        process = subprocess.Popen(
            [*start, *(command or [sys.executable, str(home / "app.py")]), *arguments],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=home,
        )  # fmt: skip
        throttle(process)
        if meanwhile is not None:
            meanwhile(process, home)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        ended = time.monotonic()
        out, said = process.communicate()
    time.sleep(0.1)  # for its children
    lines = (home / "ended").read_text().splitlines() if (home / "ended").exists() else []
    calls = {name: float(at) for name, at in (line.rsplit(" ", 1) for line in lines)}
    return App(home, said, out, calls, ended)


_groups = itertools.count()


@contextmanager
def limited(cpu: float | None) -> Iterator[tuple[list[str], Callable[[subprocess.Popen[str]], None]]]:
    """Give a command that starts a program with a share of a CPU, or a function that slows it down."""
    group = Path(f"/sys/fs/cgroup/cpu/loss-{os.getpid()}-{next(_groups)}")
    if cpu is None:
        yield [], lambda process: None
        return
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text(str(int(cpu * 100_000)))
    except OSError:
        with suppress(OSError):
            group.rmdir()
        yield [], lambda process: slowed(process, cpu)
        return
    try:
        yield ["sh", "-c", f'echo $$ > {group}/tasks; exec "$@"', "sh"], lambda process: None
    finally:
        with suppress(OSError):
            group.rmdir()


def slowed(process: subprocess.Popen[str], cpu: float) -> None:
    """Let the process run for a share of each tenth of a second, until it has ended."""
    while process.poll() is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.1 * (1 - cpu))
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1 * cpu)


class Losses:
    """Calls that were counted, and those that were lost."""

    def __init__(self) -> None:
        self.counted = self.lost = self.silent = 0

    def add(self, what: str, app: App, margin_s: float = MARGIN_S) -> None:
        """Count the calls of one app."""
        lost = app.lost(margin_s)
        self.counted += sum(at <= app.ended - margin_s for at in app.calls.values())
        self.lost += len(lost)
        told = sum(int(number) for number in re.findall(r"(\d+) calls? not recorded", app.said))
        self.silent += max(0, len(lost) - told)
        if lost or not app.calls:
            say(f"  {what}: lost {lost} of {len(app.calls)}; it said: {app.said[-600:]}")


def ends(upstream: str, number: int, losses: Losses) -> None:
    """One-call scripts that end by themselves on a slow machine, and by all means on a fast one."""
    for cpu in (0.1, 0.2, 0.5):
        # As many at once as one CPU has shares.
        with ThreadPoolExecutor(int(1 / cpu)) as pool:
            few = [(way, 0.3 + 1.5 * turn / number) for way in ("sigterm", "sigkill") for turn in range(number // 5)]
            jobs = [("end", 0.0)] * number + few
            apps = pool.map(lambda job, cpu=cpu: run(upstream, ENDS[job[0]], str(job[1]), cpu=cpu), jobs)
            for (way, _), app in zip(jobs, apps, strict=True):
                losses.add(f"{way} at {cpu} CPU", app, 0.0 if way == "end" and cpu >= 0.2 else SLOW_MARGIN_S)
        say(f"ends at {cpu} CPU: {losses.lost} of {losses.counted} lost")
    for way in ("sigterm", "sigkill", "os._exit"):
        for turn in range(number):
            delay_s = 2.0 * turn / number
            losses.add(f"{way} after {delay_s} s", run(upstream, ENDS[way], str(delay_s)))
    say(f"ends: {losses.lost} of {losses.counted} lost")


def pools(upstream: str, number: int, losses: Losses) -> None:
    """Process pools, and a server that reloads."""
    for turn in range(number):
        losses.add("pool", run(upstream, POOL, ("spawn", "fork")[turn % 2]))
    for turn in range(max(1, number // 5)):
        losses.add("uvicorn --reload", run(upstream, RELOADED, command=server(turn), meanwhile=use), MARGIN_S)
    say(f"pools: {losses.lost} of {losses.counted} lost")


def server(turn: int) -> list[str]:
    """The command of a server that reloads."""
    return [
        sys.executable,
        "-m",
        "uvicorn",
        "app:app",
        "--reload",
        "--port",
        str(18_700 + turn),
        "--log-level",
        "error",
    ]


def use(process: subprocess.Popen[str], home: Path) -> None:
    """Ask the server, change its file, ask again, stop it at once."""
    from urllib.request import urlopen

    port = str(process.args).rpartition("'--port', '")[2].partition("'")[0]  # pyright: ignore
    for turn in range(4):
        for _ in range(3):
            end = time.monotonic() + 30
            while time.monotonic() < end:
                with suppress(OSError):
                    urlopen(f"http://127.0.0.1:{port}/", timeout=10).read()
                    break
                time.sleep(0.05)
        with (home / "app.py").open("a") as file:
            file.write(f"# {turn}\n")
        time.sleep(0.5 if turn < 3 else MARGIN_S)
    process.send_signal(signal.SIGINT)


def forks(upstream: str, number: int, losses: Losses) -> None:
    """Forks while the first call is made, the threads import, and the store is opened."""
    for turn in range(number):
        losses.add(f"fork after {turn / number} s", run(upstream, FORK, str(turn / number)))
    say(f"forks: {losses.lost} of {losses.counted} lost")


def overload(upstream: str, seconds: float) -> dict[str, float]:
    """Two threads without a pause, unpatched and patched in turns; and many asynchronous calls at once."""
    turns = threading.Barrier(2)
    took_us: dict[bool, list[float]] = {True: [], False: []}
    apps: dict[bool, App] = {}

    def one(patched: bool) -> None:
        # A process is stopped while it is the other one's turn, so its clock runs on: twice the seconds.
        apps[patched] = run(
            upstream, OVERLOAD, str(2 * seconds), patched=patched,
            meanwhile=lambda process, home: in_turns(process, home, patched),
        )  # fmt: skip

    def in_turns(process: subprocess.Popen[str], home: Path, patched: bool) -> None:
        time.sleep(WARM_UP_S)
        process.send_signal(signal.SIGSTOP)
        try:
            for turn in range(2 * int((seconds - WARM_UP_S) / TURN_S)):
                turns.wait(60)  # not for ever, if the other process has failed
                if turn % 2 == patched:
                    before, since = made(home), time.monotonic()
                    process.send_signal(signal.SIGCONT)
                    time.sleep(TURN_S)
                    process.send_signal(signal.SIGSTOP)
                    took_us[patched].append(1e6 * (time.monotonic() - since) / max(1, made(home) - before))
        finally:
            process.send_signal(signal.SIGCONT)

    both = [threading.Thread(target=one, args=(patched,)) for patched in (False, True)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    (_, bare_peak, _), (calls, peak, dropped) = (json.loads(apps[patched].out) for patched in (False, True))
    many = run(upstream, ASYNC)
    return {
        "overload_calls": calls,
        "overload_kept": len(apps[True].stored) / calls,
        "overload_said": dropped,
        "overload_mib": (peak - bare_peak) / 1024,
        "overload_added_us": statistics.median(
            with_us - without_us for without_us, with_us in zip(took_us[False], took_us[True], strict=True)
        ),
        "overload_bare_us": statistics.median(took_us[False]),
        "overload_async_kept": len(many.stored) / 1000,
    }


def made(home: Path) -> int:
    """The number of calls that the app's threads have made."""
    return sum(struct.unpack("qq", (home / "made").read_bytes()))


def exits(upstream: str, number: int) -> dict[str, float]:
    """The time from the last line of a script to its end."""
    took: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(number):
        for patched in (True, False):
            app = run(upstream, EXIT, patched=patched)
            took[patched].append(1000 * (app.ended - app.calls["exit"]))
    return {
        "exit_ms": statistics.median(took[True]),
        "exit_added_ms": statistics.median(took[True]) - statistics.median(took[False]),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--full", action="store_true", help="50 scripts of each kind, 120 s of overload")
    parser.add_argument("--only", default="ends,pools,forks,overload,exit")
    arguments = parser.parse_args()
    chosen, number = arguments.only.split(","), 50 if arguments.full else 5
    stub = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.stub"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert stub.stdin is not None and stub.stdout is not None
    upstream, losses, metrics = f"http://127.0.0.1:{stub.stdout.readline().split()[0]}/v1", Losses(), dict[str, float]()
    try:
        for name, measure in (("ends", ends), ("pools", pools), ("forks", forks)):
            if name in chosen:
                measure(upstream, number, losses)
        if losses.counted:
            metrics = {"counted": losses.counted, "lost": losses.lost, "silent": losses.silent}
        if "overload" in chosen:
            metrics |= overload(upstream, 120.0 if arguments.full else 20.0)
        if "exit" in chosen:
            metrics |= exits(upstream, 15 if arguments.full else 5)
    finally:
        stub.stdin.close()
        stub.wait()
    finish(metrics, TARGETS, as_json=arguments.json)


if __name__ == "__main__":
    main()
