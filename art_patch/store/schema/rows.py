"""Records as rows: what a batch adds to the tables, messages and prompt ids only if they are new."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from sqlalchemy import Connection

from art_patch.store.schema.codec import pack_ids, pack_logprobs, squeeze, squeeze_ids, uint32
from art_patch.store.schema.statements import APP, CORRECTION, SCORE, SPAN, Row, Statements
from art_patch.store.schema.tokens import blocks, rest
from art_patch.trajectories import ROOT, chain, verbatim
from art_patch.types import AppReport, Call, Correction, Record, Score, SpanInfo, TrajectoryInfo

_encode = json.JSONEncoder(separators=(",", ":"), default=repr, allow_nan=False).encode
_encode_anything = json.JSONEncoder(default=repr).encode

_MAX_INTEGER = (1 << 63) - 1


class Batch:
    """What some records amount to. Add them all, then insert once."""

    def __init__(self, records: Sequence[Record], seen: Callable[[bytes], bool]) -> None:
        """Take `records`; `seen(id)` says that a message or a block of ids is in the database already."""
        self._seen = seen
        self.new: dict[bytes, None] = {}
        self._nodes: list[Row] = []
        self._blocks: list[Row] = []
        self._blobs: dict[bytes, Row] = {}
        self._infos: list[TrajectoryInfo] = []
        self._spans: list[Row] = []
        self._calls: list[Row] = []
        self._choices: list[Row] = []
        self._scores: list[Row] = []
        self._corrections: list[Row] = []
        self._apps: list[Row] = []
        self._last_call_at: dict[str, float] = {}
        for record in records:
            self.add(record)

    @property
    def durable(self) -> bool:
        """Whether it holds what was costly to come by."""
        return bool(self._scores or self._corrections)

    @property
    def latest_report(self) -> float | None:
        """When the latest report of an app process was made."""
        return max((row[APP.index("at")] for row in self._apps), default=None)

    def add(self, record: Record) -> None:
        """Take one more."""
        match record:
            case Call():
                self._add_call(record)
            case TrajectoryInfo():
                self._infos.append(record)
            case SpanInfo():
                values = {name: _plain(getattr(record, name)) for name in SPAN if name != "attributes"}
                values["attributes"] = _json(record.attributes)
                self._spans.append(tuple(values[name] for name in SPAN))
            case Score():
                self._scores.append(tuple(_plain(getattr(record, name)) for name in SCORE))
            case Correction():
                values = {name: _plain(getattr(record, name)) for name in CORRECTION if name != "message"}
                values["message"] = _json(record.message)
                self._corrections.append(tuple(values[name] for name in CORRECTION))
            case AppReport():
                self._apps.append((record.id, record.at, _json(record.facts)))

    def insert(self, connection: Connection, statements: Statements) -> None:
        """Write everything; what two processes may write at once in the order of its keys, lest they deadlock."""
        statements.nodes(connection, sorted(self._nodes))
        statements.blocks(connection, sorted(self._blocks))
        statements.blobs(connection, sorted(self._blobs.values()))
        statements.calls(connection, self._calls)
        statements.choices(connection, self._choices)
        known = sorted(map(self._trajectory, self._infos), key=_first)
        statements.trajectories(connection, known)
        others = sorted(self._last_call_at.keys() - {row[0] for row in known})
        statements.ends(connection, [(self._last_call_at[key], key, self._last_call_at[key]) for key in others])
        statements.spans(connection, sorted(self._spans, key=_first))
        statements.scores(connection, sorted(self._scores, key=_first))
        statements.corrections(connection, sorted(self._corrections, key=_first))
        statements.apps(connection, self._apps)

    def _trajectory(self, info: TrajectoryInfo) -> Row:
        key = _text(info.id)
        return (
            key,
            info.origin,
            info.started_at,
            info.ended_at,
            self._last_call_at.get(key),
            _text(info.name),
            _text(info.scenario_key),
            _text(info.group_key),
            _text(info.session_id),
            _text(info.user_id),
            _json(info.tags),
            _json(info.metadata),
            _text(info.error),
        )

    def _add_call(self, call: Call) -> None:
        prompt = self._chain(call.messages, ROOT)
        for choice in call.choices:
            self._choices.append(
                (
                    call.id,
                    _whole(choice.index),
                    self._chain((choice.message,), prompt),
                    _text(choice.finish_reason),
                    pack_ids(choice.token_ids),
                    pack_logprobs(choice.logprobs),
                )
            )
        block, ids = self._ids(call.prompt_token_ids)
        trajectory_id = _text(call.trajectory_id)
        self._calls.append(
            (
                call.id,
                trajectory_id,
                call.span_id,
                call.started_at,
                call.duration_ms,
                call.ttft_ms,
                _text(call.requested_model),
                _text(call.policy),
                prompt,
                self._blob(call.tools),
                _json(call.params),
                ids,
                _whole(call.prompt_tokens),
                _whole(call.completion_tokens),
                call.status,
                _text(call.error),
                _text(call.fallback),
                _text(call.untrainable),
                call.api,
                call.shadow_of,
                block,
            )
        )
        ended_at = call.started_at + call.duration_ms / 1000
        self._last_call_at[trajectory_id] = max(ended_at, self._last_call_at.get(trajectory_id, 0.0))

    def _chain(self, messages: Sequence[Any], parent: bytes) -> bytes:
        for link in chain(messages, parent):
            parent = link.node
            if parent not in self.new and not self._seen(parent):
                self.new[parent] = None
                self._nodes.append((parent, link.parent, squeeze(link.body)))
        return parent

    def _ids(self, prompt_token_ids: Sequence[int] | None) -> tuple[bytes | None, bytes | None]:
        """Return the last whole block of a prompt's ids, and what is left over."""
        if prompt_token_ids is None:
            return None, None
        ids, last = uint32(prompt_token_ids), None
        for block, parent, part in blocks(ids):
            last = block
            if block not in self.new and not self._seen(block):
                self.new[block] = None
                self._blocks.append((block, parent, squeeze_ids(part)))
        return last, squeeze_ids(rest(ids))

    def _blob(self, values: Sequence[Any]) -> bytes | None:
        if not values:
            return None
        body = verbatim(list(values))
        key = blake2b(body, digest_size=16).digest()
        if key not in self._blobs:
            self._blobs[key] = (key, squeeze(body))
        return key


def _first(row: Row) -> Any:
    return row[0]


def _json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    if not value:
        return "{}" if isinstance(value, Mapping) else "[]"
    try:
        return _encode(value)
    except ValueError:  # NaN and the infinities are no JSON, and PostgreSQL minds
        return _encode(json.loads(_encode_anything(value), parse_constant=lambda _: None))


def _text(value: Any) -> Any:
    r"""Return what a text column can hold: lone surrogates and NUL become `\udXXX` and `\x00`."""
    if not isinstance(value, str) or (value.isascii() and "\0" not in value):
        return value
    return value.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _whole(value: int) -> int:
    return max(-_MAX_INTEGER, min(value, _MAX_INTEGER))


def _plain(value: Any) -> Any:
    return _whole(value) if isinstance(value, int) else _text(value)
