"""Very many calls at once on one event loop, in a process of its own; prints one line of JSON.

`streams URL HOME N ROUNDS`: N streams that are all open before the first goes on, in turns bare and recorded; the CPU
seconds of each turn, of the whole process (the writer thread included) and of the event loop's thread.

`calls URL HOME N bare|record`: N calls gathered, all in flight at once; wall seconds, errors and peak memory. Memory
has a peak once per process, so bare and recorded need two.

A hundred connections belong to one client. Whenever anybody is done, httpx's connection pool looks at all of its
connections, once for each request that waits; with thousands in one pool little else would be measured, and any patch
would look cheap beside it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import ssl
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.benchmarks.stub import ASK, HELD_CHUNKS, allow_connections
from tests.benchmarks.variants import Switch, install

PER_CLIENT = 100


@asynccontextmanager
async def _clients(base_url: str, n: int) -> AsyncGenerator[list[Any]]:
    """Clients that can have `n` calls in flight."""
    import openai

    trust = ssl.create_default_context()  # one for all; a client of its own takes its time to make one
    async with AsyncExitStack() as stack:
        clients: list[Any] = []
        for _ in range(-(-n // PER_CLIENT)):
            pool = openai.DefaultAsyncHttpxClient(verify=trust, timeout=None)
            client = openai.AsyncOpenAI(
                api_key="sk-x", base_url=base_url, http_client=pool, timeout=None, max_retries=0
            )
            clients.append(await stack.enter_async_context(client))
        yield clients


async def streams(url: str, home: str, n: int, rounds: int) -> dict[str, Any]:
    async with _clients(f"{url}/held-{n}/v1", n) as clients:

        async def one(client: Any) -> int:
            return sum([1 async for _ in await client.chat.completions.create(**ASK, stream=True)])

        async def turn(switch: Switch | None) -> tuple[float, float]:
            process, thread = time.process_time(), time.thread_time()
            counts = await asyncio.gather(*(one(clients[number // PER_CLIENT]) for number in range(n)))
            thread = time.thread_time() - thread
            if switch is not None:
                await asyncio.to_thread(switch.settle)
            assert set(counts) == {HELD_CHUNKS}
            return time.process_time() - process, thread

        switch = install("record", clients[0], url, home)
        await turn(switch)  # opens all connections, and the store
        gc.collect()
        gc.freeze()
        bare, patched = [], []
        for number in range(rounds):
            for name in ("bare", "patched") if number % 2 else ("patched", "bare"):
                if name == "bare":
                    switch.take_off()
                    bare.append(await turn(None))
                else:
                    switch.put_on()
                    patched.append(await turn(switch))
        switch.put_on()
        assert switch.seen() == n * (rounds + 1), "not every stream was recorded"
        return {"bare": bare, "patched": patched}


async def calls(url: str, home: str, n: int, variant: str) -> dict[str, Any]:
    async with _clients(f"{url}/v1", n) as clients:
        switch = install(variant, clients[0], url, home) if variant != "bare" else None
        await clients[0].chat.completions.create(**ASK)
        start = time.perf_counter()
        made = (clients[number // PER_CLIENT].chat.completions.create(**ASK) for number in range(n))
        results = await asyncio.gather(*made, return_exceptions=True)
        wall = time.perf_counter() - start
        errors = sum(isinstance(result, BaseException) for result in results)
        if switch is not None:
            await asyncio.to_thread(switch.settle)
            errors += n + 1 - switch.seen()  # a call that is not recorded is an error too
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"wall_s": wall, "errors": errors, "peak_mib": peak_kib / 1024}


def main() -> None:
    logging.disable(logging.WARNING)
    what, url, home, n, last = sys.argv[1:]
    allow_connections(int(n))
    work = streams(url, home, int(n), int(last)) if what == "streams" else calls(url, home, int(n), last)
    print(json.dumps(asyncio.run(work)))


if __name__ == "__main__":
    main()
