"""Imports feedback that people gave in Langfuse or LangSmith, from files or APIs, into the store as scores.

A row of Langfuse has the columns `name`, `value` and `dataType`; a row of LangSmith has `key`, `score` and `run_id`.
Case and underscores in column names are ignored. If one row is malformed, the error names its number, and no row is
imported.
"""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, cast

from art_patch.errors import MalformedFile, TrackerError
from art_patch.store import PAGE, Cursor, Filter, Store
from art_patch.trackers import langfuse_api, trace_id_of, without_login
from art_patch.types import Score

_WHOSE = frozenset({"traceid", "runid", "subject"})
_WORDS = {"true": 1.0, "false": 0.0}
_MACHINES = frozenset({"eval", "model", "auto_eval"})
_PAGE = 100  # Langfuse's limit for one request
_WRITE_PAGE = 200


@dataclass(frozen=True, slots=True)
class Feedback:
    """One row of feedback from Langfuse or LangSmith."""

    id: str  # the tool's name and its id of the row, such as `langfuse:...`; becomes the score's id
    theirs: str  # the tool's id of the row: the score's id in the store, if art_patch sent this score to the tool
    runs: tuple[str, ...]  # ids that the scored run may have in the store, the most probable first
    name: str  # of the score, such as `thumbs`
    value: float | None  # `None` if the value is a category or a text
    source: Literal["user", "code"]  # `code` if a model or a program gave the score
    at: float | None  # seconds since the epoch; `None` if the row does not say
    comment: str | None


def read_feedback(text: str) -> list[Feedback]:
    """Return the feedback in a file's text (JSON, JSON lines or CSV). Raises as `feedback_of` does."""
    return feedback_of(_rows(text.lstrip("\ufeff")))


def feedback_of(rows: Iterable[Any]) -> list[Feedback]:
    """Return rows of an API or a file as `Feedback`; raises `MalformedFile` for a row that is of neither tool."""
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
        whole: Any = json.loads(text)
    except (ValueError, RecursionError):
        # Several objects are no JSON text: one on each line.
        whole = [_line(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if isinstance(whole, dict):
        # An answer of the API, saved as it came, has its rows in `data`.
        whole = whole["data"] if isinstance(whole.get("data"), list) else [whole]
    yield from whole


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
    named = [found.get(key) for key in (("traceid", "runid") if langsmith else ("traceid",))]
    subject: Any = found.get("subject")
    if isinstance(subject, Mapping):  # Langfuse's API, version 3
        named += [subject.get("traceId"), subject.get("id")]
    # The column is asked for and not its value: Langfuse's score of a session has the column and no run in it.
    if theirs is None or name is None or not _WHOSE & found.keys():
        wanted = "id, key and run_id (LangSmith), or id, name and traceId (Langfuse)"
        raise MalformedFile(f"{place} lacks one of {wanted}; nothing was imported")
    # LangSmith writes UUIDs with hyphens, and ids here have none.
    runs = [form for run in map(_text, named) if run is not None for form in (run, run.replace("-", "").lower())]
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
    return str(source.get("type") if isinstance(source, Mapping) else source).lower()


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
    """Reads the scores of a project in Langfuse page by page, with Langfuse's client (version 3 of its API)."""

    def __init__(self, base_url: str, *, public_key: str, secret_key: str) -> None:
        """Make Langfuse's client with the keys of a project; no connection is opened yet."""
        root = base_url.rstrip("/")
        self.source = f"langfuse {without_login(root)} {public_key}"
        self._api = langfuse_api(root, public_key, secret_key)

    def rows(self, since: float | None) -> Iterator[Any]:
        """Yield the scores from `since` (seconds since the epoch) on, or all; raises `TrackerError` if that fails."""
        import httpx
        from langfuse.api.core import ApiError

        after = None if since is None else datetime.fromtimestamp(since, UTC)
        asked: dict[str, Any] = {"limit": _PAGE, "fields": "details,subject", "from_timestamp": after}
        cursor: str | None = None
        while True:
            try:
                page = self._api.scores.get_many(cursor=cursor, **asked)
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
    """Reads the feedback of a LangSmith workspace, or of one project, page by page, with LangSmith's client."""

    def __init__(self, endpoint: str, *, api_key: str, project: str | None = None) -> None:
        """Make LangSmith's client; without a `project` all projects of the key's workspace are read."""
        from langsmith import Client

        self.source = f"langsmith {without_login(endpoint.rstrip('/'))}" + (f" {project}" if project else "")
        self._project = project
        # Batches would start a thread for sending traces, and nothing is sent here.
        self._client = Client(api_url=endpoint, api_key=api_key, auto_batch_tracing=False)

    def rows(self, since: float | None) -> Iterator[Any]:
        """Yield the feedback from `since` (seconds since the epoch) on, or all; raises `TrackerError` if that fails."""
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


def write_feedback(
    store: Store, rows: Sequence[Feedback], rename: str | None, *, source: str, who: str
) -> Counter[str]:
    """Write the rows that the store lacks as scores, named `rename` if given; return the number of rows by outcome."""
    metrics = Counter[str](read=len(rows))
    runs = _runs_of(store, rows)
    for start in range(0, len(rows), _WRITE_PAGE):
        new, seen = _scores(store, rows[start : start + _WRITE_PAGE], runs, rename)
        store.write(new)
        metrics.update(seen)
    store.transfers.note_import(source, who=who, metrics=dict(metrics))
    return metrics


def _runs_of(store: Store, rows: Sequence[Feedback]) -> dict[str, str]:
    """Return the store's trajectory id for each id of a run that the rows name."""
    named = {run for one in rows for run in one.runs}
    found = {key: key for key in store.read.known(sorted(named))}
    if all(any(run in found for run in one.runs) for one in rows):
        return found
    # `art-patch send` makes some trace ids by hashing. A hash cannot be undone, so it is made again for every run.
    after: Cursor | None = None
    while page := store.browse.ids(Filter(), after=after, limit=PAGE):
        after = page[-1]
        found |= {made: key for _, key in page if (made := trace_id_of(key)) in named and made not in found}
    return found


def _scores(
    store: Store, rows: Sequence[Feedback], runs: dict[str, str], rename: str | None
) -> tuple[list[Score], Counter[str]]:
    """Return the scores to write, and the number of rows by what became of them."""
    keys = [next((runs[run] for run in one.runs if run in runs), None) for one in rows]
    wholes = {t.id: t for t in store.read.trajectories(sorted({key for key in keys if key}))}
    new: list[Score] = []
    seen = Counter[str]()
    for one, key in zip(rows, keys, strict=True):
        if key is None or one.value is None:
            seen["unknown_run" if key is None else "no_number"] += 1
            continue
        there = {score.id: score for score in wholes[key].scores}
        # This score was sent to the tool from this store. As a second score it would count twice.
        if one.theirs in there:
            seen["ours"] += 1
            continue
        at = wholes[key].info.started_at if one.at is None else one.at
        score = Score(one.id, key, rename or one.name, one.value, one.source, at, comment=one.comment)
        if there.get(one.id) == score:
            seen["already_there"] += 1
        else:
            new.append(score)
            seen["written"] += 1
    return new, seen
