"""Requests of ours to one vLLM over its unix socket, and the proof that a policy computes what it was trained to.

A failed request is an `Unreachable` (no whole answer) or a `Refused` (an HTTP error). A 200 from vLLM proves little: it
may answer with NaN, or apply a LoRA wrongly. `check_finite` samples one token, `prove` scores the trainer's own tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import aiohttp

from art_patch.errors import EngineError
from art_patch.policies import Probe, check_probe

_ADDRESS = "http://vllm"  # a unix socket has no host; HTTP wants one


class Unreachable(EngineError):
    """No whole answer came."""


class Refused(EngineError):
    """vLLM answered with an error; `status` tells which."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Link:
    """Connections to one vLLM; they belong to the event loop of the first request."""

    def __init__(self, socket: Path) -> None:
        """Connects lazily."""
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
        """Whether it says that it is well."""
        try:
            await self.get("/health", timeout_s=5.0)
        except EngineError:
            return False
        return True

    async def get(self, path: str, *, timeout_s: float = 10.0) -> bytes:
        """Returns the body of a 200."""
        return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Returns the answer to a JSON body, decoded; text where it is no JSON."""
        content = await self._ask("POST", path, json.dumps(body).encode(), timeout_s)
        try:
            return json.loads(content)
        except ValueError:
            return content.decode(errors="replace")

    def chat(self, body: bytes, headers: Mapping[str, str]) -> Any:
        """Returns the context in which a chat completion is answered; the answer is read as it comes."""
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
    """Returns the words of an error as vLLM writes it."""
    try:
        error: Any = json.loads(answer)["error"]
        return str(cast("dict[str, Any]", error)["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:300].decode(errors="replace")


_LIKELIEST = 20
"""How many tokens vLLM tells of at a place unless it was started for more."""

_PROBE = (1, 2, 3)
"""A prompt that every vocabulary has."""


class Poisoned(EngineError):
    """It answers with numbers that are not finite; no policy of this process can be trusted any more."""


async def check_finite(link: Link, model: str, *, timeout_s: float = 60.0) -> None:
    """Samples one token.

    Raises:
        Poisoned: its log-probability is not finite.
    """
    body = {"model": model, "prompt": list(_PROBE), "max_tokens": 1, "temperature": 0, "logprobs": 0}
    answer = await _complete(link, body, timeout_s)
    logprobs = (answer["choices"][0].get("logprobs") or {}).get("token_logprobs") or []
    if len(logprobs) != 1 or not _finite(logprobs):
        raise Poisoned(f"{model} answered with a log-probability of {logprobs}")


async def score(
    link: Link, model: str, probe: Probe, expected: Sequence[float], *, timeout_s: float = 120.0
) -> list[float]:
    """Returns the log-probability at temperature 1 of each target of the probe, given the tokens before it.

    A target that vLLM does not report counts as the smaller one of what was expected of it and of what the least likely
    reported token has.

    Raises:
        Poisoned: one is not finite.
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
    """Passes if the policy computes what it was trained to compute.

    Raises:
        AdapterRejected: it does not; the process itself is well.
        Poisoned: its numbers are not finite.
        EngineError: the process does not answer.
    """
    await check_finite(link, name)
    if probe is not None:
        served = await score(link, name, probe, probe.logprobs)
        check_probe(name, probe, served, await score(link, base, probe, probe.base_logprobs), dtype=dtype)


async def _complete(link: Link, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    try:
        answer = await link.post("/v1/completions", body, timeout_s=timeout_s)
    except Refused as error:
        if "JSON compliant" in str(error):  # what vLLM makes of a NaN
            raise Poisoned(f"{body['model']} answered with numbers that are not finite") from error
        raise
    if not isinstance(answer, dict) or not answer.get("choices"):
        raise EngineError(f"vLLM answered a completion with {answer!r:.200}")
    return cast("dict[str, Any]", answer)


def _finite(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)
