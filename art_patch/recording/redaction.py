"""Taking out of a record what must not be stored, in the background thread, just before the record goes to the store.

The hook sees every text of messages, tools, parameters, errors, comments and metadata, one at a time; names of fields
and ids are left alone. Token ids spell out the very text that was taken out, so a call that changed loses all of them
and is not trainable. A hook that raises costs the record: what could not be redacted is not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar, cast

from art_patch.recording.scrubbing import hide
from art_patch.settings import Redact
from art_patch.types import Call, Correction, Record, Score, SpanInfo, TrajectoryInfo

UNTRAINABLE = "it was redacted"

_CACHED_TEXTS = 2_000
_CACHED_CHARS = 20_000
"""An agent sends its whole conversation with each call; texts of usual length are looked at once."""

T = TypeVar("T")


class Redactor:
    """Applies one hook to records."""

    def __init__(self, redact: Redact) -> None:
        """Take `secrets` or the user's function of a text."""
        self._hook: Callable[[str], str] = hide if redact == "secrets" else cast(Callable[[str], str], redact)
        self._cached = lru_cache(maxsize=_CACHED_TEXTS)(self._hook)

    def __call__(self, record: Record) -> Record:
        """Return the record as it may be stored.

        Raises:
            Exception: whatever the hook raises; the record must not be stored then.
        """
        match record:
            case Call():
                return self._call(record)
            case TrajectoryInfo():
                clean = {name: self._any(getattr(record, name)) for name in ("name", "tags", "metadata", "error")}
                return replace(record, **clean)
            case SpanInfo():
                clean = {name: self._any(getattr(record, name)) for name in ("name", "attributes", "error")}
                return replace(record, **clean)
            case Score():
                return replace(record, comment=self._any(record.comment))
            case Correction():
                return replace(record, message=self._any(record.message), comment=self._any(record.comment))
            case _:
                return record

    def _call(self, call: Call) -> Call:
        fields = ("messages", "tools", "params", "error", "fallback")
        clean: dict[str, Any] = {name: self._any(getattr(call, name)) for name in fields}
        choices = tuple(replace(choice, message=self._any(choice.message)) for choice in call.choices)
        if choices == call.choices and all(clean[name] == getattr(call, name) for name in fields):
            return call
        blank = tuple(replace(choice, token_ids=None, logprobs=None) for choice in choices)
        reason = call.untrainable or UNTRAINABLE
        return replace(call, **clean, choices=blank, prompt_token_ids=None, untrainable=reason)

    def _any(self, value: T) -> T:
        return cast(T, self._clean(value))

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            out: Any = (self._cached if len(value) <= _CACHED_CHARS else self._hook)(value)
            if not isinstance(out, str):
                raise TypeError(f"the redact hook returned {type(out).__name__} instead of a text")
            return out
        if isinstance(value, Mapping):
            return {key: self._clean(item) for key, item in cast(Mapping[str, Any], value).items()}
        if isinstance(value, list):
            return [self._clean(item) for item in cast(list[Any], value)]
        if isinstance(value, tuple):
            return tuple(self._clean(item) for item in cast(tuple[Any, ...], value))
        return value
