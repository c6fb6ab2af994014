"""More callers than the engine has room for: what each of them waits, and what the engine still answers.

::

    python tests/benchmarks/overload_engine.py [--json] [--seconds S]

Progress goes to stderr; with `--json` the last line of stdout is one object of named metrics, with `missed` listing the
targets that were not met; without it, a table. Half a minute.

How it is measured:

- The engine is `art-patch serve --engine embedded --threads 1` in a process of its own, which decodes 64 answers at
  once, with a random Qwen3 of 0.15 M parameters and answers of 64 to 192 tokens. The callers are coroutines of this
  process with patched clients; the upstream, a third process, answers at once. Who was answered by the engine asks
  again at once, who was answered by upstream after some seconds: else this process would do nothing but ask upstream,
  and the engine's answers would lie unread. If there are two cores, one is the engine's, so that the callers' own work
  does not pass for the engine's.
- Calls a second are counted from the third second on, when the queue is there; times are those of all calls.
- `full_calls_s`: calls a second that the engine answers to 64 callers, beside 336 that ask upstream only, so that the
  machine has the same work; `full_p99_s`: 99th percentile of their times. `alone_calls_s`: the same without the 336.
- `busy_calls_s`, `busy_p99_s`: with 400 callers, the calls a second that the engine answers, and the 99th percentile
  of all calls; `busy_engine_p99_s` of those that the engine answered. `busy_share_kept`: of `full_calls_s`.
- `busy_errors`: exceptions that callers got. `busy_engine_full`: calls that went upstream because the engine was full;
  `busy_other_reasons`: calls that went upstream for another reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sqlite3
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import openai  # noqa: E402 - the line above makes ours importable

import art_patch as art  # noqa: E402
from art_patch.types import ENGINE_FULL  # noqa: E402
from tests.support.benchmark_report import Target, finish, percentile, say  # noqa: E402

TARGETS = (
    Target("busy_p99_s", None, 3, "99th percentile of all calls, 400 callers, s"),
    Target("busy_share_kept", 0.95, None, "calls/s of the engine, 400 callers / 64"),
    Target("busy_errors", None, 0, "callers' exceptions"),
)

ASK: dict[str, Any] = {
    "model": "gpt-x",
    "messages": [{"role": "user", "content": "Where is my parcel?"}],
    "extra_body": {"ignore_eos": True},
}
PER_CLIENT = 50
CORES = sorted(os.sched_getaffinity(0))
PAUSE_S, RAMP_S = 8.0, 2.0
REASONS = "SELECT fallback, count(*) FROM calls WHERE fallback IS NOT NULL GROUP BY fallback"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each stretch")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        metrics = measure(Path(home), arguments.seconds)
    finish(metrics, TARGETS, as_json=arguments.json)


def measure(home: Path, seconds: float, *, most: int = 64, callers: int = 400) -> dict[str, Any]:
    """The figures of the module's docstring."""
    logging.disable(logging.WARNING)
    with engine(home) as _, upstream() as url:
        os.sched_setaffinity(0, CORES[1:2] or CORES)
        with art.patch(project="bench", home=home, mode="route"):
            asyncio.run(stretch(url, most, 1.0))
            alone = asyncio.run(stretch(url, most, seconds))
            say(f"{most} callers: {alone[1]}")
            full = asyncio.run(stretch(url, callers, seconds, of_upstream=callers - most))
            say(f"{most} callers, and {callers - most} of upstream: {full[1]}")
            busy = asyncio.run(stretch(url, callers, seconds))
            assert art.flush(60)
            say(f"{callers} callers: {busy[1]} {art.status().degraded}")
        reasons = Counter(dict(sqlite3.connect(home / "bench" / "store.db").execute(REASONS).fetchall()))
        say(f"went upstream: {reasons}")
    (full_times, full_who, _), (busy_times, busy_who, errors) = full, busy
    alone_who = alone[1]
    everybody = [each for times in busy_times.values() for each in times]
    return {
        "alone_calls_s": alone_who["engine"] / seconds,
        "full_calls_s": full_who["engine"] / seconds,
        "full_p99_s": percentile(full_times["engine"], 0.99),
        "busy_calls_s": busy_who["engine"] / seconds,
        "busy_upstream_calls_s": busy_who["upstream"] / seconds,
        "busy_p99_s": percentile(everybody, 0.99),
        "busy_engine_p99_s": percentile(busy_times["engine"] or [0.0], 0.99),
        "busy_share_kept": busy_who["engine"] / full_who["engine"],
        "busy_errors": sum(errors.values()),
        "busy_engine_full": reasons.pop(ENGINE_FULL, 0),
        "busy_other_reasons": sum(reasons.values()),
    }


async def stretch(
    url: str, callers: int, seconds: float, *, of_upstream: int = 0
) -> tuple[dict[str, list[float]], Counter[str], Counter[str]]:
    """Callers that ask again and again; the times of the calls and their number by who answered, and the errors.

    The last `of_upstream` callers are not patched.
    """
    trust = ssl.create_default_context()
    clients = [
        openai.AsyncOpenAI(
            api_key="sk-x", base_url=url, max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=trust, timeout=None),
        )
        for _ in range(-(-callers // PER_CLIENT))
    ]  # fmt: skip
    times: dict[str, list[float]] = {"engine": [], "upstream": []}
    counts: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    # By call and not by caller: of a caller with short answers the engine answers more calls where none waits.
    lengths = count()
    start = time.perf_counter()
    counted_from, end = start + RAMP_S, start + RAMP_S + seconds

    async def call(number: int) -> None:
        client = clients[number // PER_CLIENT]
        while (began := time.perf_counter()) < end:
            try:
                with art.suppress() if number >= callers - of_upstream else nullcontext():
                    answer = await client.chat.completions.create(**ASK, max_tokens=64 + 37 * next(lengths) % 129)
            except Exception as error:
                errors[type(error).__name__] += 1
            else:
                who = "engine" if answer.system_fingerprint == "agent@0" else "upstream"
                times[who].append(time.perf_counter() - began)
                counts[who] += counted_from <= time.perf_counter() < end
                await asyncio.sleep((0.5 + number % 17 / 16) * PAUSE_S if who == "upstream" else 0)

    await asyncio.gather(*map(call, range(callers)))
    for client in clients:
        await client.close()
    return times, counts, errors


@contextmanager
def engine(home: Path) -> Iterator[str]:
    """`art-patch serve` on a core of its own, until the block ends."""
    from tests.support.tiny import make_tiny_model

    command = [sys.executable, "-m", "art_patch", "serve", "--engine", "embedded", "--threads", "1", "--json"]
    command += ["--base", str(make_tiny_model(home / "base")), "--home", str(home), "--project", "bench", "--port", "0"]
    with _process(command, core=0) as first_line:
        yield json.loads(first_line)["base_url"]


@contextmanager
def upstream() -> Iterator[str]:
    """A provider that answers at once."""
    with _process([sys.executable, "-m", "tests.benchmarks.stub"], core=1) as port:
        yield f"http://127.0.0.1:{int(port)}/v1"


@contextmanager
def _process(command: list[str], core: int) -> Iterator[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    process = subprocess.Popen(command, **pipes)
    os.sched_setaffinity(process.pid, CORES[core : core + 1] or CORES)  # at once: threads inherit it
    try:
        assert process.stdout is not None
        yield process.stdout.readline()
    finally:
        process.terminate()
        process.communicate()


if __name__ == "__main__":
    main()
