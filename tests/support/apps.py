"""Apps that the patch records: in this process, and as processes of their own; and their store, seen from outside."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import art_patch as art
from art_patch.store import open_store
from tests.support.servers import StubServer
from tests.support.spooled import taken_over

ROOT = Path(__file__).parents[2]

FULL = bool(os.environ.get("ART_PATCH_FULL"))
"""Run the numbers of a release instead of those of a commit."""


PRELUDE = """
import os, sys, time
import art_patch as art
import openai

def call(text="hi", **more):
    return client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": text}], **more)

art.patch()
client = openai.OpenAI(api_key="k", base_url=os.environ["UPSTREAM"], max_retries=0)
"""
"""How the apps of these tests begin."""


@dataclass
class Store:
    """A store by its file, seen from outside."""

    path: Path

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    def count(self, table: str = "calls") -> int:
        taken_over(self.url)
        if not self.path.exists():
            return 0
        connection = sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True, timeout=30)
        try:
            return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return 0
            raise
        finally:
            connection.close()

    def texts(self) -> list[str]:
        """The last user message of each call, sorted."""
        with self.opened() as store:
            calls = [call for found in store.read.recent(limit=100_000) for call in found.calls]
            return sorted(str(call.messages[-1]["content"]) for call in calls)

    def problems(self) -> list[str]:
        with self.opened() as store:
            return store.verify()

    def opened(self) -> Any:
        from contextlib import closing

        return closing(open_store(self.url, create=False))


@dataclass
class App:
    """A patched SDK in this process, and clients of upstream."""

    upstream: StubServer
    store: Store
    client: Any
    given: dict[str, Any] = field(default_factory=dict)

    def patch(self, **changes: Any) -> None:
        art.patch(**({"store": self.store.url, "mode": "record", "flush_interval_s": 0.01} | changes))

    def call(self, text: str = "hi", **more: Any) -> Any:
        return self.client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": text}], **more)


@dataclass
class Ran:
    """How a process ended."""

    code: int
    out: str
    err: str
    took_s: float


@dataclass
class Programs:
    """Runs apps as processes of their own."""

    upstream: StubServer
    store: Store

    def environment(self, **more: str) -> dict[str, str]:
        return os.environ | {
            "ART_PATCH_STORE": self.store.url,
            "ART_PATCH_MODE": "record",
            "UPSTREAM": self.upstream.url,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        } | more  # fmt: skip

    def start(self, code: str, *arguments: str, prelude: str = PRELUDE, **more: Any) -> subprocess.Popen[str]:
        env = self.environment(**more.pop("env", {}))
        command = [*more.pop("before", ()), sys.executable, "-c", prelude + code, *arguments]
        return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)

    def run(self, code: str, *arguments: str, timeout: float = 60, **more: Any) -> Ran:
        begun = time.perf_counter()
        process = self.start(code, *arguments, **more)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"still running after {timeout} s\n{out}\n{err}")
        return Ran(process.returncode, out, err, time.perf_counter() - begun)


def eventually(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until `true()`; fail where it takes ten times longer than it may."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
