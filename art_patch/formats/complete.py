"""Whole trajectories as JSON and back, nothing lost: `art_patch.trajectory/1`.

A line holds what the store knows of one trajectory: what is known of it (`trajectory`), its calls with all choices,
token ids and log-probabilities, its scores, spans and corrections, and the group that it is in. Fields with their
usual value are left out. `bases` are the fingerprints of the models behind the policies that sampled its tokens: tokens
of another base model mean something else.

Reading is strict: a field that is unknown or of the wrong type is an error with the field's path, because what is
wrong here would be trained on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Final, TypeVar, cast, get_args

from art_patch.errors import MalformedFile
from art_patch.types import (
    JSON,
    REPLAY,
    Api,
    Call,
    CallStatus,
    Choice,
    Correction,
    Origin,
    Record,
    Score,
    SpanInfo,
    SpanKind,
    Trajectory,
    TrajectoryInfo,
)

FORMAT = "art_patch.trajectory/1"
"""Name and version; a reader refuses a version that it does not know."""

IMPORTED: Final = "imported"
"""`TrajectoryInfo.origin` and `Call.untrainable` of what was never recorded here."""

GROUP_STATES = ("formed", "scored", "trained", "spent", "dead", "stale")

_LAST_TOKEN_ID = (1 << 32) - 1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A trajectory with what the store keeps beside it.

    Attributes:
        trajectory: the calls and scores.
        spans: the named parts.
        group: `id`, `scenario_key`, `how`, `held_out`, `state`, `created_at`, `reason` of its group, if it has one.
        bases: fingerprint of the base model behind each policy that answered.
        corrections: what people say its answers should have been.
    """

    trajectory: Trajectory
    spans: tuple[SpanInfo, ...] = ()
    group: JSON | None = None
    bases: JSON = field(default_factory=dict[str, Any])
    corrections: tuple[Correction, ...] = ()

    @property
    def records(self) -> list[Record]:
        """What to write, in an order in which nothing refers to what is not there yet."""
        whole = self.trajectory
        return [whole.info, *self.spans, *whole.calls, *whole.scores, *self.corrections]

    @property
    def offers_replay(self) -> bool:
        """Whether the run says which function to call again."""
        return self.trajectory.info.metadata.get(REPLAY) is not None

    def without_replay(self) -> Bundle:
        """Return the bundle without what would have the job call a function: a file must not say what to execute.

        `replay` stays as `null`, because by that name an erasure finds the runs that were made of this one.
        """
        info = self.trajectory.info
        metadata = {name: value for name, value in info.metadata.items() if name != "replay_of"}
        if REPLAY in metadata:
            metadata[REPLAY] = None
        return replace(self, trajectory=replace(self.trajectory, info=replace(info, metadata=metadata)))

    def without_tokens_of(self, strangers: Iterable[str]) -> Bundle:
        """Return the bundle with the calls of these policies marked as not trainable."""
        unknown = set(strangers)
        calls = tuple(
            replace(call, untrainable=IMPORTED) if call.policy in unknown and call.untrainable is None else call
            for call in self.trajectory.calls
        )
        return replace(self, trajectory=replace(self.trajectory, calls=calls))


def encode(bundle: Bundle) -> dict[str, Any]:
    """Return the line's object."""
    trajectory = bundle.trajectory
    line: dict[str, Any] = {"format": FORMAT, "trajectory": _shown(trajectory.info)}
    if trajectory.calls:
        line["calls"] = [_shown(call, without="trajectory_id") for call in trajectory.calls]
    if trajectory.scores:
        line["scores"] = [_shown(score, without="trajectory_id") for score in trajectory.scores]
    if bundle.spans:
        line["spans"] = [_shown(span, without="trajectory_id") for span in bundle.spans]
    if bundle.corrections:
        line["corrections"] = [_shown(each, without="trajectory_id") for each in bundle.corrections]
    if bundle.group is not None:
        line["group"] = dict(bundle.group)
    if bundle.bases:
        line["bases"] = dict(bundle.bases)
    return line


def indexed(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a table: the line as `record`, beside columns to look for it by."""
    info = line["trajectory"]
    names = ("id", "started_at", "origin", "name", "user_id", "session_id", "scenario_key")
    row = {name: info.get(name) for name in names} | {"origin": info.get("origin", TrajectoryInfo("", 0.0).origin)}
    return {"format": line["format"], **row, "calls": len(line.get("calls", ())), "record": line}


def decode(line: Mapping[str, Any]) -> Bundle:
    """Undo `encode`. Calls that claim to be trainable and lack exact tokens are no longer.

    Raises:
        MalformedFile: with the path of the field that is wrong.
    """
    if line.get("format") != FORMAT:
        said = line.get("format")
        raise MalformedFile(f"format is {said!r}, this release reads {FORMAT}; upgrade art-patch")
    known = {"format", "trajectory", "calls", "scores", "spans", "corrections", "group", "bases"}
    _no_more(line, known, "")
    info = _built(TrajectoryInfo, line.get("trajectory"), "trajectory", _INFO)
    about = {"trajectory_id": info.id}
    calls = [_call(_built(Call, each, where, _CALL, **about)) for each, where in _each(line.get("calls", []), "calls")]
    scores = [_built(Score, each, where, _SCORE, **about) for each, where in _each(line.get("scores", []), "scores")]
    spans = [_built(SpanInfo, each, where, _SPAN, **about) for each, where in _each(line.get("spans", []), "spans")]
    corrections = [
        _built(Correction, each, where, _CORRECTION, **about)
        for each, where in _each(line.get("corrections", []), "corrections")
    ]
    _distinct((call.id for call in calls), "calls")
    calls.sort(key=lambda call: (call.started_at, call.id))
    scores.sort(key=lambda score: (score.at, score.id))
    spans.sort(key=lambda span: (span.started_at, span.id))
    corrections.sort(key=lambda correction: (correction.at, correction.id))
    group = None if line.get("group") is None else _checked(line["group"], "group", _GROUP, optional=("reason",))
    bases = _map_of_texts(line.get("bases", {}), "bases")
    return Bundle(Trajectory(info, tuple(calls), tuple(scores)), tuple(spans), group, bases, tuple(corrections))


def _call(call: Call) -> Call:
    exact = (
        call.policy is not None
        and bool(call.prompt_token_ids)
        and bool(call.choices)
        and all(choice.token_ids and choice.logprobs is not None for choice in call.choices)
    )
    return call if exact or call.untrainable is not None else replace(call, untrainable=IMPORTED)


def _shown(record: Any, *, without: str = "") -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if each.name == without or value == _default(each):
            continue
        if each.name == "choices":
            value = [_shown(choice) for choice in value]
        elif each.name == "logprobs":
            value = [number if math.isfinite(number) else str(number) for number in value]
        elif isinstance(value, tuple):
            value = list(cast("tuple[Any, ...]", value))
        elif isinstance(value, Mapping):
            value = dict(cast("JSON", value))
        shown[each.name] = value
    return shown


def _default(each: Any) -> Any:
    if each.default is not MISSING:
        return each.default
    return MISSING if each.default_factory is MISSING else each.default_factory()


# Reading. A check takes the value and its path and returns the value as the record holds it.

Check = Callable[[Any, str], Any]


def _wrong(where: str, wanted: str, value: Any) -> MalformedFile:
    said = repr(value)
    return MalformedFile(f"{where} must be {wanted}, not {said if len(said) <= 60 else said[:57] + '...'}")


def _is(wanted: str, holds: Callable[[Any], bool]) -> Check:
    def check(value: Any, where: str) -> Any:
        if not holds(value):
            raise _wrong(where, wanted, value)
        return value

    return check


def _or_null(check: Check) -> Check:
    return lambda value, where: None if value is None else check(value, where)


def _list_of(check: Check) -> Check:
    return lambda value, where: tuple(check(each, path) for each, path in _each(value, where))


def _one_of(*names: str) -> Check:
    return _is(f"one of {', '.join(names)}", lambda value: value in names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_text = _is("a text", lambda value: isinstance(value, str))
_name = _is("a text of at least one character", lambda value: isinstance(value, str) and bool(value))
_number = _is("a number", _is_number)
_count = _is("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool))
_truth = _is("true or false", lambda value: isinstance(value, bool))
_object = _is("an object", lambda value: isinstance(value, dict))
_policy = _is("NAME@STEP", lambda value: isinstance(value, str) and re.fullmatch(r".+@\d+", value) is not None)


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _wrong(where, "a list of token ids", value)
    ids = cast("list[Any]", value)
    for number in ids:
        if type(number) is not int or not 0 <= number <= _LAST_TOKEN_ID:
            raise _wrong(where, "a list of token ids", number)
    return tuple(ids)


def _logprobs(value: Any, where: str) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise _wrong(where, "a list of log-probabilities", value)
    numbers: list[float] = []
    for number in cast("list[Any]", value):
        if number not in ("inf", "-inf", "nan") and not _is_number(number):
            raise _wrong(where, "a list of log-probabilities", number)
        numbers.append(float(number))
    return tuple(numbers)


def _choice(value: Any, where: str) -> Choice:
    choice = _built(Choice, value, where, _CHOICE)
    if choice.token_ids is not None and choice.logprobs is not None and len(choice.token_ids) != len(choice.logprobs):
        raise MalformedFile(f"{where}: {len(choice.token_ids)} token ids and {len(choice.logprobs)} log-probabilities")
    return choice


_INFO: Mapping[str, Check] = {
    "id": _name,
    "started_at": _number,
    "origin": _one_of(*get_args(Origin)),
    "ended_at": _or_null(_number),
    "name": _or_null(_text),
    "scenario_key": _or_null(_text),
    "group_key": _or_null(_text),
    "session_id": _or_null(_text),
    "user_id": _or_null(_text),
    "tags": _list_of(_text),
    "metadata": _object,
    "error": _or_null(_text),
}
_CHOICE: Mapping[str, Check] = {
    "index": _count,
    "message": _object,
    "finish_reason": _or_null(_text),
    "token_ids": _or_null(_token_ids),
    "logprobs": _or_null(_logprobs),
}
_CALL: Mapping[str, Check] = {
    "id": _name,
    "started_at": _number,
    "requested_model": _text,
    "messages": _list_of(_object),
    "choices": _list_of(_choice),
    "tools": _list_of(_object),
    "params": _object,
    "span_id": _or_null(_text),
    "duration_ms": _number,
    "ttft_ms": _or_null(_number),
    "policy": _or_null(_policy),
    "prompt_token_ids": _or_null(_token_ids),
    "prompt_tokens": _count,
    "completion_tokens": _count,
    "status": _one_of(*get_args(CallStatus)),
    "error": _or_null(_text),
    "fallback": _or_null(_text),
    "untrainable": _or_null(_text),
    "api": _one_of(*get_args(Api)),
    "shadow_of": _or_null(_text),
}
_SPAN: Mapping[str, Check] = {
    "id": _name,
    "name": _text,
    "started_at": _number,
    "parent_id": _or_null(_text),
    "ended_at": _or_null(_number),
    "kind": _one_of(*get_args(SpanKind)),
    "attributes": _object,
    "error": _or_null(_text),
}
_SCORE: Mapping[str, Check] = {
    "id": _name,
    "name": _text,
    "value": _number,
    "source": _text,
    "at": _number,
    "comment": _or_null(_text),
    "group_id": _or_null(_text),
    "rubric": _or_null(_text),
    "judge": _or_null(_text),
}
_CORRECTION: Mapping[str, Check] = {
    "id": _name,
    "at": _number,
    "source": _text,
    "message": _object,
    "call_id": _or_null(_text),
    "comment": _or_null(_text),
}
_GROUP: Mapping[str, Check] = {
    "id": _name,
    "scenario_key": _text,
    "how": _text,
    "held_out": _truth,
    "state": _one_of(*GROUP_STATES),
    "created_at": _number,
    "reason": _or_null(_text),
}


def _each(value: Any, where: str) -> Iterable[tuple[Any, str]]:
    if not isinstance(value, list):
        raise _wrong(where, "a list", value)
    return ((each, f"{where}[{index}]") for index, each in enumerate(cast("list[Any]", value)))


def _checked(value: Any, where: str, checks: Mapping[str, Check], optional: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    given = cast("dict[str, Any]", value)
    _no_more(given, checks.keys(), where)
    for name in checks:
        if name not in given and name not in optional:
            raise MalformedFile(f"{where}.{name} is missing")
    return {name: check(given[name], f"{where}.{name}") for name, check in checks.items() if name in given}


def _built(cls: type[_T], value: Any, where: str, checks: Mapping[str, Check], **about: Any) -> _T:
    optional = [each.name for each in fields(cast(Any, cls)) if _default(each) is not MISSING]
    return cls(**_checked(value, where, checks, optional), **about)


def _no_more(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for name in given.keys() - set(known):
        raise MalformedFile(f"{where}{'.' if where else ''}{name} is no field of {FORMAT}")


def _distinct(ids: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for key in ids:
        if key in seen:
            raise MalformedFile(f"{where}: id {key!r} comes twice")
        seen.add(key)


def _map_of_texts(value: Any, where: str) -> JSON:
    given = _object(value, where)
    return {name: _text(each, f"{where}.{name}") for name, each in given.items()}
