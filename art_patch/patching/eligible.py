"""Which requests are recorded, and which of those may go to the champion. Pure; reads the SDK's request options.

Recorded: chat completions, by path, so that `create`, `parse`, `stream`, raw responses and plain `client.post` are all
the same. Everything else passes through untouched. Not routed: what a local engine cannot answer, or what the provider
keeps for later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

CHAT_PATH = "chat/completions"
RAW_HEADER = "x-stainless-raw-response"

_FOREIGN_FIELDS = ("web_search_options", "audio", "functions", "function_call")
"""Fields that a local engine does not know or silently ignores."""


def is_chat(options: Any) -> bool:
    """Whether the request is a chat completion with a JSON body."""
    url = options.url
    if url != "/chat/completions" and url.partition("?")[0].strip("/") != CHAT_PATH:
        return False
    body = options.json_data
    return options.method.lower() == "post" and isinstance(body, dict) and isinstance(body.get("model"), str)


def why_not_routed(options: Any, stream: bool) -> str | None:
    """Return why the champion cannot answer this chat completion; `None` if it can."""
    body = cast(dict[str, Any], options.json_data)
    extra: Any = getattr(options, "extra_json", None)
    if isinstance(extra, Mapping) and extra:
        body = {**body, **cast(Mapping[str, Any], extra)}
    if bool(body.get("stream")) is not stream:
        return "the body and the SDK disagree about streaming"
    if not isinstance(body.get("messages"), list):
        return "no messages"
    if body.get("store"):
        return "the provider keeps the answer"
    for name in _FOREIGN_FIELDS:
        if body.get(name):
            return f"{name} is the provider's own"
    if "audio" in (body.get("modalities") or ()):
        return "audio"
    for tool in body.get("tools") or ():
        if not isinstance(tool, Mapping) or cast(Mapping[str, Any], tool).get("type") != "function":
            return "a tool that the provider hosts"
    if getattr(options, "files", None) or getattr(options, "content", None):
        return "files"
    if not stream and header(options, RAW_HEADER) == "stream":
        return "the answer is handed out unread"  # its bytes could not be given back as if they came from upstream
    return None


def header(options: Any, name: str) -> str | None:
    """Return a header of the request options, whatever its case."""
    headers: Any = options.headers
    if not isinstance(headers, Mapping):  # the SDK's "not given"
        return None
    for key, value in cast(Mapping[str, Any], headers).items():
        if key.lower() == name:
            return value if isinstance(value, str) else None
    return None
