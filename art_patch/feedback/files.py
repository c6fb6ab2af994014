"""Feedback of other tools: scores of Langfuse and feedback of LangSmith, from JSON or CSV files, or from their APIs.

In: the text of a file, or rows. Out: a `Feedback` for each row. The case and the underscores of a column's name do not
count: `traceId`, `trace_id`, `TraceID`. Langfuse has `name` and a `value` with its `dataType`; LangSmith has `key`,
`score` and a `run_id`.

A row that is neither is an error with its number: all rows are taken or none. Only the two API classes use a network.
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

from art_patch.errors import MalformedFile, TrackerError
from art_patch.trackers import without_login

_WHOSE = frozenset({"traceid", "runid", "subject"})
_WORDS = {"true": 1.0, "false": 0.0}
_MACHINES = frozenset({"eval", "model", "auto_eval"})
_PAGE = 100  # the most that Langfuse gives at once


@dataclass(frozen=True, slots=True)
class Feedback:
    """One row.

    Attributes:
        id: the tool's own id after its name: `langfuse:...`.
        theirs: the tool's own id alone; a score that was sent there from here has the id that it has here.
        runs: ids under which its run may be known here, likeliest first.
        name: name of the score, such as `thumbs`.
        value: the number; `None` where the value is a category or a text.
        source: `user`, or `code` where a model or program gave it.
        at: seconds since the epoch; `None` if the file does not say.
        comment: the person's or the program's text.
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
    """Return the feedback of a file's rows.

    Raises:
        MalformedFile: a row is neither tool's.
    """
    return feedback_of(_rows(text.lstrip("\ufeff")))


def feedback_of(rows: Iterable[Any]) -> list[Feedback]:
    """Return the feedback of rows, as a tool's API gives them or its file holds them.

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
        # Several objects are no JSON text: one on each line.
        whole = [_line(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if isinstance(whole, dict):
        page = cast("dict[str, Any]", whole)
        # An answer of the API, saved as it came, has its rows in `data`.
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
    # The column is asked for and not its value: Langfuse's score of a session has the column and no run in it.
    if theirs is None or name is None or not _WHOSE & found.keys():
        wanted = "id, key and run_id (LangSmith), or id, name and traceId (Langfuse)"
        raise MalformedFile(f"{place} lacks one of {wanted}; nothing was imported")
    # LangSmith writes UUIDs with hyphens, and ids here have none.
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
    # CSV has texts only: `True` and `0.5` come as words.
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
    # Both tools write UTC where they write no zone.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


class LangfuseScores:
    """The scores of a project in Langfuse, read page by page with its own client (version 3 of its API)."""

    def __init__(self, base_url: str, *, public_key: str, secret_key: str) -> None:
        """Open nothing yet; the keys are those of the project in Langfuse."""
        root = base_url.rstrip("/")
        self.source = f"langfuse {without_login(root)} {public_key}"
        from art_patch.trackers import langfuse_api

        self._api = langfuse_api(root, public_key, secret_key)

    def rows(self, since: float | None) -> Iterator[Any]:
        """Return the scores as JSON objects; those of `since` or later, in seconds since the epoch.

        Raises:
            TrackerError: Langfuse cannot be reached, or refused.
        """
        import httpx
        from langfuse.api.core import ApiError

        after = None if since is None else datetime.fromtimestamp(since, UTC)
        cursor: str | None = None
        while True:
            try:
                page = self._api.scores.get_many(
                    limit=_PAGE, cursor=cursor, fields="details,subject", from_timestamp=after
                )
            except ApiError as error:
                raise self._refused(f"HTTP {error.status_code}") from error
            except httpx.HTTPError as error:
                raise self._refused(str(error)) from error
            yield from (json.loads(score.json()) for score in page.data)
            cursor = page.meta.cursor
            if cursor is None:
                return

    def _refused(self, why: str) -> TrackerError:
        return TrackerError(
            f"{self.source} did not give its scores ({why}); look at the address, LANGFUSE_PUBLIC_KEY and "
            "LANGFUSE_SECRET_KEY, then pull again"
        )


class LangSmithFeedback:
    """The feedback of a workspace in LangSmith, or of one of its projects, read page by page with its own client."""

    def __init__(self, endpoint: str, *, api_key: str, project: str | None = None) -> None:
        """Open nothing yet; without a `project` all projects of the key's workspace are read."""
        from langsmith import Client

        self.source = f"langsmith {without_login(endpoint.rstrip('/'))}" + (f" {project}" if project else "")
        self._project = project
        # With batches the client would start a thread, for traces that we do not send.
        self._client = Client(api_url=endpoint, api_key=api_key, auto_batch_tracing=False)

    def rows(self, since: float | None) -> Iterator[Any]:
        """Return the feedback as JSON objects; that of `since` or later, in seconds since the epoch.

        Raises:
            TrackerError: LangSmith cannot be reached, or refused.
        """
        from langsmith.utils import LangSmithError

        wanted: dict[str, Any] = {}
        if since is not None:
            wanted["min_created_at"] = datetime.fromtimestamp(since, UTC).isoformat()
        try:
            if self._project is not None:
                wanted["session"] = str(self._client.read_project(project_name=self._project).id)
            yield from (one.model_dump(mode="json") for one in self._client.list_feedback(**wanted))
        except LangSmithError as error:
            raise TrackerError(
                f"{self.source} did not give its feedback ({error}); look at the address, LANGSMITH_API_KEY and "
                "LANGSMITH_PROJECT, then pull again"
            ) from error
