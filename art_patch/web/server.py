"""Runs the server of `art-patch web`: binds the address, prints the links, and closes the stores at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

from art_patch._lib.asgi import PageGuard
from art_patch._lib.http_server import bind, is_loopback, serve, url_of
from art_patch._lib.key_files import made_key
from art_patch.errors import ConfigError
from art_patch.settings import Settings
from art_patch.store import open_store
from art_patch.web.access import Access, Role
from art_patch.web.app import WebApp
from art_patch.web.projects import Given, Project

KEY_FILE = "web.key"
"""File in a project's directory: the key with which programs may look at its JSON."""


def run_web(
    shown: Sequence[Settings], *, host: str, port: int, role: Role, advertise: str | None = None,
    certificate: tuple[Path, Path] | None = None, given: Given | None = None,
    on_ready: Callable[[str, dict[str, str]], None], stop: Event | None = None,
) -> None:  # fmt: skip
    """Show these projects until SIGTERM, SIGINT or `stop`.

    Args:
        role: what the links that are handed to `on_ready` allow.
        advertise: the address that browsers use, `https://NAME`, if a proxy with TLS stands before the server.
        certificate: the files of a TLS certificate and of its key.
        given: what the command line knows about the settings.
        on_ready: gets the server's address, and a one-time link for each project.

    Raises:
        ConfigError: the address is not of this machine, or is beyond loopback without TLS.
        PortInUse: another process listens there.
        StoreError: a store cannot be opened.
    """
    if advertise is not None and urlsplit(advertise).scheme != "https":
        raise ConfigError(f"--advertise {advertise} is not an address with TLS; write it like https://art.example.com")
    # A guard of its own stands before every page, so that the address is no question of keys.
    sock = bind(host, port, key="-", what="your store")
    with ExitStack() as stack:
        stack.enter_context(sock)
        if not (is_loopback(str(sock.getsockname()[0])) or certificate or advertise):
            raise ConfigError(
                f"listening on {host} would send what your users wrote over the network in the clear; give "
                "--certificate and --certificate-key, or put a proxy with TLS before it and name its address with "
                "--advertise"
            )
        projects: list[Project] = []
        for settings in shown:
            store = open_store(settings.store_url, create=False, project=settings.project)
            stack.callback(store.close)
            projects.append(Project(settings, store, given))
        keys = {each.name: made_key(each.settings.directory / KEY_FILE) for each in projects}
        bound: int = sock.getsockname()[1]
        access = Access(keys, port=bound, secure=bool(certificate or advertise))
        app = WebApp(projects, access)
        here = advertise or url_of(host, sock).replace("http:", "https:" if certificate else "http:")
        here = here.rstrip("/")
        names = (host, urlsplit(here).hostname or "") if is_loopback(str(sock.getsockname()[0])) or advertise else None
        guarded = PageGuard(app.asgi(origin=advertise and here), names, pages=True)
        stack.callback(lambda: [each.close() for each in app.live.values()])

        def ready() -> None:
            on_ready(here, {each.name: f"{here}/enter#{access.link(each.name, role)}" for each in projects})

        serve(guarded, sock, drain_s=1.0, on_ready=ready, stop=stop, certificate=certificate)
