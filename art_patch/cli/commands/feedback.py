"""`art-patch feedback serve`: the server behind the links of `art_patch.feedback_url()`."""

from __future__ import annotations

from typing import Annotated

import typer

from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, RedactOption, StoreOption


def serve_feedback(
    host: Annotated[str, typer.Option("--host", help="Every request must show a signed link.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)] = 8702,
    advertise: Annotated[
        str | None,
        typer.Option("--advertise", help="Address that people reach it by, such as https://feedback.example.com."),
    ] = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    redact: RedactOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer feedback links: a page with thumbs up and down, and the same for apps as JSON.

    Links are signed with ART_PATCH_FEEDBACK_SECRET, or with a key file in the project's directory. For people
    elsewhere put it behind a proxy that does TLS, and say under which address with --advertise.
    """
    from art_patch.cli.views.output import answer, stdout
    from art_patch.errors import ConfigError
    from art_patch.settings import load_settings

    try:
        from art_patch.feedback import run_feedback
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("art_patch"):
            raise
        raise ConfigError(f'the feedback server needs {error.name}; run: pip install "art-patch[proxy]"') from None

    settings = load_settings(project=project, home=home, store=store, redact=redact)

    def on_ready(here: str) -> None:
        if as_json:
            answer({"base_url": here, "project": settings.project})
            return
        console = stdout()
        console.print(f"[b]{here}[/] answers feedback links   (Ctrl-C stops it)")
        console.print(f"[dim]project {settings.project}; links: art_patch.feedback_url()[/]")

    run_feedback(settings, host=host, port=port, advertise=advertise, on_ready=on_ready)


app = typer.Typer(name="feedback", help="Let people score what the agent did.", no_args_is_help=True)
