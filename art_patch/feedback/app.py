"""The ASGI application: `GET /feedback` asks, `POST /feedback` keeps the answer.

A POST is what the page's form sends, or JSON of an app: `{"value": 1, "comment": "..."}` to the very link, answered in
JSON. Refused: links that are not ours (403) or expired (410), values out of range (422), bodies too long (413) or of
another kind (415).

Answers on runs that the store does not hold (never sampled, erased) are thanked for like all others and let go: whose
data was erased must not come back by a click.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from art_patch.errors import StoreError
from art_patch.feedback.links import PATH, Expired, Forged, Link, read_link
from art_patch.feedback.page import HEADERS, LONGEST_COMMENT, form, sentence
from art_patch.recording import Redactor
from art_patch.types import Score

if TYPE_CHECKING:
    from art_patch.settings import Redact
    from art_patch.store import Store

MAX_BODY = 16_384
"""Bytes; a text of the longest kind, each character escaped, fits."""

_JSON, _FORM = "application/json", "application/x-www-form-urlencoded"


class _Refused(Exception):
    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def build_app(
    store: Store, *, secret: bytes, project: str, redact: Redact = None, clock: Callable[[], float] = time.time
) -> Starlette:
    """Return the application.

    Args:
        store: where answers go.
        secret: what links are signed with.
        project: whose they are.
        redact: see `Settings.redact`; texts pass it before they are kept.
        clock: seconds since the epoch.
    """
    desk = _Desk(store, secret, project, redact, clock)
    app = Starlette(
        routes=[
            Route("/health", _health),
            Route(PATH, desk.ask, methods=["GET"]),
            Route(PATH, desk.take, methods=["POST"]),
        ],
        exception_handlers={_Refused: _refusal, HTTPException: _http_error, Exception: _server_error},
    )
    app.router.redirect_slashes = False
    return app


class _Desk:
    def __init__(self, store: Store, secret: bytes, project: str, redact: Redact, clock: Callable[[], float]) -> None:
        self._store = store
        self._secret, self._project = secret, project
        self._redact = None if redact is None else Redactor(redact)
        self._clock = clock

    async def ask(self, request: Request) -> Response:
        """Show the page. Writes nothing."""
        self._link(request)
        return HTMLResponse(form(chosen=request.query_params.get("value", "")), headers=HEADERS)

    async def take(self, request: Request) -> Response:
        """Keep an answer."""
        link, signature = self._link(request)
        given = await _body(request)
        value, comment = _value(link.name, given.get("value")), _comment(given.get("comment"))
        # Derived from the link: a second answer through it replaces the first.
        key = "\0".join(("feedback", link.trajectory_id, link.name, signature))
        score_id = hashlib.sha256(key.encode()).hexdigest()[:32]
        score = Score(score_id, link.trajectory_id, link.name, value, "user", self._clock(), comment=comment)
        try:
            await run_in_threadpool(self._keep, score)
        except StoreError:
            raise _Refused(503, "Your answer could not be kept right now. Please try again in a minute.") from None
        if _wants_json(request):
            return JSONResponse({"noted": True, "name": link.name, "value": value}, headers=HEADERS)
        return HTMLResponse(form(chosen=f"{value:g}", comment=comment or "", thanks=True), headers=HEADERS)

    def _link(self, request: Request) -> tuple[Link, str]:
        # Adding a value to a link is allowed, so it is no part of what must be as it was signed.
        query = [(name, value) for name, value in request.query_params.multi_items() if name != "value"]
        try:
            return read_link(query, self._secret, self._project, now=self._clock())
        except Forged:
            raise _Refused(403, "This link is not valid. Was it copied whole?") from None
        except Expired:
            raise _Refused(410, "This link has expired.") from None

    def _keep(self, score: Score) -> None:
        if not self._store.transfers.known([score.trajectory_id]):
            return
        self._store.write([score if self._redact is None else self._redact(score)])


async def _body(request: Request) -> Mapping[str, Any]:
    """Return what was sent.

    Raises:
        _Refused: it is too long or cannot be read.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (_JSON, _FORM):
        raise _Refused(415, f"Send {_JSON}, or what the page's form sends.")
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY:
            raise _Refused(413, f"That is too long; {LONGEST_COMMENT:,} characters can be kept.")
    try:
        text = content.decode()
        if kind == _JSON:
            given = json.loads(text)
        else:
            given = {name: values[-1] for name, values in parse_qs(text, max_num_fields=10).items()}
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise _Refused(400, "That could not be read.")
    return cast("dict[str, Any]", given)


def _value(name: str, given: Any) -> float:
    """Return the score that was given.

    Raises:
        _Refused: a score of this name does not have that value.
    """
    try:
        value = float(given) if isinstance(given, int | float | str) else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    if name == "thumbs":
        fits, wanted = value in (0.0, 1.0), "0 or 1"
    else:
        lowest = 0.0 if name == "reward" else -1.0
        fits, wanted = lowest <= value <= 1.0, f"a number from {lowest:g} to 1"
    if not fits:
        raise _Refused(422, f"The value must be {wanted}.")
    return value


def _comment(given: Any) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str):
        raise _Refused(422, "The comment must be a text.")
    text = given.replace("\r\n", "\n").strip()  # forms send the former
    if len(text) > LONGEST_COMMENT:
        raise _Refused(413, f"That is too long; {LONGEST_COMMENT:,} characters can be kept.")
    return text or None


def _wants_json(request: Request) -> bool:
    return request.headers.get("content-type", "").startswith(_JSON)


def _say(request: Request, status: int, words: str) -> Response:
    if _wants_json(request):
        return JSONResponse({"error": words}, status, headers=HEADERS)
    return HTMLResponse(sentence(words), status, headers=HEADERS)


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _refusal(request: Request, error: Exception) -> Response:
    refused = cast(_Refused, error)
    return _say(request, refused.status, str(refused))


async def _http_error(request: Request, error: Exception) -> Response:
    status = cast(HTTPException, error).status_code
    return _say(request, status, "There is nothing here." if status == 404 else "That cannot be done here.")


async def _server_error(request: Request, _: Exception) -> Response:
    return _say(request, 500, "Something went wrong on our side. Please try again later.")
