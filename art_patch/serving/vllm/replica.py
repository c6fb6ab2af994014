"""One vLLM that is kept alive: started, given its policies, watched, and restarted whenever it ends or turns unwell.

The reason makes no difference, because vLLM's exit code says nothing (it is 0 when its engine died, vLLM issue 48966)
and a restarted vLLM has forgotten every LoRA. Each time all processes that are left are killed, a new vLLM is started,
every policy is loaded and proven again, and only then do requests reach it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_patch.errors import AdapterRejected, EngineError
from art_patch.policies import Probe
from art_patch.serving.vllm.link import Link, Poisoned, Refused, check_finite, prove
from art_patch.serving.vllm.process import VllmProcess

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
_HEALTH_S = 2.0
_PROBE_S = 30.0
_UNHEALTHY_TIMES = 5
_LOAD_TIMEOUT_S = 120.0
_BACKOFF_S = (1.0, 60.0)
_CORRUPTED = re.compile(rb"^vllm:corrupted_requests_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(slots=True)
class Loaded:
    """A policy as vLLM gets it.

    Attributes:
        directory: our own copy of the files that were checked; never changed, never deleted while a vLLM may know it.
        probe: what the trainer computed with it, if it said.
        running: requests that it answers right now.
    """

    name: str
    directory: Path
    probe: Probe | None = None
    running: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Replica:
    """A supervised vLLM. All methods belong to one event loop."""

    def __init__(
        self,
        number: int,
        *,
        base: str,
        dtype: str,
        socket: Path,
        start: Callable[[], VllmProcess],
        catch_up: Callable[[Replica], Awaitable[None]],
        ready_timeout_s: float,
    ) -> None:
        """Prepares; `boot` starts it.

        Args:
            number: which of the replicas this is.
            base: served name of the bare base.
            dtype: in which it computes, for what a probe may differ by.
            catch_up: loads every policy into this replica and sets `ready`; called once it answers.
            ready_timeout_s: how long a start may take.
        """
        self.number = number
        self.ready = False
        self.running = 0
        self.restarts = -1
        self.max_model_len = 0
        self.link = Link(socket)
        self._base, self._dtype, self._socket = base, dtype, socket
        self._start, self._catch_up, self._ready_timeout_s = start, catch_up, ready_timeout_s
        self._process: VllmProcess | None = None
        self._condemned: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def boot(self) -> None:
        """Starts it and returns when it takes requests.

        Raises:
            EngineError: It ended or did not get ready in time; with the end of its log.
        """
        self.ready, self._condemned = False, None
        self.restarts += 1
        # A killed vLLM leaves its socket behind, and the loop below would take that for the new one's.
        self._socket.unlink(missing_ok=True)
        process = self._process = self._start()
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                while not (self._socket.exists() and await self.link.healthy()):
                    self._check_alive(process)
                    await asyncio.sleep(_LOOK_S)
                self.max_model_len = await self._check_base()
                await check_finite(self.link, self._base)
                await self._catch_up(self)
        except TimeoutError:
            raise self._not_started(process, f"it was not ready within {self._ready_timeout_s:g} s") from None
        except EngineError as error:
            raise self._not_started(process, str(error)) from error

    def supervise(self) -> None:
        """Watches it from now on, and starts it again whenever it ends."""
        self._task = asyncio.create_task(self._supervise())

    def condemn(self, why: str) -> None:
        """Takes it out of traffic and has it started again."""
        self.ready = False
        self._condemned = self._condemned or why

    async def stop(self) -> None:
        """Lets it finish what it has begun, then ends it for good."""
        self.ready = False
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._process is not None:
            self._process.terminate()
            # Only as long as requests run: vLLM itself may take its whole shutdown timeout after the last one.
            while self._process.alive() and self.running:
                await asyncio.sleep(_LOOK_S)
        self.kill()
        await self.link.close()

    def kill(self) -> None:
        """Ends it now, with everything it started."""
        self.ready = False
        if self._process is not None:
            self._process.kill()

    async def load(self, policy: Loaded) -> None:
        """Loads a policy and proves it.

        Raises:
            AdapterRejected: vLLM refused it, or it does not compute what it was trained to.
            Poisoned: It spoiled this process.
            EngineError: The process does not answer.
        """
        body = {"lora_name": policy.name, "lora_path": str(policy.directory)}
        try:
            await self.link.post("/v1/load_lora_adapter", body, timeout_s=_LOAD_TIMEOUT_S)
        except Refused as error:
            # A user's mistake comes back as a 500 just as well.
            raise AdapterRejected(f"{policy.name}: vLLM refused it: {error}") from error
        await prove(self.link, policy.name, self._base, policy.probe, dtype=self._dtype)

    async def unload(self, name: str) -> None:
        """Drops a policy's name; requests that run on it finish."""
        try:
            await self.link.post("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=_LOAD_TIMEOUT_S)
        except EngineError as error:
            _log.warning("replica %d did not unload %s: %s", self.number, name, error)

    async def _supervise(self) -> None:
        pause = _BACKOFF_S[0]
        while True:
            try:
                if not self.ready:
                    await self.boot()
                    pause = _BACKOFF_S[0]
                    _log.warning("vLLM replica %d serves again", self.number)
                await self._watch()
            except asyncio.CancelledError:
                raise
            except Exception as error:  # whatever it was, the replica must come back
                _log.error("vLLM replica %d is started again in %g s: %s", self.number, pause, error)
            self.kill()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _BACKOFF_S[1])

    async def _watch(self) -> None:
        """Returns never; raises when it has to be started again."""
        process, loop = self._process, asyncio.get_running_loop()
        assert process is not None
        health_at, probe_at, unwell = loop.time() + _HEALTH_S, loop.time() + _PROBE_S, 0
        while True:
            self._check_alive(process)
            if self._condemned is not None:
                raise EngineError(self._condemned)
            if loop.time() >= health_at:
                unwell = 0 if await self.link.healthy() else unwell + 1
                if unwell >= _UNHEALTHY_TIMES:
                    raise EngineError(f"/health failed {unwell} times in a row")
                health_at = loop.time() + _HEALTH_S
            # `/health` is 200 while the engine computes NaN, so a token is sampled now and then.
            if loop.time() >= probe_at:
                await check_finite(self.link, self._base)
                await self._check_metrics()
                probe_at = loop.time() + _PROBE_S
            await asyncio.sleep(_LOOK_S)

    def _not_started(self, process: VllmProcess, why: str) -> EngineError:
        return EngineError(f"vLLM did not start ({why}). {process.log} says:\n{process.last_words()}")

    def _check_alive(self, process: VllmProcess) -> None:
        if not process.alive():
            raise EngineError("it ended")

    async def _check_metrics(self) -> None:
        found = _CORRUPTED.search(await self.link.get("/metrics"))
        if found is not None and float(found[1]) > 0:
            raise Poisoned("it computed numbers that are not finite")

    async def _check_base(self) -> int:
        """Returns how many tokens it takes."""
        cards: list[dict[str, Any]] = json.loads(await self.link.get("/v1/models"))["data"]
        card = next((card for card in cards if card["id"] == self._base), None)
        if card is None:
            raise EngineError(f"vLLM does not serve {self._base}")
        return int(card["max_model_len"])
