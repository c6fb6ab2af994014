"""One vLLM that is kept alive: started, given its policies, watched, and restarted whenever it ends or turns unwell.

The reason makes no difference, because vLLM's exit code says nothing (it is 0 when its engine died, vLLM issue 48966)
and a restarted vLLM has forgotten every LoRA. Each time all processes that are left are killed, a new vLLM is started,
every policy is loaded and proven again, and only then do requests reach it.

`Link` sends our own requests over the vLLM's unix socket. A 200 from vLLM proves little: it may answer with NaN, or
apply a LoRA wrongly. `check_finite` samples one token, `prove` scores the trainer's own tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import aiohttp

from art_patch.errors import AdapterRejected, EngineError
from art_patch.policies import Probe, check_probe
from art_patch.serving.vllm.process import VllmProcess

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
_HEALTH_S = 2.0
_PROBE_S = 30.0
_UNHEALTHY_TIMES = 5
_LOAD_TIMEOUT_S = 120.0
_BACKOFF_S = (1.0, 60.0)
_CORRUPTED = re.compile(rb"^vllm:corrupted_requests_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

NOT_A_NUMBER = b"JSON compliant"
"""Part of vLLM's error message in place of an answer with NaN in it."""

_ADDRESS = "http://vllm"  # a unix socket has no host; HTTP wants one
_LIKELIEST = 20  # tokens with log-probabilities that vLLM reports for a place unless it was started for more
_PROBE = (1, 2, 3)  # a prompt that every vocabulary has


class Unreachable(EngineError):
    """No whole answer came from vLLM."""


class Refused(EngineError):
    """vLLM answered with the HTTP error `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Poisoned(EngineError):
    """vLLM answers with numbers that are not finite; no policy of this process can be trusted any more."""


class Link:
    """Connections to one vLLM; they belong to the event loop of the first request."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            # No limit: vLLM itself queues requests. No time-out: a long answer may take minutes.
            connector=aiohttp.UnixConnector(str(self._socket), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            # Bytes are passed on as they come, so nothing may be unpacked on the way.
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            read_bufsize=1 << 20,
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()

    async def healthy(self) -> bool:
        """Whether vLLM's health route answers 200."""
        try:
            await self.get("/health", timeout_s=5.0)
        except EngineError:
            return False
        return True

    async def get(self, path: str, *, timeout_s: float = 10.0) -> bytes:
        """Returns the body of a 200; raises `Unreachable` or `Refused`."""
        return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Returns the decoded answer to a JSON body, or its text where it is not JSON; raises as `get`."""
        content = await self._ask("POST", path, json.dumps(body).encode(), timeout_s)
        try:
            return json.loads(content)
        except ValueError:
            return content.decode(errors="replace")

    def chat(self, body: bytes, headers: Mapping[str, str]) -> Any:
        """Returns aiohttp's context of a chat completion, whose answer is read as it arrives."""
        return self._session.post(f"{_ADDRESS}/v1/chat/completions", data=body, headers=headers)

    async def _ask(self, method: str, path: str, content: bytes | None, timeout_s: float) -> bytes:
        try:
            async with self._session.request(
                method,
                _ADDRESS + path,
                data=content,
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"vLLM did not answer {path} ({type(error).__name__}: {error})") from error
        if response.status != 200:
            raise Refused(_message(answer), response.status)
        return answer


def _message(answer: bytes) -> str:
    try:
        error: Any = json.loads(answer)["error"]
        return str(cast("dict[str, Any]", error)["message"])
    except (ValueError, KeyError, TypeError):  # not in the form of OpenAI's errors
        return answer[:300].decode(errors="replace")


async def check_finite(link: Link, model: str, *, timeout_s: float = 60.0) -> None:
    """Samples one token, and raises `Poisoned` if its log-probability is not finite."""
    body = {"model": model, "prompt": list(_PROBE), "max_tokens": 1, "temperature": 0, "logprobs": 0}
    answer = await _complete(link, body, timeout_s)
    logprobs = (answer["choices"][0].get("logprobs") or {}).get("token_logprobs") or []
    if len(logprobs) != 1 or not _finite(logprobs):
        raise Poisoned(f"{model} answered with a log-probability of {logprobs}")


async def score(
    link: Link, model: str, probe: Probe, expected: Sequence[float], *, timeout_s: float = 120.0
) -> list[float]:
    """Returns the log-probability at temperature 1 of each target of the probe, given the tokens before it.

    vLLM reports the likeliest tokens only. Another target counts as the least likely reported token, or as what was
    `expected` of it if that is smaller. Raises `Poisoned` if a log-probability is not finite.
    """
    # One token is sampled after each prefix, and vLLM reports the likeliest ones there. `prompt_logprobs` would take
    # one request, but with a LoRA loaded vLLM 0.32 ends with an error if any other request is in the same batch.
    prompts = [list(probe.token_ids[:end]) for end in range(1, len(probe.token_ids))]
    body = {"model": model, "prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": _LIKELIEST}
    answer = await _complete(link, {**body, "return_tokens_as_token_ids": True}, timeout_s)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) != len(prompts):
        raise EngineError(f"vLLM answered {len(prompts)} prompts with {len(choices)} choices")
    found: list[float] = []
    for choice, target, most in zip(choices, probe.targets, expected, strict=True):
        likeliest: dict[str, float] = choice["logprobs"]["top_logprobs"][0]
        if not likeliest or not _finite(list(likeliest.values())):
            raise Poisoned(f"{model} answered with log-probabilities that are not finite")
        found.append(likeliest.get(f"token_id:{target}", min(most, *likeliest.values())))
    return found


async def prove(link: Link, name: str, base: str, probe: Probe | None, *, dtype: str) -> None:
    """Returns if the policy computes the log-probabilities of its training.

    Raises `AdapterRejected` if it computes something else, `Poisoned` if its numbers are not finite.
    """
    await check_finite(link, name)
    if probe is not None:
        served = await score(link, name, probe, probe.logprobs)
        check_probe(name, probe, served, await score(link, base, probe, probe.base_logprobs), dtype=dtype)


async def _complete(link: Link, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    try:
        answer = await link.post("/v1/completions", body, timeout_s=timeout_s)
    except Refused as error:
        if NOT_A_NUMBER.decode() in str(error):
            raise Poisoned(f"{body['model']} answered with numbers that are not finite") from error
        raise
    if not isinstance(answer, dict) or not answer.get("choices"):
        raise EngineError(f"vLLM answered a completion with {answer!r:.200}")
    return cast("dict[str, Any]", answer)


def _finite(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


@dataclass(slots=True)
class Loaded:
    """A policy that vLLM has been given."""

    name: str
    # Our own copy of the files that were checked; never changed, never deleted while a vLLM may know it.
    directory: Path
    probe: Probe | None = None  # log-probabilities that the trainer computed with it, if it published any
    running: int = 0  # number of requests that the policy answers right now
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set when `running` falls to 0


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
        """Prepares; `boot` starts the process.

        Args:
            base: served name of the bare base.
            dtype: number type that it computes in; decides how far a probe may differ.
            catch_up: loads every policy into this replica and sets `ready`; called once vLLM answers.
            ready_timeout_s: seconds that a start may take.
        """
        self.number = number
        self.ready = False
        self.running = 0
        self.restarts = -1  # `boot` counts the first start, too
        self.max_model_len = 0
        self.link = Link(socket)
        self._base, self._dtype, self._socket = base, dtype, socket
        self._start, self._catch_up, self._ready_timeout_s = start, catch_up, ready_timeout_s
        self._process: VllmProcess | None = None
        self._condemned: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def boot(self) -> None:
        """Starts vLLM and returns when it takes requests; raises an `EngineError` with the errors in its log."""
        self.ready, self._condemned = False, None
        self.restarts += 1
        # A killed vLLM leaves its socket behind, and the loop below would take that for the new one's.
        self._socket.unlink(missing_ok=True)
        process = self._process = self._start()
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                while not (self._socket.exists() and await self.link.healthy()):
                    _check_alive(process)
                    await asyncio.sleep(_LOOK_S)
                self.max_model_len = await self._check_base()
                await check_finite(self.link, self._base)
                await self._catch_up(self)
        except TimeoutError:
            raise _not_started(process, f"it was not ready within {self._ready_timeout_s:g} s") from None
        except EngineError as error:
            raise _not_started(process, str(error)) from error

    def supervise(self) -> None:
        """Watches vLLM from now on, and starts it again whenever it ends."""
        self._task = asyncio.create_task(self._supervise())

    def condemn(self, why: str) -> None:
        """Takes the replica out of traffic and has it started again."""
        self.ready = False
        self._condemned = self._condemned or why

    async def stop(self) -> None:
        """Lets vLLM finish running requests, then ends it for good."""
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
        """Kills vLLM and everything that it started."""
        self.ready = False
        if self._process is not None:
            self._process.kill()

    async def load(self, policy: Loaded) -> None:
        """Loads a policy and proves it; raises `AdapterRejected` if vLLM refuses it, otherwise as `prove`."""
        body = {"lora_name": policy.name, "lora_path": str(policy.directory)}
        try:
            await self.link.post("/v1/load_lora_adapter", body, timeout_s=_LOAD_TIMEOUT_S)
        except Refused as error:
            # Whatever the status: vLLM answers 500 to a user's mistake, too.
            raise AdapterRejected(f"{policy.name}: vLLM refused it: {error}") from error
        await prove(self.link, policy.name, self._base, policy.probe, dtype=self._dtype)

    async def unload(self, name: str) -> None:
        """Drops a policy's name; its running requests finish."""
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
        """Watches for ever; raises when vLLM must be started again."""
        process, loop = self._process, asyncio.get_running_loop()
        assert process is not None
        health_at, probe_at, unwell = loop.time() + _HEALTH_S, loop.time() + _PROBE_S, 0
        while True:
            _check_alive(process)
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
                corrupted = _CORRUPTED.search(await self.link.get("/metrics"))
                if corrupted is not None and float(corrupted[1]) > 0:
                    raise Poisoned("it computed numbers that are not finite")
                probe_at = loop.time() + _PROBE_S
            await asyncio.sleep(_LOOK_S)

    async def _check_base(self) -> int:
        """Returns the largest number of tokens in prompt and answer; raises if the base is not served."""
        cards: list[dict[str, Any]] = json.loads(await self.link.get("/v1/models"))["data"]
        card = next((card for card in cards if card["id"] == self._base), None)
        if card is None:
            raise EngineError(f"vLLM does not serve {self._base}")
        return int(card["max_model_len"])


def _not_started(process: VllmProcess, why: str) -> EngineError:
    return EngineError(f"vLLM did not start ({why}). {process.log} says:\n{process.last_words()}")


def _check_alive(process: VllmProcess) -> None:
    if not process.alive():
        raise EngineError("it ended")
