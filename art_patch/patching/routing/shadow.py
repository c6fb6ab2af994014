"""Sends copies of the app's calls to policies in the background, to compare their answers with those that the app got.

In mode `shadow` the champion gets the copies. A policy under test in state `shadow` gets copies in every mode in which
policies are asked, and so does the learner while upstream answers. Each answer is recorded as a `Call` whose
`shadow_of` names the original call, in a trajectory of its own with origin `shadow`. One background thread sends the
copies one at a time, and ends when there are none. Calls beyond `shadow_per_minute`, or beyond 32 waiting ones, are
skipped and counted.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from art_patch._lib.faults import faults
from art_patch._lib.ids import new_id
from art_patch.context import suppress
from art_patch.patching.rewriting.engine_request import engine_client, sdk, timeout_of
from art_patch.patching.rewriting.response_rewriter import InvalidAnswer, ResponseRewriter
from art_patch.patching.routing.target import Target, room_in_s
from art_patch.recording import Exchange, Recorder
from art_patch.settings import Settings
from art_patch.types import WAIT_HEADER, TrajectoryInfo

if TYPE_CHECKING:
    from art_patch.types import Call

MAX_WAITING = 32
IDLE_S = 5.0

# vLLM's `priority`: requests with a higher number wait for those with a lower one, and the app's calls have 0.
_BEHIND_THE_APP = 1

# The shadow sets these parameters itself.
_OURS = frozenset({"logprobs", "top_logprobs"})


class _Runtime(Protocol):
    """What `Shadow` uses of the runtime, whose module imports this one."""

    settings: Settings
    target: Target
    recorder: Recorder

    def has_room(self) -> bool: ...
    def allows(self, *, challenger: bool = False) -> bool: ...
    def engine_answered(self, *, challenger: bool = False) -> None: ...
    def engine_failed(self, *, challenger: bool = False) -> None: ...
    def engine_released(self, *, challenger: bool = False) -> None: ...


class Shadow:
    """Sends copies of calls to policies, in a background thread that it starts when there is a call to send."""

    def __init__(self, runtime: _Runtime) -> None:
        self._runtime = runtime
        self._jobs: SimpleQueue[tuple[Call, TrajectoryInfo, str] | None] = SimpleQueue()
        self._stopped = False
        self._asked_at: deque[float] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._client: tuple[tuple[Any, ...], Any] | None = None
        self.asked = self.skipped = self.failed = 0

    def stop(self) -> None:
        """Send no more calls and skip those that wait. The answer to a call that was sent already is still recorded."""
        self._stopped = True
        with self._lock:
            if self._thread is not None:
                self._jobs.put(None)

    def resume(self) -> None:
        """Send copies of calls again, after `stop`."""
        self._stopped = False

    def offer(self, call: Call, info: TrajectoryInfo) -> None:
        """Queue a copy of a recorded call for each policy to ask in the background; called by the recorder's thread."""
        now = time.monotonic()
        while self._asked_at and now - self._asked_at[0] >= 60:
            self._asked_at.popleft()
        for policy in _policies(self._runtime.target):
            spent = len(self._asked_at) >= self._runtime.settings.shadow_per_minute
            if self._stopped or spent or self._jobs.qsize() >= MAX_WAITING:
                self.skipped += 1
                continue
            self._asked_at.append(now)
            self._jobs.put((call, info, policy))
            self._ensure_running()

    def _ensure_running(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="art_patch-shadow", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:  # too many threads, or the interpreter is going down
                    faults.trouble("patching.shadow", error)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except Empty:
                job = None
            if job is not None:
                try:
                    self._ask(*job, self._runtime.target)
                except Exception as error:
                    faults.fault("patching.shadow", error)
                continue
            with self._lock:
                # Under the lock: `offer` adds a job first, and starts a thread only if it sees none.
                if self._jobs.empty():
                    self._thread = self._client = None
                    return

    def _ask(self, call: Call, info: TrajectoryInfo, policy: str, target: Target) -> None:
        # The target may have changed while the call was waiting.
        challenger = policy == target.challenger
        wanted = not self._stopped and policy in _policies(target) and self._runtime.has_room()
        if not wanted or not self._runtime.allows(challenger=challenger):
            self.skipped += 1
            return
        body = _body(call, policy, challenger)
        known = {name: getattr(info, name) for name in ("name", "scenario_key", "session_id", "user_id")}
        its = TrajectoryInfo(new_id(), time.time(), "shadow", **known)
        exchange = Exchange(self._runtime.recorder, call.requested_model, its)
        exchange.api, exchange.policy, exchange.shadow_of = call.api, policy, call.id
        exchange.request = json.dumps(body).encode()
        try:
            # Else the patch would record, and route, this call of its own.
            with suppress():
                answer = self._post(body, target)
            exchange.saw(answer)
            n = body.get("n") or 1
            ResponseRewriter(policy, requested_model="", n=n, keeps_logprobs=True, keeps_token_ids=True).whole(answer)
        except (sdk().OpenAIError, InvalidAnswer) as error:
            if room_in_s(error) is not None:
                self.skipped += 1
                return self._runtime.engine_released(challenger=challenger)
            self.failed += 1
            self._runtime.engine_failed(challenger=challenger)
            exchange.finish("failed", f"{type(error).__name__}: {error}")
        else:
            self.asked += 1
            self._runtime.engine_answered(challenger=challenger)
            exchange.finish("complete")

    def _post(self, body: dict[str, Any], target: Target) -> bytes:
        address = (target.base_url, target.api_key)
        if self._client is None or self._client[0] != address:
            self._client = (address, engine_client(target))
        timeout = timeout_of(target.timeout_s, target.connect_timeout_s)
        options = {"timeout": timeout, "headers": {"X-Stainless-Raw-Response": "true", WAIT_HEADER: "0"}}
        raw: Any = self._client[1].post("/chat/completions", body=body, cast_to=object, options=options)
        return raw.content


def _policies(target: Target) -> tuple[str, ...]:
    """Return the policies that are asked in the background."""
    champion = target.champion if target.mode == "shadow" else None
    challenger = target.challenger if target.challenger_state == "shadow" else None
    return tuple(filter(None, (champion, challenger))) if target.serves else ()


def _body(call: Call, policy: str, challenger: bool) -> dict[str, Any]:
    body: dict[str, Any] = {key: value for key, value in call.params.items() if key not in _OURS}
    body |= {"model": policy, "messages": list(call.messages), "logprobs": True, "return_token_ids": True}
    if challenger:
        body["priority"] = _BEHIND_THE_APP
    return body | {"tools": list(call.tools)} if call.tools else body
