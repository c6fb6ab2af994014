"""The patched SDK between an upstream and a local engine, and a sink that keeps what was recorded."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from art_patch.patching import control, flush, status
from art_patch.patching.runtime import Runtime
from art_patch.settings import Settings
from art_patch.types import Call, Record, Route
from tests.support.servers import StubServer

CHAMPION = "shop@3"


class Sink:
    """Keeps records in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, records: Sequence[Record]) -> None:
        self.records += records

    @property
    def calls(self) -> list[Call]:
        """The calls so far, everything queued included."""
        gc.collect()
        assert flush(10)
        return [record for record in self.records if isinstance(record, Call)]

    @property
    def call(self) -> Call:
        """The only call."""
        (call,) = self.calls
        return call


class Bench:
    """Everything a test of the patch needs."""

    def __init__(self, upstream: StubServer, local: StubServer) -> None:
        self.upstream = upstream
        self.local = local
        self.sink = Sink()
        self.expects_faults = False
        self.route = Route(champion=CHAMPION, base_url=local.url)

    def patch(self, **changes: Any) -> Runtime:
        """Patch the SDK; the route is read anew at each poll."""
        # A busy machine may need longer than a quarter of a second to accept a connection.
        given = {
            "flush_interval_s": 0.005,
            "timeout_s": 5.0,
            "first_token_timeout_s": 5.0,
            "poll_interval_s": 0.05,
            "connect_timeout_s": 2.0,
        }
        settings = Settings(**given | changes)
        return control.start(settings, open_sink=lambda: self.sink, read_route=lambda *_: self.route)


async def cancelled_when_seen(server: StubServer, call: Coroutine[Any, Any, Any]) -> None:
    """Cancel the call as soon as the server has its request."""
    task = asyncio.create_task(call)
    async with asyncio.timeout(60):
        while not server.seen:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def shadowed(bench: Any, expected: int) -> None:
    deadline = time.monotonic() + 20
    while status().shadowed + status().shadow_failed < expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert status().shadowed + status().shadow_failed == expected


def asked(bench: Any) -> list[str]:
    return [seen.body["model"] for seen in bench.local.seen]
