"""Patches a Python program, and the programs that it starts, without a change in their code: `art-patch run`.

In: settings. Out: environment variables with which every Python process imports our module `sitecustomize` at its
start. This module runs the `sitecustomize` that Python would have found without ours. When the program imports the SDK,
or a known library that imports the SDK or is an SDK of another provider, it calls `patch()`. Until then nothing else of
art_patch is loaded, except for this file beside an HTTP library, so a process that calls no model is not slower.

At its exit, the program tells which model calls an HTTP library sent, if none was recorded. Wrapped is what makes a
request, not what sends it: so no traceback of a call that failed has a line of ours.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# This directory holds `sitecustomize.py` alone, because each module in it would hide a module of the app.
SHIM = Path(__file__).parent / "on_path"


def environment(settings: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables `base` with `settings` added, and our `sitecustomize` first on `PYTHONPATH`."""
    given = {f"ART_PATCH_{name.upper()}": value for name, value in settings.items()}
    before = base.get("PYTHONPATH")
    others = [part for part in before.split(os.pathsep) if part != str(SHIM)] if before else []
    return {**base, **given, "PYTHONPATH": os.pathsep.join([str(SHIM), *others])}


# Module -> the class of its requests, and the method that fills one in.
PLACES = {
    "httpx": ("Request", "__init__"),
    "httpx2": ("Request", "__init__"),
    "requests.models": ("PreparedRequest", "prepare"),
    "aiohttp.client_reqrep": ("ClientRequest", "__init__"),
}

# How the addresses end at which models of OpenAI, Anthropic, Gemini, Cohere, Ollama and Bedrock answer.
_PATHS = re.compile(
    r"(/v1/(messages|completions|responses)|/chat/completions|:(stream)?generatecontent|/v2/chat|/api/(chat|generate)"
    r"|/converse(-stream)?)$"
)

_seen: Counter[tuple[str, str]] = Counter()
_of_sdk = False


def watch(module: Any) -> None:
    """Wrap the method by which this module makes requests."""
    owner, name = PLACES[module.__name__]
    kind, library = getattr(module, owner), module.__name__.partition(".")[0]
    make = getattr(kind, name)

    @wraps(make)
    def watched(request: Any, *args: Any, **kwargs: Any) -> None:
        make(request, *args, **kwargs)
        _look(request, library)

    setattr(kind, name, watched)


def _look(request: Any, library: str) -> None:
    try:
        parts = urlsplit(str(request.url))
        if not _PATHS.search(parts.path[-64:].lower()):
            return
        global _of_sdk
        _of_sdk = _of_sdk or "OpenAI/" in str(request.headers.get("user-agent"))
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
