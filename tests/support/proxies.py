"""A real `art-patch proxy` process, and plain bytes to ask it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_patch.store import open_store
from art_patch.types import Call, TrajectoryInfo

CHAMPION = "agent@0"

KEY = "sk-callers-own-secret"


# What the SDK would read from the proxy's own environment, and none of it may reach upstream.
INTRUDERS = {
    "OPENAI_API_KEY": "sk-intruder",
    "OPENAI_ADMIN_KEY": "sk-intruder-admin",
    "OPENAI_ORG_ID": "org-intruder",
    "OPENAI_PROJECT_ID": "proj-intruder",
    "OPENAI_CUSTOM_HEADERS": "x-custom: intruder",
}


ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("ART_PATCH_", "OPENAI_"))}


def until(happened: Callable[[], Any]) -> Any:
    """Wait for something that must come, and return it."""
    deadline = time.monotonic() + 60
    while not (found := happened()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
    return found


class Proxy:
    """`art-patch proxy` in a process of its own."""

    def __init__(self, home: Path, upstream: str, *options: str) -> None:
        self.store_url = f"sqlite:///{home}/default/store.db"
        self.errors = home / f"stderr-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "art_patch", "proxy", "--json", "--port", "0", "--home", str(home)]
        fast = {"ART_PATCH_POLL_INTERVAL_S": "0.02", "ART_PATCH_FLUSH_INTERVAL_S": "0.005"}
        with self.errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, "--upstream", upstream, *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=ENVIRONMENT | INTRUDERS | fast,
            )
        assert self.process.stdout is not None
        self.ready: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.url: str = self.ready["base_url"]
        self.port = int(self.url.split(":")[2].split("/")[0])
        self._known: set[str] = set()

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request as plain bytes; returns status, headers and body."""
        connection = self.connection()
        kind = {} if body is None else {"content-type": "application/json"}
        ours = {"authorization": f"Bearer {KEY}"} | kind
        given = {name.lower(): value for name, value in (headers or {}).items()}
        connection.request(method, path, body=body, headers=ours | given)
        answer = connection.getresponse()
        found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        connection.close()
        return found

    def chat(self, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, dict[str, str], bytes]:
        """One chat completion as plain bytes."""
        asked = json.dumps({"model": "gpt-x", "messages": [{"role": "user", "content": "hi"}]} | body)
        return self.ask("POST", "/v1/chat/completions", asked, headers)

    def health(self) -> dict[str, Any]:
        return json.loads(self.ask("GET", "/health")[2])

    def calls(self, count: int) -> list[Call]:
        """The calls that came since this was last asked; there must be `count` of them."""

        def look() -> list[Call]:
            if not Path(self.store_url.removeprefix("sqlite:///")).exists():
                return []
            store = open_store(self.store_url)
            found = [call for run in store.read.recent(limit=1000) for call in run.calls if call.id not in self._known]
            store.close()
            return found if len(found) >= count else []

        found = sorted(until(look), key=lambda call: call.started_at)
        self._known |= {call.id for call in found}
        assert len(found) == count
        return found

    def run(self, trajectory_id: str) -> TrajectoryInfo:
        """What is known of a run."""
        store = open_store(self.store_url)
        (found,) = store.read.trajectories([trajectory_id])
        store.close()
        return found.info

    def stop(self) -> int:
        self.process.terminate()
        self.process.communicate(timeout=60)
        return self.process.returncode
