"""Who may see and change what in the browser: one-time links, sessions, and what every request must show.

A link holds a random token behind `#`, which no browser sends: so it stands in no log, and in no `Referer`. The page at
`/enter` posts the token, which is spent then, and the browser gets a cookie. A link is for one project, with the right
to look, or to act as well. A browser that enters a second link has both.

A request that changes something must come from a page of this server: its `Origin` is ours, it holds the session's CSRF
token, and the session may act in that project. Pages of other servers load nothing from here either, also those of
another port of this machine, to which browsers send the same cookies; they may only link. A program shows a project's
key, which is for looking only. Of tokens and cookies only digests are kept, in memory: a server that starts again has
forgotten them.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Literal

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_patch.errors import ConfigError

Role = Literal["look", "act"]

SESSION_S = 12 * 3_600.0  # without a request, after which a browser needs another link
LINK_S = 24 * 3_600.0  # after which a link that nobody used is void
_MOST_SESSIONS = 1_000  # of a project
_MOST_LINKS = 1_000  # of a project
_MOST_QUERY = 8_192  # bytes

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "same-origin",  # under `no-referrer` browsers send a form of ours without its origin
    "x-content-type-options": "nosniff",
    "x-robots-tag": "noindex, nofollow",
}


@dataclass(slots=True)
class Session:
    """What a browser may do: its role in each project, until `until`."""

    csrf: str
    until: float
    roles: dict[str, Role] = field(default_factory=dict[str, Role])
    said: str = ""  # what the last change did, which the next page shows once


@dataclass(frozen=True, slots=True)
class _Link:
    project: str
    role: Role
    until: float


class Access:
    """The links and sessions of a server. Its methods may be called from any thread."""

    def __init__(self, projects: Mapping[str, str], *, port: int, secure: bool, clock: Callable[[], float] = time.time):
        """Keep access to these projects; each has a key, with which programs may look.

        `port` is in the cookie's name, since browsers share cookies between the ports of a host. `secure`: browsers
        reach the server over TLS, and send the cookie over nothing else.
        """
        self.cookie = f"{'__Host-' if secure else ''}art_patch_web_{port}"
        self._keys, self._secure, self._clock, self._lock = dict(projects), secure, clock, threading.Lock()
        self._links: dict[str, _Link] = {}
        self._sessions: dict[str, Session] = {}

    def link(self, project: str, role: Role) -> str:
        """Return the token of a new one-time link."""
        if project not in self._keys:
            raise ConfigError(f"this server does not show the project {project!r}")
        token, now = secrets.token_urlsafe(32), self._clock()
        with self._lock:
            for key in [key for key, link in self._links.items() if link.until <= now]:
                del self._links[key]
            its = [key for key, link in self._links.items() if link.project == project]
            if len(its) >= _MOST_LINKS:
                del self._links[its[0]]
            self._links[_digest(token)] = _Link(project, role, now + LINK_S)
        return token

    def enter(self, token: str, cookie: str | None) -> tuple[str, str] | None:
        """Spend a link; return the browser's cookie and the project, or `None` if there is no such link any more."""
        now = self._clock()
        with self._lock:
            link = self._links.pop(_digest(token), None)
            if link is None or link.until <= now:
                return None
            session = self._known(cookie, now)
            # A new cookie each time, so that none is worth more than when it was given.
            if session is not None and cookie is not None:
                self._end(_digest(cookie))
            roles = dict(session.roles) if session is not None else {}
            roles[link.project] = "act" if "act" in (link.role, roles.get(link.project)) else "look"
            self._make_room(link.project, now)
            fresh = secrets.token_urlsafe(32)
            self._sessions[_digest(fresh)] = Session(secrets.token_urlsafe(32), now + SESSION_S, roles)
        return fresh, link.project

    def leave(self, cookie: str | None) -> None:
        """Forget a browser."""
        with self._lock:
            self._end(_digest(cookie or ""))

    def session(self, request: Request) -> Session | None:
        """Return the session of a browser, or what a program may do by the key that it shows; `None` if neither."""
        now, cookie = self._clock(), request.cookies.get(self.cookie)
        with self._lock:
            if (session := self._known(cookie, now)) is not None:
                session.until = now + SESSION_S
                return session
        kind, _, shown = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return None
        roles: dict[str, Role] = {
            name: "look" for name, key in self._keys.items() if compare_digest(key.encode(), shown.strip().encode())
        }
        return Session("", math.inf, roles) if roles else None

    def is_open(self, session: Session, project: str) -> bool:
        """Return whether a session may still see a project; it does not last longer because this is asked."""
        return session.until > self._clock() and project in session.roles

    def cookie_options(self) -> dict[str, object]:
        """Return how the cookie is set: for this host alone, out of reach of scripts and of other sites."""
        return {"httponly": True, "samesite": "strict", "secure": self._secure, "path": "/"}

    def _known(self, cookie: str | None, now: float) -> Session | None:
        session = self._sessions.get(_digest(cookie)) if cookie else None
        if session is not None and session.until <= now:
            self._end(_digest(cookie or ""))
            return None
        return session

    def _end(self, key: str) -> None:
        if (session := self._sessions.pop(key, None)) is not None:
            session.until = -math.inf  # for the streams that know it

    def _make_room(self, project: str, now: float) -> None:
        """Forget sessions that have ended. If a project has too many, the one that was idle longest loses it."""
        for key in [key for key, session in self._sessions.items() if session.until <= now]:
            self._end(key)
        its = [(session.until, key) for key, session in self._sessions.items() if project in session.roles]
        if len(its) >= _MOST_SESSIONS:
            key = min(its)[1]
            roles = self._sessions[key].roles
            del roles[project]
            if not roles:
                self._end(key)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class RequestGuard:
    """ASGI middleware that refuses what no page of ours sends, and adds the headers that keep other pages out."""

    def __init__(self, app: ASGIApp, *, origin: str | None) -> None:
        """Guard `app`; `origin` is the address that browsers use, if it is not the one that they connect to."""
        self._app, self._origin = app, origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer why it is refused."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        if (refusal := self._why_not(Request(scope))) is not None:
            status, words = refusal
            return await PlainTextResponse(words, status_code=status)(scope, receive, guarded)
        await self._app(scope, receive, guarded)

    def _why_not(self, request: Request) -> tuple[int, str] | None:
        if len(request.scope["query_string"]) > _MOST_QUERY:
            return 414, "the query is too long"
        site, mode = (request.headers.get(f"sec-fetch-{name}") for name in ("site", "mode"))
        is_ours = site in (None, "same-origin", "none")
        if request.method in ("GET", "HEAD"):
            is_link = mode == "navigate" and request.headers.get("sec-fetch-dest") == "document"
            return None if is_ours or is_link else (403, "only pages of this server load that")
        if request.method != "POST":
            return 405, "only GET, HEAD and POST are answered"
        ours = self._origin or f"{request.url.scheme}://{request.headers.get('host', '')}"
        if request.headers.get("origin", "").lower() != ours.lower():
            return 403, "a change must come from a page of this server"
        return None if is_ours else (403, "a change must come from a page of this server")
