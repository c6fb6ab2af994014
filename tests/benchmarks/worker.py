"""One variant in a process of its own, made to run by the benchmark: a line of JSON in, a line of JSON out.

In: `{"do": "calls" | "streams", "n": N, "bare_first": BOOL}`, or `{"do": "end"}`. A pair of blocks is run, N calls
with the variant off and N with it on, and their times come back: `bare` and `patched`, seconds each. Before a bare
block the variant gets time to finish what it does in the background, so that "bare" is bare.

`python -m tests.benchmarks.worker VARIANT URL HOME`
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from typing import Any

from tests.benchmarks.stub import ASK, STREAM_CHUNKS
from tests.benchmarks.variants import install

WARM_UP = 60


class Worker:
    """See the module."""

    def __init__(self, variant: str, url: str, home: str) -> None:
        import openai

        self._client = openai.OpenAI(api_key="sk-x", base_url=f"{url}/v1", max_retries=0)
        self._switch = install(variant, self._client, url, home)
        self._patched = self._switch.client or self._client
        self._made = 0
        for bare_first in (True, False):
            self.pair("calls", WARM_UP, bare_first)
            self.pair("streams", 3, bare_first)
        # An app's hundred thousand old objects would be looked at again and again, by chance in one block or another.
        gc.collect()
        gc.freeze()

    def pair(self, do: str, n: int, bare_first: bool) -> dict[str, Any]:
        """Run a bare and a patched block, in the order that is asked for."""
        blocks = {}
        for name in ("bare", "patched") if bare_first else ("patched", "bare"):
            if name == "bare":
                self._switch.settle()
                self._switch.take_off()
                client = self._client
            else:
                self._switch.put_on()
                client = self._patched
                self._made += n
            blocks[name] = _calls(client, n) if do == "calls" else _streams(client, n)
        return blocks

    def end(self) -> dict[str, Any]:
        """How many patched calls were made, and how many of them the variant has seen."""
        self._switch.settle()
        return {"made": self._made, "seen": self._switch.seen()}


def _calls(client: Any, n: int) -> dict[str, Any]:
    clock, wall = time.perf_counter, []
    cpu = time.thread_time()
    for _ in range(n):
        start = clock()
        client.chat.completions.create(**ASK)
        wall.append(clock() - start)
    return {"wall": wall, "cpu": (time.thread_time() - cpu) / n}


def _streams(client: Any, n: int) -> dict[str, Any]:
    clock, first, chunk = time.perf_counter, [], []
    for _ in range(n):
        start = clock()
        stream = iter(client.chat.completions.create(**ASK, stream=True))
        next(stream)
        began = clock()
        count = sum(1 for _ in stream)
        ended = clock()
        assert count == STREAM_CHUNKS - 1
        first.append(began - start)
        chunk.append((ended - began) / count)
    return {"first": first, "chunk": chunk}


def main() -> None:
    """Answer the benchmark's orders until it says `end`."""
    # What a peer prints must not get between our lines.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.WARNING)
    worker = Worker(*sys.argv[1:])
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        done = order["do"] == "end"
        answer = worker.end() if done else worker.pair(order["do"], order["n"], order["bare_first"])
        print(json.dumps(answer), file=replies, flush=True)
        if done:
            break


if __name__ == "__main__":
    main()
