"""The processes of `store.py`: writers that keep a pace, and apps that are going to be killed.

`python -m tests.benchmarks.store_worker pace URL NUMBER SECONDS` writes 200 calls a second in batches of 20 and prints
how long each commit took. `... apps URL UPSTREAM` imports the SDK once, then forks a patched app for each line on its
standard input, and prints what the app says.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

BATCH_EVERY_S = 0.1
CALLS_A_BATCH = 20
ACKNOWLEDGED_EVERY = 10


def pace(url: str, me: str, seconds: str) -> None:
    """Write at a fixed rate; a commit that is late does not make the next ones wait for it."""
    from art_patch.store import open_store
    from tests.benchmarks.samples import small_call

    random.seed(int(me))
    store, errors, written, took = open_store(url), 0, 0, list[float]()
    batches = [[small_call() for _ in range(CALLS_A_BATCH)] for _ in range(int(float(seconds) / BATCH_EVERY_S))]
    print("ready", flush=True)
    sys.stdin.readline()
    due = time.perf_counter() + random.random() * BATCH_EVERY_S
    for batch in batches:
        time.sleep(max(0.0, due - time.perf_counter()))
        due += BATCH_EVERY_S
        began = time.perf_counter()
        try:
            store.write([record for pair in batch for record in pair])
            written += CALLS_A_BATCH
        except Exception as error:
            print(error, file=sys.stderr)
            errors += 1
        took.append((time.perf_counter() - began) * 1e3)
    store.close()
    print(json.dumps({"errors": errors, "written": written, "took_ms": took}), flush=True)


def apps(url: str, upstream: str) -> None:
    """For each line, a number, fork an app that calls until it is killed; print its process id."""
    import openai

    import art_patch as art
    import art_patch.store.store  # so that an app's first write does not wait for SQLAlchemy, and can be interrupted

    for line in sys.stdin:
        number = line.strip()
        child = os.fork()
        if child == 0:
            art.patch(store=url, mode="record")
            client: Any = openai.OpenAI(api_key="k", base_url=upstream, max_retries=0)
            for place in range(1_000_000):
                key = f"{number}-{place}"
                with art.trajectory(id=key):
                    client.chat.completions.create(model="m", messages=[{"role": "user", "content": key}])
                say(f"called {number} {place} {time.monotonic()}")
                if place % ACKNOWLEDGED_EVERY == ACKNOWLEDGED_EVERY - 1 and art.flush(10):
                    say(f"acknowledged {number} {place} {time.monotonic()}")
                time.sleep(0.001)
        say(f"started {number} {child} {time.monotonic()}")


def say(text: str) -> None:
    """Print a line in one piece: parent and children share the pipe, and each may be killed at any moment."""
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    {"pace": pace, "apps": apps}[sys.argv[1]](*sys.argv[2:])
