"""Turns the items of the queue into records for the store: parses calls, finds their trajectories, redacts texts.

With a `sample_rate` below 1, a hash of the trajectory's id decides whether the trajectory is recorded. The record of a
trajectory is written before its first call. No answer of a server can make a function of this module raise: a part
that cannot be read is left out, and `untrainable` of the call says what is missing. Only the recorder's thread uses
this module's objects.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any, cast

from art_patch._lib.faults import Unstorable, faults
from art_patch._lib.ids import new_id
from art_patch._lib.loose_json import as_object, objects
from art_patch.recording import chat, messages, responses
from art_patch.recording.exchange import Exchange, in_share
from art_patch.recording.frames import parse_request
from art_patch.recording.redaction import MEDIA_REPLACED, Redactor, without_media
from art_patch.recording.scrubbing import scrub
from art_patch.settings import Redact
from art_patch.trajectories import ROOT, canonical, why_untrainable
from art_patch.types import JSON, UPSTREAM, Api, AppReport, Call, CallStatus, Record, TrajectoryInfo

MAX_ANNOUNCED = 20_000

MAX_ANSWERED_BY = 200  # characters of `Call.answered_by`

OnShadow = Callable[[Call, TrajectoryInfo], None]


class Converter:
    """Turns queue items into records. It remembers for which trajectories it has made a record already."""

    def __init__(self, *, sample_rate: float = 1.0, redact: Redact = None, on_shadow: OnShadow | None = None) -> None:
        """Call `on_shadow` with each answered call of which policies get a copy, before the call is redacted."""
        self._sample_rate = sample_rate
        self._redact = Redactor(redact) if redact is not None else None
        self._on_shadow = on_shadow
        self._announced: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        self._stitcher = Stitcher()

    def convert(self, item: Exchange | Record) -> list[Record]:
        """Return the records of one item, which may be none; raise `Unstorable` if the app's `redact` failed."""
        if isinstance(item, AppReport):
            return [item]
        if isinstance(item, Exchange):
            records = self._read(item)
        else:
            records = self._announce(item) if isinstance(item, TrajectoryInfo) else [item]
        records = [record for record in records if in_share(_owner(record), self._sample_rate, "sample")]
        if self._redact is None:
            return records
        try:
            return [self._redact(record) for record in records]
        except Exception as error:  # raised by the app's function
            for record in records:
                # The trajectory was not stored, so it has to be announced again.
                self._announced.pop(_owner(record), None)
            faults.trouble("redact", error)
            raise Unstorable from error

    def _read(self, exchange: Exchange) -> list[Record]:
        call = read_call(exchange)
        info = exchange.trajectory or self._stitcher.place(call, exchange.group_key, exchange.run_id)
        if not exchange.learn:
            info = replace(info, learn=False)
        call = replace(call, trajectory_id=info.id, shadow_of=exchange.shadow_of)
        # A policy cannot be asked about a picture of which only the hash is left.
        whole = not exchange.media_replaced
        if exchange.shadow and whole and info.learn and call.status == "ok" and self._on_shadow is not None:
            self._on_shadow(call, info)
        return [*self._announce(info), call]

    def _announce(self, info: TrajectoryInfo) -> list[Record]:
        known = self._announced.get(info.id)
        now = info.origin, info.learn and (known is None or known[1])
        # A trajectory is written when it is first seen, when its origin changes to `stitched`, when a call of it says
        # that nothing may be learned from it, and when it ends.
        if known is not None and info.ended_at is None and known == now:
            self._announced.move_to_end(info.id)
            return []
        self._announced[info.id] = now
        self._announced.move_to_end(info.id)
        while len(self._announced) > MAX_ANNOUNCED:
            self._announced.popitem(last=False)
        return [info]


def _owner(record: Record) -> str:
    return record.id if isinstance(record, TrajectoryInfo | AppReport) else record.trajectory_id


_ANSWERS: dict[Api, Callable[[bytes], chat.Answered]] = {
    "chat": chat.read_chat_answer,
    "completions": chat.read_completions_answer,
    "messages": messages.read_messages_answer,
    "responses": responses.read_responses_answer,
}


def read_call(exchange: Exchange) -> Call:
    """Return the parsed call of an exchange. Its `trajectory_id` is empty, because the caller finds the trajectory."""
    asked = parse_request(exchange)
    params = asked.params
    if not exchange.keeps_logprobs and exchange.policy is not UPSTREAM:
        # The engine's request asks for log-probabilities; the app has not.
        params = {key: value for key, value in params.items() if key != "logprobs"}
    answer = _ANSWERS[exchange.asked_api](without_media(exchange.whole_answer()))
    error = exchange.error
    if error is None and answer.error is not None:
        error = f"the server ended the answer: {_short(answer.error)}"
    sampled = sum(len(choice.token_ids or ()) for choice in answer.choices)
    call = Call(
        id=exchange.id,
        trajectory_id="",
        started_at=exchange.started_at,
        requested_model=exchange.requested_model or answer.model or "",
        messages=asked.messages,
        choices=answer.choices,
        tools=asked.tools,
        params=params,
        span_id=exchange.span_id,
        duration_ms=exchange.duration_ms,
        ttft_ms=exchange.ttft_ms,
        policy=exchange.policy,
        prompt_token_ids=answer.prompt_token_ids,
        prompt_tokens=_known(answer.prompt_tokens, len(answer.prompt_token_ids or ())),
        completion_tokens=_known(answer.completion_tokens, sampled),
        status=_status(exchange, answer, asked.answers),
        error=None if error is None else scrub(error),
        fallback=None if exchange.fallback is None else scrub(exchange.fallback),
        api=exchange.api,
        in_control_group=exchange.in_control_group,
        answered_by=_answered_by(answer) if exchange.policy is UPSTREAM else None,
    )
    return replace(call, untrainable=why_untrainable(call) or (MEDIA_REPLACED if exchange.media_replaced else None))


def _status(exchange: Exchange, answer: chat.Answered, expected: int) -> CallStatus:
    if exchange.ended == "failed" or answer.error is not None:
        return "error"
    if exchange.ended == "cancelled" and not (exchange.streamed and answer.done):
        return "cancelled"
    if exchange.ended == "complete" or answer.done:
        return "ok"
    # Many apps stop at the finish reason, one event before the end of the stream. Then the answer is whole.
    finished = [choice for choice in answer.choices if choice.finish_reason is not None]
    return "ok" if len(finished) == len(answer.choices) >= expected else "abandoned"


def _answered_by(answer: chat.Answered) -> str | None:
    """Return the model that an answer names, and the fingerprint after it, on one line of bounded length."""
    if answer.model is None:
        return None
    named = [_plain(answer.model), *([_plain(answer.fingerprint)] if answer.fingerprint else ())]
    return " ".join(named)[:MAX_ANSWERED_BY].rstrip()


def _plain(name: str) -> str:
    # Without spaces, so that what stands before the only space is the model.
    return "".join("_" if sign.isspace() or not sign.isprintable() else sign for sign in name[:MAX_ANSWERED_BY])


def _known(count: int | None, default: int) -> int:
    return default if count is None else count


def _short(error: Any) -> str:
    message = as_object(error).get("message")
    return message if isinstance(message, str) else json.dumps(error, default=repr)


MAX_NODES = 40_000
# So many trajectories that ended at one node are told apart.
MAX_ENDS = 64
_ASKED = b"?"


@dataclass(slots=True)
class _Thread:  # a trajectory in the making, shared by all the nodes where it may go on
    info: TrajectoryInfo


@dataclass(slots=True)
class _End:  # a call, after which a trajectory may go on
    thread: _Thread
    ended_at: float
    extended: bool = False


class Stitcher:
    """Finds the trajectory of a call that names none, by the earlier conversation that the call's messages extend.

    A node is a hash of an answer and of all messages before it. A later call whose prompt contains the same messages
    and the answer joins the trajectory of that node. If several trajectories have the node (the same question got the
    same answer twice), the call joins the newest one that no call has extended yet, or else the newest one, as a
    branch. The oldest of too many nodes are forgotten; a call that extends one of them begins a new trajectory.

    Some agents drop an answer that they cannot use, and send the same prompt again with an error message after it. Such
    a call joins the trajectory of the call with that prompt, if this has ended and no call has gone on from it. If
    there are several such calls, for example of siblings, it is not known whose answer was dropped: then it does not.
    """

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        self._max_nodes = max_nodes
        # By the node of an answer, and by that of a prompt alone with `_ASKED` after it.
        self._ends: OrderedDict[bytes, list[_End]] = OrderedDict()

    def place(self, call: Call, group_key: str | None = None, run_id: str | None = None) -> TrajectoryInfo:
        """Return the trajectory that `call` belongs to, and remember the nodes of its answers.

        A new trajectory gets the id `run_id`.
        """
        nodes = list(accumulate(call.messages, _node, initial=ROOT))[1:]
        end = self._find(call, nodes)
        if end is None:
            thread = _Thread(TrajectoryInfo(run_id or new_id(call.started_at), call.started_at, group_key=group_key))
        else:
            end.extended = True
            thread = end.thread
            if thread.info.origin != "stitched":
                thread.info = replace(thread.info, origin="stitched")
        last = nodes[-1] if nodes else ROOT
        new = _End(thread, call.started_at + call.duration_ms / 1000)
        # Failed calls too: one that is left out could make the call of a sibling look like the only one.
        self._remember(last + _ASKED, new)
        for choice in call.choices:
            if choice.message:
                self._remember(_node(last, choice.message), new)
        return thread.info

    def _find(self, call: Call, nodes: list[bytes]) -> _End | None:
        may_drop = True
        # The last message is new: a prompt that ends in a known answer is that call, made again.
        for position in range(len(nodes) - 2, -1, -1):
            role = call.messages[position].get("role")
            if role != "assistant":
                # Instructions alone are no prompt of a run.
                if may_drop and role not in ("system", "developer"):
                    open_ends = [end for end in self._ends.get(nodes[position] + _ASKED, ()) if not end.extended]
                    if len(open_ends) == 1 and open_ends[0].ended_at <= call.started_at:
                        return open_ends[0]
                continue
            may_drop = False
            ends = self._ends.get(nodes[position])
            if ends:
                self._ends.move_to_end(nodes[position])
                return next((end for end in reversed(ends) if not end.extended), ends[-1])
        return None

    def _remember(self, node: bytes, end: _End) -> None:
        ends = self._ends.setdefault(node, [])
        ends.append(end)
        del ends[:-MAX_ENDS]
        self._ends.move_to_end(node)
        while len(self._ends) > self._max_nodes:
            self._ends.popitem(last=False)


def _node(parent: bytes, message: JSON) -> bytes:
    """Return the id, under `parent`, of the part of a message that survives every client's echo."""
    return blake2b(parent + b"\0" + _reduced(message), digest_size=16).digest()


def _reduced(message: JSON) -> bytes:
    # Clients echo an answer in their own words: with or without nulls, a text as a list of one part, without the
    # reasoning. So only role, content, name and tool calls count here.
    content: Any = message.get("content")
    if isinstance(content, list) and len(cast("list[Any]", content)) == 1:
        part = content[0]
        if isinstance(part, dict) and cast("dict[str, Any]", part).get("type") == "text":
            content = cast("dict[str, Any]", part).get("text")
    named: list[Any] = [message.get(key) for key in ("role", "name", "tool_call_id")]
    calls = message.get("tool_calls")
    said = [*named, cast("Any", content)]
    if not calls and all(isinstance(value, str | None) for value in said):
        # Nearly every message has only texts. JSON would take five times as long.
        return "\x1f".join(("", *(value or "" for value in said))).encode("utf-8", "surrogatepass")
    small: dict[str, Any] = dict(zip(("role", "name", "tool_call_id"), named, strict=True)) | {"content": content}
    if isinstance(calls, list):
        small["tool_calls"] = [
            {"id": call.get("id"), "name": named.get("name"), "arguments": named.get("arguments")}
            for call in objects(cast("list[Any]", calls))
            for named in (as_object(call.get("function")),)
        ]
    return canonical(small)
