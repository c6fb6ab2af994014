"""`art-patch web`: shows projects in a browser."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Annotated

import typer

from art_patch import store
from art_patch.cli import output
from art_patch.cli.options import FROM_ENV_FILE, Prices, Project, extra, require_project
from art_patch.cli.typed_options import Option, command, given_on_the_command_line, variables_of
from art_patch.errors import ConfigError
from art_patch.settings import Settings


@command
def web(
    context: typer.Context,
    project: Project,
    cost: Prices,
    also: Annotated[
        list[str] | None, Option("Show this project as well, of the same home or store. Repeatable.", metavar="NAME")
    ] = None,
    host: Annotated[str, Option("Address to listen on; one beyond this machine needs TLS.")] = "127.0.0.1",
    port: Annotated[int, Option("Port to listen on; 0 takes a free one.", least=0, most=65535)] = 8710,
    look: Annotated[bool, Option("The printed links are for looking only; nothing can be changed.")] = False,
    browser: Annotated[bool, Option("Open the first link in a browser.", off="--no-browser")] = True,
    certificate: Annotated[Path | None, Option("File of a TLS certificate.")] = None,
    certificate_key: Annotated[Path | None, Option("File of the certificate's key.")] = None,
    advertise: Annotated[
        str | None, Option("Address that browsers use, if a proxy with TLS stands before: https://art.example.com.")
    ] = None,
) -> None:
    """Show runs, groups, updates, policies and the store in a browser, live.

    Prints one link for each project. A link works once, within a day, and its browser stays known until it was idle for
    12 hours. Nothing is loaded from other machines. Programs read the same as JSON under `/api/v1`, with the key in
    `web.key` in the project's directory. The money saved is counted as by `art-patch report`; without prices it is
    unknown.
    """
    with extra("the web page", "web"):
        from art_patch.web import Given, run_web
    if (certificate is None) != (certificate_key is None):
        raise ConfigError("--certificate and --certificate-key belong together; give both, or neither")
    for path in (certificate, certificate_key):
        if path is not None and not path.is_file():
            raise ConfigError(f"there is no file {path}; name the certificate and its key in PEM")
    prices = cost.by_model()
    names = dict.fromkeys((project.settings().project, *(also or ())))
    shown = [replace(project, project=name).settings() for name in names]
    for settings in shown:
        require_project(settings)

    def on_ready(here: str, links: dict[str, str]) -> None:
        if not project.answered({"base_url": here, "links": links, "role": "look" if look else "act"}):
            console = output.stdout()
            console.print(f"[b]{here}[/] shows {output.escape(', '.join(links))}   (Ctrl-C stops it)")
            for name, link in links.items():
                output.say(f"{name}: {link}")
            output.say("a link works once; whoever has it may " + ("look" if look else "look and act"), style="dim")
        if browser:
            _open(links)

    pair = (certificate, certificate_key) if certificate and certificate_key else None
    arguments = [name for name in Settings.model_fields if given_on_the_command_line(context, name)]
    variables = variables_of(context.find_root().command)
    given = Given(arguments, FROM_ENV_FILE, variables, prices, cost.gpu_usd_per_hour)
    run_web(
        shown, host=host, port=port, role="look" if look else "act", advertise=advertise, certificate=pair,
        given=given, on_ready=on_ready,
    )  # fmt: skip


@contextmanager
def shown_meanwhile(settings: Settings, say: Callable[[str], None]) -> Generator[None]:
    """Show a project while the block runs, in a thread of this process; `say` gets the link."""
    with extra("the web page", "web"):
        from art_patch.web import run_web
    store.open_store(settings.store_url, project=settings.project).close()  # it may be about to be made
    stop, ready = Event(), Event()

    def on_ready(here: str, links: dict[str, str]) -> None:
        say(f"watch it at [b]{links[settings.project]}[/]")
        _open(links)
        ready.set()

    def serve() -> None:
        try:
            run_web([settings], host="127.0.0.1", port=0, role="act", on_ready=on_ready, stop=stop)
        finally:
            ready.set()

    thread = Thread(target=serve, name="art_patch-web", daemon=True)
    thread.start()
    ready.wait(30)
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def _open(links: dict[str, str]) -> None:
    if sys.stdout.isatty():
        webbrowser.open(next(iter(links.values())))
