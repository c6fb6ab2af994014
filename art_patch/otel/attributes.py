"""What a call and its trajectory are in the words of OpenTelemetry's GenAI conventions. Pure.

Names are written out because the conventions moved package three times; ours begin with `art.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from art_patch.types import JSON, Api, TrajectoryInfo

_REQUEST: Mapping[str, tuple[str, type]] = {
    "frequency_penalty": ("frequency_penalty", float),
    "max_completion_tokens": ("max_tokens", int),
    "max_tokens": ("max_tokens", int),
    "presence_penalty": ("presence_penalty", float),
    "seed": ("seed", int),
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
}


def operation_of(api: Api) -> str:
    """Return `gen_ai.operation.name` of a call."""
    return "text_completion" if api == "completions" else "chat"


def request_attributes(params: JSON) -> dict[str, Any]:
    """Return what a call's sampling parameters are called."""
    found: dict[str, Any] = {}
    for name, (attribute, kind) in _REQUEST.items():
        value = params.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[f"gen_ai.request.{attribute}"] = kind(value)
    n, stop = params.get("n"), params.get("stop")
    if isinstance(n, int) and n != 1:
        found["gen_ai.request.choice.count"] = n
    if isinstance(stop, str | list):
        found["gen_ai.request.stop_sequences"] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
    return found


def trajectory_attributes(info: TrajectoryInfo) -> dict[str, Any]:
    """Return what tells whose call it is."""
    found = {
        "gen_ai.conversation.id": info.session_id,
        "art.trajectory.id": info.id,
        "art.scenario.id": info.scenario_key,
        "art.group.id": info.group_key,
    }
    return {key: value for key, value in found.items() if value is not None}


def error_type(error: str) -> str:
    """Return the class of `Class: message`; `_OTHER` where it names none."""
    name = error.partition(":")[0]
    return name if name.isidentifier() else "_OTHER"
