"""Feedback of other tools: Langfuse's scores and LangSmith's, from files (JSON, JSON lines, CSV) or their APIs. Pure.

In: the text of a file, or rows. Out: what each row says, in the words of `Score`, or why it says nothing that can be
learned from. Columns are told apart whatever their case and underscores: `traceId`, `trace_id`, `TraceID`. Langfuse
names a score `name` and gives `value` with a `dataType`; LangSmith has `key`, `score` and a `run_id`.

A row that is no such thing is an error with its number: all are taken or none.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, cast

from art_patch.errors import MalformedFile

_WHOSE = frozenset({"traceid", "runid", "subject"})
_WORDS = {"true": 1.0, "false": 0.0}
_MACHINES = frozenset({"eval", "model", "auto_eval"})


@dataclass(frozen=True, slots=True)
class Feedback:
    """One row.

    Attributes:
        id: the tool's own, after its name: `langfuse:...`.
        theirs: the tool's own id alone; a score that was sent there from here has ours.
        runs: ids under which its run may be known here, likeliest first.
        name: what was scored.
        value: the number; `None` where there is none that can be learned from.
        source: `user`, or `code` where a model or program gave it.
        at: when; `None` if the file does not say.
        comment: the words beside it.
    """

    id: str
    theirs: str
    runs: tuple[str, ...]
    name: str
    value: float | None
    source: Literal["user", "code"]
    at: float | None
    comment: str | None


def read_feedback(text: str) -> list[Feedback]:
    """Return what the rows of a file say.

    Raises:
        MalformedFile: a row is neither tool's.
    """
    return feedback_of(_rows(text.lstrip("\ufeff")))


def feedback_of(rows: Iterable[Any]) -> list[Feedback]:
    """Return what rows say, as a tool's API gives them or its file holds them.

    Raises:
        MalformedFile: a row is neither tool's.
    """
    return [_feedback(row, f"row {number}") for number, row in enumerate(rows, 1)]


def _rows(text: str) -> Iterator[Any]:
    start = text.lstrip()[:1]
    if start not in ("{", "["):
        try:
            yield from csv.DictReader(io.StringIO(text, newline=""))
        except csv.Error as error:
            raise MalformedFile(f"the file is neither JSON nor CSV ({error}); nothing was imported") from None
        return
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = [_line(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if isinstance(whole, dict):
        page = cast("dict[str, Any]", whole)
        whole = page["data"] if isinstance(page.get("data"), list) else [page]
    yield from cast("list[Any]", whole)


def _line(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"line {number} is no JSON ({error}); nothing was imported") from None


def _feedback(row: Any, place: str) -> Feedback:
    if not isinstance(row, Mapping):
        raise MalformedFile(f"{place} is no object; nothing was imported")
    given = cast("Mapping[Any, Any]", row)
    found = {str(key).lower().replace("_", "").replace(" ", ""): value for key, value in given.items()}
    langsmith = "key" in found
    theirs, name = _text(found.get("id")), _text(found.get("key" if langsmith else "name"))
    keys = ("traceid", "runid") if langsmith else ("traceid",)
    named = [run for key in keys if (run := _text(found.get(key))) is not None]
    subject = found.get("subject")
    if isinstance(subject, Mapping):  # Langfuse's API, version 3
        about = cast("Mapping[str, Any]", subject)
        named += [run for key in ("traceId", "id") if (run := _text(about.get(key))) is not None]
    if theirs is None or name is None or not _WHOSE & found.keys():  # a session's score has the column, and no run
        wanted = "id, key and run_id (LangSmith), or id, name and traceId (Langfuse)"
        raise MalformedFile(f"{place} lacks one of {wanted}; nothing was imported")
    runs = [form for run in named for form in (run, run.replace("-", "").lower())]
    value = found.get("score") if langsmith else found.get("value")
    return Feedback(
        f"{'langsmith' if langsmith else 'langfuse'}:{theirs}",
        theirs,
        tuple(dict.fromkeys(runs)),
        name,
        None if _text(found.get("datatype")) in ("CATEGORICAL", "TEXT", "CORRECTION") else _number(value),
        "code" if _source(found) in _MACHINES else "user",
        _moment(_text(found.get("createdat" if langsmith else "timestamp")), place),
        _text(found.get("comment")),
    )


def _source(found: Mapping[str, Any]) -> str:
    source: Any = found.get("source") or found.get("feedbacksource")
    if isinstance(source, Mapping):
        source = cast("Mapping[str, Any]", source).get("type")
    return str(source).lower()


def _text(value: Any) -> str | None:
    return None if value in (None, "") else str(value)


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        value = _WORDS.get(value.strip().lower(), value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _moment(text: str | None, place: str) -> float | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise MalformedFile(f"{place}: {text!r} is no time; nothing was imported") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
