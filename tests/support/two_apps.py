"""Patched apps in processes of their own, their engine, and candidates that a third process decides on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from art_patch.policies import base_fingerprint
from art_patch.store import open_store
from art_patch.types import Policy
from tests.support.command_line import ENVIRONMENT, Serving, art_patch
from tests.support.servers import StubServer, serving
from tests.support.tiny import make_tiny_adapter, make_tiny_model

SESSIONS = [f"s{number}" for number in range(16)]


class App:
    """A patched app in a process of its own."""

    def __init__(self, store: str, upstream: StubServer, *, poll_interval_s: float = 0.2) -> None:
        command = [sys.executable, "-m", "tests.promotion.app", store, upstream.url, str(poll_interval_s)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    def _ask(self, line: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(line), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def follows(self, **facts: Any) -> None:
        """Wait until it has read a route that says so."""
        deadline = time.monotonic() + 60
        while (seen := self.sees()) | facts != seen:
            assert time.monotonic() < deadline, seen
            time.sleep(0.05)

    def sees(self) -> dict[str, Any]:
        """What its patch knows of the route."""
        return self._ask({})

    def answer(self, session: str, run: str | None = None, thumbs: Mapping[str, float] | None = None) -> str:
        """Who answers a call of this session; `thumbs` says what its user makes of whose answer."""
        return self._ask({"session": session, "run": run, "thumbs": thumbs or {}})["by"]

    def answers(self) -> dict[str, str]:
        """Who answers each session."""
        return {session: self.answer(session) for session in SESSIONS}

    def stop(self) -> None:
        """End it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self.process.stdout.close()


class Place:
    """A home with candidates, its server and apps."""

    def __init__(
        self, home: Path, stack: ExitStack, *, candidates: int = 3, apps: int = 2, poll_interval_s: float = 0.2
    ) -> None:
        self.home = home
        self.base = make_tiny_model(home / "base", hidden=32, vocab_size=320)
        self.server = self.serve(stack)
        url = f"sqlite:///{home}/default/store.db"
        self.store = open_store(url)
        stack.callback(self.store.close)
        sha256 = base_fingerprint(self.base)
        for step in range(1, candidates + 1):
            path = make_tiny_adapter(home / "default" / "adapters", self.base, "agent", step, seed=step)
            candidate = Policy(f"agent@{step}", str(self.base), sha256, "candidate", time.time(), str(path), "agent@0")
            self.store.ledger.add_candidate(candidate, trained_on=[], who="test")
        upstream = stack.enter_context(serving())
        self.apps = [App(url, upstream, poll_interval_s=poll_interval_s) for _ in range(apps)]
        for app in self.apps:
            stack.callback(app.stop)

    def serve(self, stack: ExitStack) -> Serving:
        server = Serving(self.base, self.home)
        stack.callback(server.stop)
        return server

    def decide(self, *command: str) -> Any:
        """Run `art-patch` in a process of its own."""
        result = art_patch(*command, "--json", home=self.home)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def follow(self, **facts: Any) -> None:
        """Wait until both apps have read the route."""
        for app in self.apps:
            app.follows(**facts)
