"""The application of `art-patch web`: pages, their JSON, live events, and changes, behind the guard of `access`.

Each page and its JSON come from one row of `pages.PAGES`. Store queries run in threads, so that a slow one holds up
nobody else. What waits for an engine has threads of its own, or pages that ask a dead one would use up those of all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from anyio import CapacityLimiter, to_thread
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from art_patch import pipeline
from art_patch._lib.version import __version__
from art_patch._lib.words import one_line
from art_patch.errors import ArtPatchError, NotFound, StoreError
from art_patch.types import JSON
from art_patch.web import system, templates
from art_patch.web.access import Access, RequestGuard, Role, Session
from art_patch.web.actions import ACTIONS, Acting, Action
from art_patch.web.live import Live, Marks
from art_patch.web.pages import PAGES, Page, openapi
from art_patch.web.projects import Asked, Project

log = logging.getLogger("art_patch.web")

STATIC = Path(__file__).with_name("static")
_MOST_FORM = 1 << 20  # bytes
_PATIENT = 8  # requests that may wait for an engine at once

_T = TypeVar("_T")


def marks_of(project: Project) -> Callable[[], Marks]:
    """Return the function that tells `Live` what of a store, and of a project's directory, may have changed."""

    def look() -> Marks:
        paths = [project.settings.directory / name for name in (pipeline.RUNNING, "cycles", pipeline.LAST_RETRAIN)]
        files = [path.stat().st_mtime_ns if path.exists() else 0 for path in paths]
        marks = project.store.changes.marks()
        project.notice(marks)
        return marks | {"cycle": tuple(files)}

    return look


def _ids(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.path_params.items() if name != "project"}


def _path_back(request: Request, here: str) -> str:
    """Return the path of the page that the request came from, never to another host; `here` if it is not below."""
    try:
        back = urlsplit(request.headers.get("referer", ""))
    except ValueError:
        return here
    return f"{back.path}?{back.query}" if back.path.startswith(here) else here


class WebApp:
    """The projects of a server, and who may see them."""

    def __init__(self, projects: Sequence[Project], access: Access, clock: Callable[[], float] = time.time) -> None:
        """Show these projects."""
        self.projects = {project.name: project for project in projects}
        self.access, self._clock = access, clock
        self._patient = CapacityLimiter(_PATIENT)
        self.live = {name: Live(marks_of(project)) for name, project in self.projects.items()}
        for name, project in self.projects.items():
            project.on_renewed = partial(self.live[name].tell, "sums")

    def asgi(self, *, origin: str | None = None) -> Any:
        """Return the application; `origin` is the address that browsers use, if a proxy stands before it."""
        templates.use_ids()
        html = [Route(f"/p/{{project}}/{page.path}", self._page(page), methods=["GET"]) for page in PAGES]
        data = [
            Route(f"/api/v1/{{project}}/{page.path}".rstrip("/"), self._json(page), methods=["GET"]) for page in PAGES
        ]
        changes = [Route(f"/p/{{project}}/{action.path}", self._action(action), methods=["POST"]) for action in ACTIONS]
        app = Starlette(
            routes=[
                Route("/", self._projects, methods=["GET"]),
                Route("/enter", self._enter_page, methods=["GET"]),
                Route("/enter", self._enter, methods=["POST"]),
                Route("/leave", self._leave, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/status", self._status, methods=["GET"]),
                Route("/api/v1/openapi.json", self._openapi, methods=["GET"]),
                Route("/p/{project}/live", self._events, methods=["GET"]),
                Route("/p/{project}/link", self._new_link, methods=["POST"]),
                *changes, *html, *data,
                Route("/p/{project}", self._first_page, methods=["GET"]),
                Mount("/static", _Assets(directory=STATIC)),
            ],
            exception_handlers=dict.fromkeys((HTTPException, ArtPatchError, RecursionError, Exception), _failed),
        )  # fmt: skip
        app.router.redirect_slashes = False  # its redirects name the address that a proxy connects to
        return RequestGuard(app, origin=origin)

    async def _in_thread(self, waits: bool, work: Callable[[], _T]) -> _T:
        return await to_thread.run_sync(work, limiter=self._patient if waits else None)

    # --- who it is ---

    def _session(self, request: Request) -> Session:
        session = self.access.session(request)
        if session is None:
            raise HTTPException(401, "open the link that `art-patch web` printed; it prints another one if you run it")
        return session

    def _mine(self, session: Session) -> list[str]:
        return sorted(session.roles.keys() & self.projects.keys())

    def _project(self, request: Request) -> tuple[Project, Role, Session]:
        session, name = self._session(request), request.path_params["project"]
        # Not told apart: who may not see a project is not told that it exists.
        if (role := session.roles.get(name)) is None or name not in self.projects:
            raise HTTPException(404, "there is no such project here, or your link is not for it")
        return self.projects[name], role, session

    async def _enter_page(self, request: Request) -> Response:
        return templates.html("enter", {"title": "art_patch"})

    async def _enter(self, request: Request) -> Response:
        form = await _form(request)
        entered = self.access.enter(form.get("token", ""), request.cookies.get(self.access.cookie))
        if entered is None:
            raise HTTPException(403, "this link was used already, or is too old; `art-patch web` prints another one")
        cookie, project = entered
        response = RedirectResponse(f"/p/{project}/", status_code=303)
        response.set_cookie(self.access.cookie, cookie, **self.access.cookie_options())  # type: ignore[arg-type]
        return response

    async def _leave(self, request: Request) -> Response:
        await self._form_of_ours(request, self._session(request))
        self.access.leave(request.cookies.get(self.access.cookie))
        response = RedirectResponse("/enter", status_code=303)
        response.delete_cookie(self.access.cookie, **self.access.cookie_options())  # type: ignore[arg-type]
        return response

    async def _new_link(self, request: Request) -> Response:
        project, _, form = await self._acting(request)
        wanted: Role = "act" if form.get("role") == "act" else "look"
        token = self.access.link(project.name, wanted)
        return templates.html("link", {"project": project.name, "token": token, "role": wanted, "title": "A link"})

    # --- pages ---

    async def _projects(self, request: Request) -> Response:
        session = self.access.session(request)
        if session is None:
            return RedirectResponse("/enter", status_code=303)
        mine = self._mine(session)
        if len(mine) == 1:
            return RedirectResponse(f"/p/{mine[0]}/", status_code=303)
        return templates.html("projects", {"projects": mine, "title": "Projects", "csrf": session.csrf})

    async def _first_page(self, request: Request) -> Response:
        project, _, _ = self._project(request)
        return RedirectResponse(f"/p/{project.name}/", status_code=307)

    async def _facts(self, page: Page, request: Request) -> tuple[JSON, Asked, Session]:
        project, role, session = self._project(request)
        try:
            query = page.query.model_validate(dict(request.query_params))
        except ValidationError as error:
            first = error.errors()[0]
            raise HTTPException(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        asked = Asked(project, _ids(request), query, role, self._clock())
        return await self._in_thread(page.waits, lambda: page.facts(asked)), asked, session

    def _page(self, page: Page) -> Callable[[Request], Any]:
        async def show(request: Request) -> Response:
            facts, asked, session = await self._facts(page, request)
            about = {
                "facts": facts, "page": page, "pages": PAGES, "title": page.title, "project": asked.project.name,
                "role": asked.role, "csrf": session.csrf, "now": asked.now, "query": asked.query,
                "others": self._mine(session), "base": f"/p/{asked.project.name}",
                "said": session.said,
            }  # fmt: skip
            if not request.headers.get("hx-request"):  # else it replaces a part of a page, and this stands outside
                session.said = ""
            return await self._in_thread(False, lambda: templates.html(page.name, about))

        return show

    def _json(self, page: Page) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            facts, _, _ = await self._facts(page, request)
            return templates.json_response(facts)

        return answer

    async def _status(self, request: Request) -> Response:
        """Answer with the facts of the first page: of the project that the query names, or of the only one."""
        session = self._session(request)
        mine = self._mine(session)
        name = request.query_params.get("project") or (mine[0] if len(mine) == 1 else "")
        if name not in mine:
            raise HTTPException(404, f"name one of your projects: /status?project=NAME, of {', '.join(mine)}")
        request.path_params["project"] = name
        facts, asked, _ = await self._facts(PAGES[0], request)
        return templates.json_response({**facts, **await self._in_thread(True, lambda: system.engine(asked))})

    async def _openapi(self, request: Request) -> Response:
        self._session(request)
        return JSONResponse(openapi(__version__))

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _events(self, request: Request) -> Response:
        project, _, session = self._project(request)
        live, kind = self.live[project.name], "text/event-stream"
        if request.method == "HEAD":
            return Response(media_type=kind)
        who = session.csrf  # none of programs, which count together
        if live.is_full(who):
            raise HTTPException(503, "too many pages are open")
        events = live.events(lambda: self.access.is_open(session, project.name), who)
        return StreamingResponse(events, media_type=kind, headers={"x-accel-buffering": "no"})

    # --- changes ---

    async def _form_of_ours(self, request: Request, session: Session) -> Mapping[str, str]:
        form = await _form(request)
        shown = request.headers.get("x-csrf") or form.get("csrf", "")
        if not session.csrf or shown != session.csrf:
            raise HTTPException(403, "this page is too old; load it again")
        return form

    async def _acting(self, request: Request) -> tuple[Project, Session, Mapping[str, str]]:
        """Return the project, the session and the form of somebody who may act there."""
        project, role, session = self._project(request)
        form = await self._form_of_ours(request, session)
        if role != "act":
            raise HTTPException(403, "your link is for looking only")
        return project, session, form

    def _action(self, action: Action) -> Callable[[Request], Any]:
        async def act(request: Request) -> Response:
            project, session, form = await self._acting(request)
            acting = Acting(project, _ids(request), form, self._clock())
            done = await self._in_thread(action.waits, lambda: action.act(acting))
            if action.forgets:
                project.forget()
            if request.headers.get("hx-request"):
                return templates.html("said", {"said": done.words, "title": "Done"})
            session.said = done.words
            here = f"/p/{project.name}/"
            path = _path_back(request, here) if done.then is None else f"{here}{done.then}"
            return RedirectResponse(path, status_code=303)

        return act


async def _failed(request: Request, error: Exception) -> Response:
    match error:
        case HTTPException():
            return _error(request, error.status_code, str(error.detail))
        case ArtPatchError():
            status = 404 if isinstance(error, NotFound) else 503 if isinstance(error, StoreError) else 409
            return _error(request, status, str(error))
        case RecursionError():
            return _error(request, 422, "what was recorded here is nested too deep to be shown")
        case _:
            log.error("%s could not be answered", one_line(request.url.path), exc_info=error)
            return _error(request, 500, "the page could not be made; the server's log says why")


def _error(request: Request, status: int, words: str) -> Response:
    if request.url.path.startswith(("/api/", "/status", "/health")):
        return JSONResponse({"error": {"message": words, "status": status}}, status_code=status)
    return templates.html("error", {"title": f"Error {status}", "words": words, "status": status}, status=status)


async def _form(request: Request) -> Mapping[str, str]:
    """Return the fields of a form; of one that is repeated, the last."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "send a form: content-type application/x-www-form-urlencoded")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MOST_FORM:
            raise HTTPException(413, "the form is too long")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100))
    except ValueError:
        raise HTTPException(400, "the form cannot be read") from None


class _Assets(StaticFiles):
    """The files of the package; a browser asks again whether one has changed, and gets 304 if not."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response
