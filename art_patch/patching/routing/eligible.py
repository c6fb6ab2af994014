"""Which chat completions may go to the champion: not what a local engine cannot answer, or what the provider keeps.

Pure; reads the SDK's request options. What holds for any surface is here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

RAW_HEADER = "x-stainless-raw-response"

_FOREIGN_FIELDS = ("web_search_options", "audio", "functions", "function_call")
"""Fields that a local engine does not know or silently ignores."""


def why_not_routed(options: Any, stream: bool) -> str | None:
    """Return why the champion cannot answer this chat completion; `None` if it can."""
    body = merged_body(options)
    reason = why_not_carried(options, body, stream)
    if reason is not None:
        return reason
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
    return None


def merged_body(options: Any) -> dict[str, Any]:
    """Return the request's body with what `extra_body` adds to it."""
    body = cast(dict[str, Any], options.json_data)
    extra: Any = getattr(options, "extra_json", None)
    return {**body, **cast(Mapping[str, Any], extra)} if isinstance(extra, Mapping) and extra else body


def why_not_carried(options: Any, body: Mapping[str, Any], stream: bool) -> str | None:
    """Return what about the way in which the app asks keeps the call upstream, whatever it asks for."""
    if bool(body.get("stream")) is not stream:
        return "the body and the SDK disagree about streaming"
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
