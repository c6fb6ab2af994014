"""Whole trajectories as JSON and back without any loss: the format `art_patch.trajectory/1`.

A line of the file holds all data that the store has about one trajectory: its record, its calls with all choices, token
ids and log-probabilities, its scores, spans, corrections and group. Fields with their default value are left out.

Reading is strict, because a policy would be trained on wrong values: an unknown or mistyped field raises an error.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_origin, get_type_hints

import pydantic
from pydantic_core import PydanticCustomError

from art_patch.errors import MalformedFile
from art_patch.types import (
    JSON,
    REPLAY,
    REPLAY_FROM,
    REPLAY_OF,
    Call,
    Choice,
    Correction,
    Record,
    Score,
    SpanInfo,
    Trajectory,
    TrajectoryInfo,
)

FORMAT = "art_patch.trajectory/1"  # name and version. A reader refuses a version that it does not know

IMPORTED: Final = "imported"
"""Value of `TrajectoryInfo.origin` and `Call.untrainable` in trajectories that were not recorded here."""

_LAST_TOKEN_ID = (1 << 32) - 1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A trajectory with its spans, corrections and group, as one line of a file holds them."""

    trajectory: Trajectory
    spans: tuple[SpanInfo, ...] = ()
    group: JSON | None = None  # with the fields of `_Group`
    # Policy that answered -> fingerprint of its base model: token ids mean another text to another base model.
    bases: JSON = field(default_factory=dict[str, Any])
    corrections: tuple[Correction, ...] = ()

    @property
    def records(self) -> list[Record]:
        """All records of the bundle, each after the records that it refers to, as the store needs them."""
        whole = self.trajectory
        return [whole.info, *self.spans, *whole.calls, *whole.scores, *self.corrections]

    @property
    def offers_replay(self) -> bool:
        """Whether the run's metadata names a function that can repeat the run."""
        return self.trajectory.info.metadata.get(REPLAY) is not None

    def without_replay(self) -> "Bundle":
        """Return the bundle without the function that repeats the run: no file may decide which code the job runs."""
        info = self.trajectory.info
        metadata = {name: value for name, value in info.metadata.items() if name not in (REPLAY_OF, REPLAY_FROM)}
        # Kept as `null`: an erasure looks for this name to find the replays of this run.
        if REPLAY in metadata:
            metadata[REPLAY] = None
        return replace(self, trajectory=replace(self.trajectory, info=replace(info, metadata=metadata)))

    def without_tokens_of(self, strangers: Iterable[str]) -> "Bundle":
        """Return the run with each call that one of these policies answered marked as untrainable.

        The importing project does not have these policies, so it cannot tell what their tokens were sampled from.
        """
        unknown = set(strangers)
        calls = tuple(
            # A call that is untrainable already keeps its own reason.
            replace(call, untrainable=IMPORTED) if call.policy in unknown and call.untrainable is None else call
            for call in self.trajectory.calls
        )
        return replace(self, trajectory=replace(self.trajectory, calls=calls))


def encode(bundle: Bundle) -> dict[str, Any]:
    """Return a bundle as the JSON object that one line of the file holds; `decode` is the inverse."""
    whole = bundle.trajectory
    line: dict[str, Any] = {"format": FORMAT, "trajectory": _shown(whole.info)}
    parts = {"calls": whole.calls, "scores": whole.scores, "spans": bundle.spans, "corrections": bundle.corrections}
    for name, records in parts.items():
        if records:
            line[name] = [_shown(record, without="trajectory_id") for record in records]
    if bundle.group is not None:
        line["group"] = dict(bundle.group)
    if bundle.bases:
        line["bases"] = dict(bundle.bases)
    return line


def indexed(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a Parquet table: the column `record` holds the line; the other columns are for searching."""
    info = line["trajectory"]
    names = ("id", "started_at", "origin", "name", "user_id", "session_id", "scenario_key")
    row = {name: info.get(name) for name in names} | {"origin": info.get("origin", TrajectoryInfo("", 0.0).origin)}
    return {"format": line["format"], **row, "calls": len(line.get("calls", ())), "record": line}


def decode(line: Mapping[str, Any]) -> Bundle:
    """Return the bundle of one line, or raise `MalformedFile`. Calls without exact token ids are marked untrainable."""
    # First of all: the rules of this version do not apply to fields of a later one.
    if (said := line.get("format")) != FORMAT:
        raise MalformedFile(f"format is {said!r}, this release reads {FORMAT}; upgrade art-patch")
    try:
        given = _LINE.model_validate(dict(line))
    except pydantic.ValidationError as error:
        raise _malformed(error) from None
    info = _record(TrajectoryInfo, given.trajectory)

    def read(record: type[_T], parts: Iterable[Any], time: str = "at") -> tuple[_T, ...]:
        # In the store's own order, so that reading a file and reading a store give equal bundles.
        found = [_record(record, each, trajectory_id=info.id) for each in parts]
        return tuple(sorted(found, key=attrgetter(time, "id")))

    for key, times in Counter(call.id for call in given.calls).items():
        if times > 1:
            raise MalformedFile(f"calls: id {key!r} comes twice")
    calls = tuple(_call(call) for call in read(Call, given.calls, "started_at"))
    spans, corrections = read(SpanInfo, given.spans, "started_at"), read(Correction, given.corrections)
    group = None if given.group is None else given.group.model_dump(exclude_unset=True)
    return Bundle(Trajectory(info, calls, read(Score, given.scores)), spans, group, given.bases, corrections)


def _call(call: Call) -> Call:
    # A file can claim anything. Without exact tokens GRPO would train on guesses, so the claim is not believed.
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
        # Most fields of most calls have their default, and files hold many calls.
        if each.name == without or value == _default(each):
            continue
        if each.name == "choices":
            value = [_shown(choice) for choice in value]
        elif each.name == "logprobs":
            # A forbidden token has -inf, which JSON cannot hold as a number.
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


# Reading: pydantic models with the fields and types of the records themselves, so that a new field of a record is
# checked without a change here. Only the types below are stricter than those of the records.

_STRICT = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _logprob(value: Any, finite: pydantic.ValidatorFunctionWrapHandler) -> float:
    # The forms in which `encode` writes numbers that JSON does not have.
    return float(value) if value in ("inf", "-inf", "nan") else finite(value)


def _as_choice(given: Any) -> Choice:
    choice = _record(Choice, given)
    if choice.token_ids is not None and choice.logprobs is not None and len(choice.token_ids) != len(choice.logprobs):
        # Training reads them side by side.
        counts = f"{len(choice.token_ids)} token ids and {len(choice.logprobs)} log-probabilities"
        raise PydanticCustomError("counts", "{counts}", {"counts": counts})
    return choice


_Name = Annotated[str, pydantic.Field(min_length=1)]
_Policy = Annotated[str, pydantic.Field(pattern=r"^.+@\d+$")]
# `strict=False`: JSON has lists where the records have tuples. What is inside them is still checked strictly.
_TokenIds = Annotated[tuple[Annotated[int, pydantic.Field(ge=0, le=_LAST_TOKEN_ID)], ...], pydantic.Field(strict=False)]
_Logprobs = Annotated[tuple[Annotated[float, pydantic.WrapValidator(_logprob)], ...], pydantic.Field(strict=False)]


def _model_of(record: type, **narrower: Any) -> Any:
    """Return a pydantic model with the record's fields and defaults, except its `trajectory_id`."""
    hints, made = get_type_hints(record), dict[str, Any]()
    for each in fields(record):
        hint = narrower.get(each.name, hints[each.name])
        if get_origin(hint) is tuple:
            hint = Annotated[hint, pydantic.Field(strict=False)]
        if each.name != "trajectory_id":
            made[each.name] = (hint, ... if (value := _default(each)) is MISSING else value)
    return _model(record.__name__, made)


def _model(name: str, fields: dict[str, Any]) -> Any:
    return pydantic.create_model(name, __config__=_STRICT, **fields)


_CHOICE: Any = Annotated[
    _model_of(Choice, token_ids=_TokenIds | None, logprobs=_Logprobs | None), pydantic.AfterValidator(_as_choice)
]
_CALL: Any = _model_of(
    Call, id=_Name, choices=tuple[_CHOICE, ...], policy=_Policy | None, prompt_token_ids=_TokenIds | None
)


class _Group(pydantic.BaseModel):
    model_config = _STRICT

    id: _Name
    scenario_key: str
    how: str
    held_out: bool
    # The last three hold a run whose copies are in other groups.
    state: Literal[
        "formed", "scored", "trained", "spent", "dead", "stale", "quarantined", "in spans", "resampled", "branched"
    ]
    created_at: float
    reason: str | None = None


_LINE = _model(
    "Line",
    {
        "format": (str, ...),
        "trajectory": (_model_of(TrajectoryInfo, id=_Name), ...),
        "calls": (list[_CALL], []),
        "scores": (list[_model_of(Score, id=_Name)], []),
        "spans": (list[_model_of(SpanInfo, id=_Name)], []),
        "corrections": (list[_model_of(Correction, id=_Name)], []),
        "group": (_Group | None, None),
        "bases": (dict[str, str], {}),
    },
)

_WANTED = {
    "string_type": "a text",
    "string_too_short": "a text of at least one character",
    "string_pattern_mismatch": "NAME@STEP",
    "float_type": "a number",
    "finite_number": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "dict_type": "an object",
    "mapping_type": "an object",
    "model_type": "an object",
    "list_type": "a list",
    "tuple_type": "a list",
    "greater_than_equal": f"a token id, 0 to {_LAST_TOKEN_ID}",
    "less_than_equal": f"a token id, 0 to {_LAST_TOKEN_ID}",
}
"""pydantic's kind of error -> what the field must be."""


def _record(cls: type[_T], given: Any, **about: Any) -> _T:
    # Only fields that the line has, so that the record's own defaults hold. `model_dump` would copy every message.
    return cls(**{name: getattr(given, name) for name in given.model_fields_set}, **about)


def _malformed(error: pydantic.ValidationError) -> MalformedFile:
    """Return the first of pydantic's errors, with the path of its field."""
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    kind, said = first["type"], repr(first["input"])
    if kind == "missing":
        return MalformedFile(f"{path} is missing")
    if kind == "extra_forbidden":
        return MalformedFile(f"{path} is no field of {FORMAT}")
    if kind == "counts":
        return MalformedFile(f"{path}: {first['msg']}")
    wanted = f"one of {first.get('ctx', {}).get('expected')}" if kind == "literal_error" else _WANTED.get(kind)
    shown = said if len(said) <= 60 else said[:57] + "..."
    return MalformedFile(f"{path} must be {wanted}, not {shown}" if wanted else f"{path}: {first['msg']}, not {shown}")
