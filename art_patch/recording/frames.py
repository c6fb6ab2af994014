"""What the frames of the spool hold: a finished call, or records that are whole already.

Only what may be stored is written. Of a request these are its allow-listed parts; the answer is unpacked, without media
and, if it reports an error, without secrets. If the app redacts, only records that were redacted get here.

    call:     length of the head, head {"asked": {...}, "api": "chat", ...}, the answer's bytes
    records:  length of the head, head {"records": [["Score", {...}], ...]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from pydantic_core import PydanticSerializationError, from_json, to_json

from art_patch._lib.forking import late_import
from art_patch._lib.ids import new_id
from art_patch._lib.loose_json import parse_object
from art_patch.recording.exchange import Exchange, Queue

if TYPE_CHECKING:
    from art_patch.recording.chat import Asked
    from art_patch.types import Record

_HEAD_BYTES = 4

# Facts of a call that are values of JSON.
_FACTS = (
    "api", "ended", "group_key", "id", "in_control_group", "keeps_logprobs", "learn", "media_replaced", "policy",
    "requested_model", "run_id", "shadow", "shadow_of", "span_id", "started_at", "streamed", "times",
)  # fmt: skip


def parse_request(exchange: Exchange) -> Asked:
    """Return the allow-listed parts of a call's request. Afterwards the exchange has these in place of the bytes."""
    if exchange.asked is None:
        from art_patch.recording.redaction import without_media

        request = without_media(exchange.request)
        exchange.media_replaced = request is not exchange.request
        exchange.asked = reader(exchange.asked_api)(parse_object(request))
        exchange.request = b""
        # Made here, so that they stay the same wherever the call is read, and a call that is read twice is stored once.
        exchange.id, exchange.run_id = new_id(exchange.started_at), new_id(exchange.started_at)
    return cast("Asked", exchange.asked)


@cache
def reader(api: str) -> Any:
    """Return the function that reads the requests of an API."""
    # One by one: a process that ends right after its first call has no time for all of them. And once: the recorder's
    # thread holds `late_import` while it imports what opens a store, for a second on a busy machine.
    with late_import():
        if api == "messages":
            from art_patch.recording.messages import read_messages_request as read
        elif api == "responses":
            from art_patch.recording.responses import read_responses_request as read
        elif api == "completions":
            from art_patch.recording.chat import read_completions_request as read
        else:
            from art_patch.recording.chat import read_chat_request as read
    return read


def encode_call(exchange: Exchange) -> bytes:
    """Return the frame of a finished call."""
    from art_patch.recording.redaction import without_media
    from art_patch.recording.scrubbing import hide, scrub

    asked = parse_request(exchange)
    answer = without_media(exchange.whole_answer())
    reports = answer.count(b'"error":') - answer.count(b'"error":null') - answer.count(b'"error": null')
    if reports or exchange.ended == "failed":
        answer = hide(answer.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    texts = {"error": exchange.error, "fallback": exchange.fallback}
    head = _json(
        {name: getattr(exchange, name) for name in _FACTS}
        | {name: None if text is None else scrub(text) for name, text in texts.items()}
        | {"asked": asked, "trajectory": exchange.trajectory}
    )
    return b"".join((len(head).to_bytes(_HEAD_BYTES), head, answer))


def encode_records(records: Sequence[Record]) -> bytes:
    """Return the frame of records that are whole."""
    head = _json({"records": [(type(record).__name__, record) for record in records]})
    return len(head).to_bytes(_HEAD_BYTES) + head


def decode(body: bytes, queue: Queue) -> Exchange | list[Record]:
    """Return what a frame holds. Raises `ValueError` or `LookupError` if it was not made by this release."""
    length = int.from_bytes(body[:_HEAD_BYTES])
    text = body[_HEAD_BYTES : _HEAD_BYTES + length]
    try:
        head = from_json(text)
    except ValueError:  # it refuses half of a surrogate pair
        head = json.loads(text)
    if "records" in head:
        return [_typed(kind, record) for kind, record in head["records"]]
    exchange = Exchange(queue, head["requested_model"])
    for name in {*_FACTS, "error", "fallback"} & head.keys():  # an older release may have written fewer
        setattr(exchange, name, head[name])
    exchange.asked = _typed("Asked", head["asked"])
    if head["trajectory"] is not None:
        exchange.trajectory = _typed("TrajectoryInfo", head["trajectory"])
    exchange.answer = [body[_HEAD_BYTES + length :]]
    return exchange


def _json(value: Mapping[str, Any]) -> bytes:
    try:
        return to_json(value, fallback=repr, inf_nan_mode="constants")
    except (PydanticSerializationError, ValueError):  # half of a surrogate pair, which has no UTF-8, or a circle
        return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    names = [field.name for field in fields(value)] if hasattr(type(value), "__dataclass_fields__") else None
    return repr(value) if names is None else {name: getattr(value, name) for name in names}


def _typed(kind: str, value: Mapping[str, Any]) -> Any:
    return _adapter(kind).validate_python(value)


@cache
def _adapter(kind: str) -> Any:
    with late_import():
        from pydantic import TypeAdapter

        from art_patch import types
        from art_patch.recording.chat import Asked

        record = Asked if kind == "Asked" else getattr(types, kind)
        if not is_dataclass(record):
            raise LookupError(kind)
        return TypeAdapter(record)
