"""HTTP to one vLLM over its unix socket. Every failure is an `Unreachable` or a `Refused`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import aiohttp

from art_patch.errors import EngineError

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
            connector=aiohttp.UnixConnector(str(self._socket), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
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
