"""Tells at the exit of a program under `art-patch run` which model calls an HTTP library sent, if none was recorded."""

import re
import sys
from collections import Counter
from functools import wraps
from inspect import CO_COROUTINE
from typing import Any
from urllib.parse import urlsplit

# Module -> the functions that send, and the position of the request or address in their arguments.
PLACES = {
    "httpx": ("Client.send AsyncClient.send", 1),
    "httpx2": ("Client.send AsyncClient.send", 1),
    "requests.sessions": ("Session.send", 1),
    "aiohttp.client": ("ClientSession._request", 2),
}

# How the addresses end at which models of OpenAI, Anthropic, Gemini, Cohere, Ollama and Bedrock answer.
_PATHS = re.compile(
    r"(/v1/(messages|completions|responses)|/chat/completions|:(stream)?generatecontent|/v2/chat|/api/(chat|generate)"
    r"|/converse(-stream)?)$"
)

_seen: Counter[tuple[str, str]] = Counter()
_of_sdk = False


def watch(module: Any) -> None:
    """Wrap the functions by which this module sends."""
    places, position = PLACES[module.__name__]
    for owner, name in (place.split(".") for place in places.split()):
        kind = getattr(module, owner)
        setattr(kind, name, _watched(getattr(kind, name), module.__name__.partition(".")[0], position))


def _watched(send: Any, library: str, position: int) -> Any:
    @wraps(send)
    def watched(*args: Any, **kwargs: Any) -> Any:
        _look(args, library, position)
        return send(*args, **kwargs)

    @wraps(send)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        _look(args, library, position)
        return await send(*args, **kwargs)

    # A coroutine function must stay one: `unittest.mock` and others look.
    return awaited if send.__code__.co_flags & CO_COROUTINE else watched


def _look(args: tuple[Any, ...], library: str, position: int) -> None:
    try:
        request = args[position]
        parts = urlsplit(str(getattr(request, "url", request)))
        if not _PATHS.search(parts.path[-64:].lower()):
            return
        global _of_sdk
        _of_sdk = _of_sdk or "OpenAI/" in str(getattr(request, "headers", {}).get("user-agent"))
        if len(_seen) < 100:
            _seen[library, f"{parts.hostname}{parts.path}"] += 1
    except Exception:
        return  # the program sends what it likes, and it must not notice


def tell() -> None:
    """Write the line, if there is reason. Called after all exit handlers, because they write what was recorded."""
    control = sys.modules.get("art_patch.patching.control")
    now = None if control is None else control.status()
    # What an integration has recorded, or a bypass has warned of, was sent by these libraries, too.
    told = now is not None and (now.mode == "off" or now.recorded or now.dropped or now.bypasses)
    waits = control is not None and not control.flush(0.0)  # it is in the spool, which the next process reads
    if not _seen or _of_sdk or told or waits or sys.stderr is None:
        return
    (library, address), _ = _seen.most_common(1)[0]
    shown = "".join(filter(str.isprintable, address))[:200]
    sys.stderr.write(
        f"art-patch: no call of the OpenAI SDK was seen, but {_seen.total()} to a model by other means ({library}, "
        f"{shown}): unless they go to `art-patch proxy`, they are neither recorded nor routed; give the program its "
        "address\n"
    )
