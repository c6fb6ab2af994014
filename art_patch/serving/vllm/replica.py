"""One vLLM that is kept alive: started, given its policies, watched, and restarted whenever it ends or fails a check.

Every failure is handled alike, because vLLM's exit code does not tell them apart (it is 0 when its engine died, vLLM
issue 48966) and a restarted vLLM has lost every LoRA. A restarted replica takes requests only after every policy was
loaded and tested again.

A status of 200 from vLLM proves little, because vLLM may answer with NaN or apply a LoRA wrongly. So `check_finite`
samples one token, and `Replica.load` compares vLLM's log-probabilities of the policy's probe with the trainer's.
"""

import asyncio
import json
import logging
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import aiohttp

from art_patch.errors import AdapterRejected, EngineError
from art_patch.policies import Probe, check_probe
from art_patch.serving.contract import EngineRefused, admit
from art_patch.serving.vllm.process import VllmProcess

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
_HEALTH_S = 2.0
_PROBE_S = 30.0
_UNHEALTHY_TIMES = 5
_LOAD_TIMEOUT_S = 120.0
_BACKOFF_S = (1.0, 60.0)
_BUSY_ROWS = 8  # fewer rows fill no vLLM, so its metrics are not asked for
_GAUGE = rb"^vllm:%s(?:\{[^}]*\})? (\S+)$"
# Rows that are decoded, rows that wait, the time that rows took without their wait, and the number of these rows.
_OF_LOAD = tuple(
    re.compile(_GAUGE % name, re.MULTILINE)
    for name in (b"num_requests_running", b"num_requests_waiting",
                 b"request_inference_time_seconds_sum", b"request_inference_time_seconds_count")
)  # fmt: skip
_CORRUPTED = re.compile(rb"^vllm:corrupted_requests_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

NOT_A_NUMBER = b"JSON compliant"  # part of the error message that vLLM sends when its answer would contain NaN
_JSON = {"Content-Type": "application/json"}
_ADDRESS = "http://vllm"  # a unix socket has no host; HTTP wants one
_LIKELIEST = 20  # tokens with log-probabilities that vLLM reports for a place unless it was started for more
_PROBE = (1, 2, 3)  # a prompt that every vocabulary has


class Unreachable(EngineError):
    """vLLM did not send a complete HTTP answer: it is not listening, broke off, or took too long."""


class Poisoned(EngineError):
    """vLLM computes numbers that are not finite, so no policy of this vLLM process can be trusted any more."""


class Link:
    """HTTP connections to one vLLM over its unix socket; use them on the event loop of the first request only."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # Bytes are passed on as they come, so nothing may be unpacked on the way.
        as_they_come: Any = {"auto_decompress": False, "skip_auto_headers": ("User-Agent", "Accept-Encoding")}
        # No limit: vLLM itself queues requests. No time-out: a long answer may take minutes.
        connector, timeout = aiohttp.UnixConnector(str(self._socket), limit=0), aiohttp.ClientTimeout(total=None)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20, **as_they_come)

    async def close(self) -> None:
        """Closes all connections to vLLM; vLLM itself keeps running."""
        await self._session.close()

    async def healthy(self) -> bool:
        """Whether vLLM answers `GET /health` with status 200 within 5 seconds."""
        try:
            await self.ask("GET", "/health", timeout_s=5.0)
        except EngineError:
            return False
        return True

    async def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Sends JSON by POST; returns the decoded answer, or its text if it is not JSON. Raises as `ask` does."""
        content = await self.ask("POST", path, json.dumps(body).encode(), timeout_s=timeout_s)
        try:
            return json.loads(content)
        except ValueError:
            return content.decode(errors="replace")

    def chat(self, body: bytes) -> Any:
        """Sends a chat completion; returns aiohttp's context manager, whose response can be read as it arrives."""
        return self._session.post(f"{_ADDRESS}/v1/chat/completions", data=body, headers=_JSON)

    async def ask(self, method: str, path: str, content: bytes | None = None, *, timeout_s: float = 10.0) -> bytes:
        """Returns the answer's body; raises `Unreachable` if it is late or incomplete, `EngineRefused` if not 200."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        sent = self._session.request(method, _ADDRESS + path, data=content, headers=_JSON, timeout=timeout)
        try:
            async with sent as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"vLLM did not answer {path} ({type(error).__name__}: {error})") from error
        if response.status != 200:
            raise EngineRefused(_message(answer), response.status)
        return answer


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):  # not in the form of OpenAI's errors
        return answer[:300].decode(errors="replace")


async def check_finite(link: Link, model: str) -> None:
    """Has vLLM sample one token; raises `Poisoned` if the token's log-probability is not finite."""
    body = {"model": model, "prompt": list(_PROBE), "max_tokens": 1, "temperature": 0, "logprobs": 0}
    answer = await _complete(link, body, timeout_s=60.0)
    logprobs = (answer["choices"][0].get("logprobs") or {}).get("token_logprobs") or []
    if len(logprobs) != 1 or not _finite(logprobs):
        raise Poisoned(f"{model} answered with a log-probability of {logprobs}")


async def score(link: Link, model: str, probe: Probe, expected: Sequence[float]) -> list[float]:
    """Returns vLLM's log-probability, at temperature 1, of each target token of the probe, given the tokens before it.

    vLLM reports only the likeliest tokens. A target that is not among them gets the smaller of two values: the lowest
    log-probability that vLLM reported there, and the target's value in `expected`. Raises as `check_finite` does.
    """
    # One token is sampled after each prefix, and vLLM reports the likeliest ones there. `prompt_logprobs` would take
    # one request, but with a LoRA loaded vLLM 0.32 ends with an error if any other request is in the same batch.
    prompts = [list(probe.token_ids[:end]) for end in range(1, len(probe.token_ids))]
    body = {"model": model, "prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": _LIKELIEST}
    answer = await _complete(link, {**body, "return_tokens_as_token_ids": True}, timeout_s=120.0)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) != len(prompts):
        raise EngineError(f"vLLM answered {len(prompts)} prompts with {len(choices)} choices")
    found: list[float] = []
    for choice, target, most in zip(choices, probe.targets, expected, strict=True):
        likeliest: dict[str, float] = choice["logprobs"]["top_logprobs"][0]
        if not likeliest or not _finite(likeliest.values()):
            raise Poisoned(f"{model} answered with log-probabilities that are not finite")
        found.append(likeliest.get(f"token_id:{target}", min(most, *likeliest.values())))
    return found


async def _complete(link: Link, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    try:
        answer = await link.post("/v1/completions", body, timeout_s=timeout_s)
    except EngineRefused as error:
        if NOT_A_NUMBER.decode() in str(error):
            raise Poisoned(f"{body['model']} answered with numbers that are not finite") from error
        raise
    if not isinstance(answer, dict) or not answer.get("choices"):
        raise EngineError(f"vLLM answered a completion with {answer!r:.200}")
    return cast("dict[str, Any]", answer)


def _finite(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


@dataclass(slots=True)
class Loaded:
    """A policy that the vLLM replicas are given: its name, our copy of its files, and its running requests."""

    name: str
    directory: Path  # with our copy of the files that were checked; kept unchanged while a vLLM may know it
    probe: Probe | None = None  # log-probabilities that the trainer computed with it, if it published any
    running: int = 0  # number of requests that the policy answers right now
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set when `running` falls to 0


class Occupancy:
    """How full a vLLM is. vLLM queues without a limit, so the server counts rows; the metrics tell when it is full.

    A row is one choice of a request. The job's requests are not counted, because they wait for all others.
    """

    def __init__(self) -> None:
        self.rows = 0  # of the requests that vLLM was given and has not answered
        self._most = math.inf  # rows that it decoded while others waited; infinite if none has waited yet
        self._row_s, self._sums = math.inf, (0.0, 0.0)

    def check(self, rows: int, accepted_s: float | None) -> None:
        """Raises `EngineFull` if a request with so many rows would wait for longer than its caller accepts."""
        late = self.rows + rows - self._most
        admit(waiting=0, most=1, expected_s=late * self._row_s / self._most if late > 0 else 0.0, accepted_s=accepted_s)

    def look(self, metrics: bytes) -> None:
        """Learns from vLLM's answer to `GET /metrics`."""
        running, waiting, took_s, ended = (sum(map(float, each.findall(metrics))) for each in _OF_LOAD)
        if waiting:  # it may be less than before: with long prompts its cache is full earlier
            self._most = max(1.0, running)
        elif math.isfinite(self._most):
            self._most = max(self._most, running)
        if ended > self._sums[1]:
            self._row_s = (took_s - self._sums[0]) / (ended - self._sums[1])
        self._sums = took_s, ended


class Replica:
    """A vLLM process that is watched and restarted. Call all methods on one event loop."""

    def __init__(
        self, number: int, base: str, dtype: str, socket: Path, start: Callable[[], VllmProcess],
        catch_up: Callable[["Replica"], Awaitable[None]], *, ready_timeout_s: float,
    ) -> None:  # fmt: skip
        """Creates the replica without starting a process; `boot` starts vLLM.

        Args:
            base: name under which vLLM serves the base model without a LoRA.
            dtype: number type that vLLM computes in; it decides how far log-probabilities may differ from a probe's.
            catch_up: loads every policy into this replica and then sets `ready`; called as soon as vLLM answers.
            ready_timeout_s: limit from a start of vLLM until the replica is ready.
        """
        self.number = number
        self.ready = False
        self.running, self.occupancy = 0, Occupancy()
        self.restarts = -1  # `boot` counts the first start, too
        self.max_model_len = 0
        self.link = Link(socket)
        self._base, self._dtype, self._socket = base, dtype, socket
        self._start, self._catch_up, self._ready_timeout_s = start, catch_up, ready_timeout_s
        self._process: VllmProcess | None = None
        self._condemned: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def boot(self) -> None:
        """Starts vLLM and returns when the replica takes requests; an `EngineError` quotes the errors in vLLM's log."""
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
        """Starts a task that watches vLLM and starts it again whenever it ends or fails a check."""
        self._task = asyncio.create_task(self._supervise())

    def condemn(self, why: str) -> None:
        """Stops sending requests to this vLLM; the task of `supervise` then logs `why` and restarts it."""
        self.ready = False
        self._condemned = self._condemned or why

    async def stop(self) -> None:
        """Lets vLLM finish its running requests, then kills it; it is not restarted."""
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
        """Kills vLLM and every process that it started; a running `supervise` task starts a new one."""
        self.ready = False
        if self._process is not None:
            self._process.kill()

    async def load(self, policy: Loaded) -> None:
        """Loads a policy into vLLM and tests it there; raises `AdapterRejected`, or `Poisoned` if it is not finite."""
        body = {"lora_name": policy.name, "lora_path": str(policy.directory)}
        try:
            await self.link.post("/v1/load_lora_adapter", body, timeout_s=_LOAD_TIMEOUT_S)
        except EngineRefused as error:
            # Whatever the status: vLLM answers 500 to a user's mistake, too.
            raise AdapterRejected(f"{policy.name}: vLLM refused it: {error}") from error
        await check_finite(self.link, policy.name)
        if (probe := policy.probe) is not None:
            served = await score(self.link, policy.name, probe, probe.logprobs)
            of_base = await score(self.link, self._base, probe, probe.base_logprobs)
            check_probe(policy.name, probe, served, of_base, dtype=self._dtype)

    async def unload(self, name: str) -> None:
        """Makes vLLM unload a policy; its running requests finish. A failure is only logged."""
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
            except Exception as error:  # whatever it was, the replica must come back
                _log.error("vLLM replica %d is started again in %g s: %s", self.number, pause, error)
            self.kill()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _BACKOFF_S[1])

    async def _watch(self) -> None:
        """Watches for ever; raises when vLLM must be started again."""
        process, loop = cast("VllmProcess", self._process), asyncio.get_running_loop()
        health_at, probe_at, unwell, load_at = loop.time() + _HEALTH_S, loop.time() + _PROBE_S, 0, 0.0
        while True:
            _check_alive(process)
            if self._condemned is not None:
                raise EngineError(self._condemned)
            if loop.time() >= health_at:
                unwell = 0 if await self.link.healthy() else unwell + 1
                if unwell >= _UNHEALTHY_TIMES:
                    raise EngineError(f"/health failed {unwell} times in a row")
                health_at = loop.time() + _HEALTH_S
            if self.occupancy.rows >= _BUSY_ROWS and loop.time() >= load_at:
                with suppress(Unreachable):
                    self.occupancy.look(await self.link.ask("GET", "/metrics"))
                load_at = loop.time() + 0.5
            # `/health` is 200 while the engine computes NaN, so a token is sampled now and then.
            if loop.time() >= probe_at:
                await check_finite(self.link, self._base)
                corrupted = _CORRUPTED.search(await self.link.ask("GET", "/metrics"))
                if corrupted is not None and float(corrupted[1]) > 0:
                    raise Poisoned("it computed numbers that are not finite")
                probe_at = loop.time() + _PROBE_S
            await asyncio.sleep(_LOOK_S)

    async def _check_base(self) -> int:
        """Returns the largest number of tokens in prompt and answer; raises if the base is not served."""
        for card in json.loads(await self.link.ask("GET", "/v1/models"))["data"]:
            if card["id"] == self._base:
                return int(card["max_model_len"])
        raise EngineError(f"vLLM does not serve {self._base}")


def _not_started(process: VllmProcess, why: str) -> EngineError:
    return EngineError(f"vLLM did not start ({why}). {process.log} says:\n{process.last_words()}")


def _check_alive(process: VllmProcess) -> None:
    if not process.alive():
        raise EngineError("it ended")
