"""The feedback server: `GET /feedback` shows a page with the question, `POST /feedback` stores the person's answer.

The page is plain HTML. A POST sends its form, or JSON from an app (`{"value": 1, "comment": "..."}`), and JSON is
answered with JSON. Refused are links that are forged (403) or expired (410), values out of range (422), and bodies that
are too long (413) or of another type (415). An answer to a run that the store does not hold is not stored.

The web page keeps what people say by the same functions: `value_of`, `comment_of` and `keep_opinion`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import parse_qsl, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from art_patch._lib.asgi import PageGuard
from art_patch._lib.http_server import is_loopback, listen, serve, url_of
from art_patch._lib.ids import derived_id
from art_patch.errors import ConfigError, StoreError
from art_patch.feedback.links import PATH, Expired, Forged, Link, read_link, say_address, secret_of
from art_patch.recording import Redactor
from art_patch.store import Store, open_store
from art_patch.types import Correction, Score

if TYPE_CHECKING:
    from art_patch.settings import Redact, Settings

LONGEST_COMMENT = 2_000  # characters
MAX_BODY = 16_384  # bytes; the longest comment fits with every character escaped

_PAGE, _FORM_PAGE, _STYLE = (
    (Path(__file__).with_name("page") / name).read_text("utf-8") for name in ("page.html", "form.html", "style.css")
)

_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

_HEADERS = {
    # Anyone with the address may answer, so it goes nowhere: not to other sites, not into caches or search engines.
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "x-robots-tag": "noindex, nofollow",
    "x-content-type-options": "nosniff",
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; form-action 'self'; "
        "frame-ancestors 'none'; base-uri 'none'"
    ),
}

_T = TypeVar("_T")

_JSON, _FORM = "application/json", "application/x-www-form-urlencoded"


class _Refused(Exception):
    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def run_feedback(
    settings: Settings, *, host: str = "127.0.0.1", port: int = 0, advertise: str | None = None,
    on_ready: Callable[[str], None] | None = None, stop: threading.Event | None = None,
) -> None:  # fmt: skip
    """Run the feedback server until SIGTERM, SIGINT or `stop`; raises as `bind` and `serve` of `http_server` do.

    `host` may be reachable from outside, because every request must bring a signed link. `advertise` is the public
    address of the server, if people reach it by another name or through a TLS proxy.
    """
    if advertise is not None and not advertise.startswith(("http://", "https://")):
        raise ConfigError(f"--advertise {advertise} is not an address; write it like https://feedback.example.com")
    secret = secret_of(settings)
    with listen(host, port, key=secret.decode(), what="your store") as sock:
        here = (advertise or settings.feedback_base_url or url_of(host, sock)).rstrip("/")
        store = open_store(settings.store_url, project=settings.project)
        try:
            # The store is opened before the address is noted: an app never learns of a server that cannot keep answers.
            app = build_app(store, secret=secret, project=settings.project, redact=settings.redact)

            def ready() -> None:
                # Only now, when requests are answered, may apps hand out links to it.
                say_address(settings, here)
                if on_ready is not None:
                    on_ready(here)

            # Behind a proxy with TLS, people's browsers name the proxy's host.
            names = (host, urlsplit(here).hostname or "") if is_loopback(str(sock.getsockname()[0])) else None
            app = PageGuard(app, names, pages=True)
            serve(app, sock, drain_s=5.0, on_ready=ready, stop=stop)
        finally:
            store.close()


def build_app(
    store: Store, *, secret: bytes, project: str, redact: Redact = None, clock: Callable[[], float] = time.time
) -> Starlette:
    """Return the feedback server's application for links that `secret` and `project` sign; `redact` cleans comments."""
    desk = _Desk(store, secret, project, None if redact is None else Redactor(redact), clock)
    asked, answered = Route(PATH, desk.ask, methods=["GET"]), Route(PATH, desk.take, methods=["POST"])
    app = Starlette(
        routes=[Route("/health", _health), asked, answered],
        exception_handlers=dict.fromkeys((_Refused, HTTPException, Exception), _failed),
    )
    # A redirect would repeat the signed address in a header.
    app.router.redirect_slashes = False
    return app


@dataclass(frozen=True, repr=False)  # a repr would show the secret
class _Desk:
    """Answers the two requests of the server, and writes scores to the store."""

    store: Store
    secret: bytes
    project: str
    redact: Redactor | None
    clock: Callable[[], float]

    async def ask(self, request: Request) -> Response:
        """Return the page. Writes nothing, because mail scanners follow links."""
        self._link(request)
        return HTMLResponse(_form(chosen=request.query_params.get("value", "")), headers=_HEADERS)

    async def take(self, request: Request) -> Response:
        """Keep the answer of a form or of an app."""
        link, signature = self._link(request)
        given = await _body(request)
        value = _checked(lambda: value_of(link.name, given.get("value")))
        comment = _checked(lambda: comment_of(given.get("comment")))
        # From the link, so a second answer through it replaces the first. Databases refuse NUL in ids and names, so two
        # links never give one id.
        score_id = derived_id("feedback", link.trajectory_id, link.name, signature)
        score = Score(score_id, link.trajectory_id, link.name, value, "user", self.clock(), comment=comment)
        try:
            # The database would block the event loop, and so every other answer.
            await run_in_threadpool(keep_opinion, self.store, score, self.redact)
        except StoreError:
            raise _Refused(503, "Your answer could not be kept right now. Please try again in a minute.") from None
        if _wants_json(request):
            return JSONResponse({"noted": True, "name": link.name, "value": value}, headers=_HEADERS)
        return HTMLResponse(_form(chosen=f"{value:g}", comment=comment or "", thanks=True), headers=_HEADERS)

    def _link(self, request: Request) -> tuple[Link, str]:
        # `&value=1` may be added to a link, so it is not among the signed parts.
        query = [(name, value) for name, value in request.query_params.multi_items() if name != "value"]
        try:
            return read_link(query, self.secret, self.project, now=self.clock())
        except Forged:
            raise _Refused(403, "This link is not valid. Was it copied whole?") from None
        except Expired:
            raise _Refused(410, "This link has expired.") from None


async def _body(request: Request) -> Mapping[str, Any]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (_JSON, _FORM):
        raise _Refused(415, f"Send {_JSON}, or what the page's form sends.")
    content = b""
    # Counted while it arrives: a length that the client claims proves nothing, and may be missing.
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY:
            raise _Refused(413, f"That is too long; {LONGEST_COMMENT:,} characters can be kept.")
    try:
        # A browser sends few fields; the limit bounds the work on hostile bodies.
        text = content.decode()
        given = json.loads(text) if kind == _JSON else dict(parse_qsl(text, max_num_fields=10))
    except (ValueError, RecursionError):
        # What is no object, or no JSON at all, is refused below in one sentence.
        given = None
    if not isinstance(given, dict):
        raise _Refused(400, "That could not be read.")
    return cast("dict[str, Any]", given)


def _checked(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except TooLong as error:
        raise _Refused(413, str(error)) from None
    except ConfigError as error:
        raise _Refused(422, str(error)) from None


def _wants_json(request: Request) -> bool:
    return request.headers.get("content-type", "").startswith(_JSON)


def _say(request: Request, status: int, words: str) -> Response:
    if _wants_json(request):
        return JSONResponse({"error": words}, status, headers=_HEADERS)
    return HTMLResponse(_page("Feedback", f"<p>{escape(words)}</p>"), status, headers=_HEADERS)


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _failed(request: Request, error: Exception) -> Response:
    match error:
        case _Refused():
            return _say(request, error.status, str(error))
        case HTTPException():
            words = "There is nothing here." if error.status_code == 404 else "That cannot be done here."
            return _say(request, error.status_code, words)
        case _:
            return _say(request, 500, "Something went wrong on our side. Please try again later.")


def _form(*, chosen: str = "", comment: str = "", thanks: bool = False) -> str:
    """Return the page with the two buttons; with `thanks` it confirms an answer, which can still be changed."""
    head, note = "Did this help?", ""
    if thanks:
        head, note = "Thank you", "<p>Your answer was noted. You can still change it here.</p>"
    elif chosen in ("0", "1"):
        note = "<p>Press the button to confirm your answer.</p>"
    mark = ' class="chosen" autofocus'
    form = Template(_FORM_PAGE).substitute(
        note=note,
        longest=LONGEST_COMMENT,
        comment=escape(comment),
        helped=mark if chosen == "1" else "",
        did_not=mark if chosen == "0" else "",
    )
    return _page(head, form)


def _page(head: str, body: str) -> str:
    return Template(_PAGE).substitute(head=escape(head), style=_STYLE, body=body)


# --- what a person says about a run ---


class TooLong(ConfigError):
    """A comment has more than `LONGEST_COMMENT` characters."""


def value_of(name: str, given: Any) -> float:
    """Return the value of a score: `thumbs` takes 0 or 1, `reward` 0 to 1, any other name -1 to 1."""
    try:
        value = float(given) if isinstance(given, int | float | str) else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    lowest = 0.0 if name in ("thumbs", "reward") else -1.0
    # NaN is in no range.
    if not lowest <= value <= 1.0 or (name == "thumbs" and value not in (0.0, 1.0)):
        wanted = "0 or 1" if name == "thumbs" else f"a number from {lowest:g} to 1"
        raise ConfigError(f"The value must be {wanted}.")
    return value


def comment_of(given: Any) -> str | None:
    """Return a comment without white space around it; `None` if there is none."""
    if given is None:
        return None
    if not isinstance(given, str):
        raise ConfigError("The comment must be a text.")
    text = given.replace("\r\n", "\n").strip()  # forms send CRLF, JSON of apps mostly LF
    if len(text) > LONGEST_COMMENT:
        raise TooLong(f"That is too long; {LONGEST_COMMENT:,} characters can be kept.")
    return text or None


def keep_opinion(store: Store, opinion: Score | Correction, redact: Redactor | None) -> bool:
    """Store the opinion, cleaned by `redact`, and return whether the store holds the run that it is about."""
    # A click must not bring back a user whose data was erased.
    if not store.read.known([opinion.trajectory_id]):
        return False
    store.write([opinion if redact is None else redact(opinion)])
    return True
