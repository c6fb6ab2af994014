"""Scores from people: `art-patch feedback serve` answers feedback links; `import`, `pull` read other tools' scores."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from art_patch import feedback
from art_patch.cli import output
from art_patch.cli.options import ActingProject, Project, extra, moment
from art_patch.cli.typed_options import Option, command, setting
from art_patch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

LANGFUSE_URL = Option(env="LANGFUSE_BASE_URL", help="Address of Langfuse.")


@command
def serve_feedback(
    project: Project,
    host: Annotated[str, Option(help="Address to listen on. Every request must show a signed link.")] = "127.0.0.1",
    port: Annotated[int, Option(least=0, most=65535, help="Port to listen on; 0 takes a free one.")] = 8702,
    advertise: Annotated[
        str | None, Option(help="Address that people use, such as https://feedback.example.com.")
    ] = None,
    redact: Annotated[str | None, setting("redact")] = None,
) -> None:
    """Serve feedback links: a page with thumbs up and down for people, JSON for apps.

    Links are signed with ART_PATCH_FEEDBACK_SECRET if it is set, else with a key file in the project's directory. For
    people on other machines, put a proxy with TLS in front of this server and give the proxy's address with
    --advertise.
    """
    # Imported here: it needs Starlette and uvicorn, which the base installation lacks.
    with extra("the feedback server", "proxy"):
        from art_patch.feedback import run_feedback
    settings = project.settings(redact=redact)

    def on_ready(here: str) -> None:
        if project.as_json:
            output.answer({"base_url": here, "project": settings.project})
            return
        console = output.stdout()
        console.print(f"[b]{here}[/] answers feedback links   (Ctrl-C stops it)")
        console.print(f"[dim]project {settings.project}; links: art_patch.feedback_url()[/]")

    run_feedback(settings, host=host, port=port, advertise=advertise, on_ready=on_ready)


@dataclass(frozen=True, slots=True)
class Renaming:
    """The option that gives imported scores another name."""

    rename: Annotated[
        str | None,
        Option(name="as", help="New name of the scores, such as `reward`. Default: their name in the other tool."),
    ] = None


@dataclass(frozen=True, slots=True)
class Pulling(Renaming):
    """The options of commands that read scores from a tracker's API."""

    since: Annotated[
        str | None, Option(help="Scores given at or after this time: 2026-11-21, 2026-11-21T14:00, 7d, 12h.")
    ] = None


@command
def import_feedback(
    file: Annotated[
        Path, typer.Argument(help="File with Langfuse's scores or LangSmith's feedback: JSON, JSON lines or CSV.")
    ],
    renaming: Renaming,
    project: ActingProject,
) -> None:
    """Read scores that people gave in Langfuse or LangSmith, from a file.

    Each score is added to the trajectory whose id, or whose trace id from `art-patch send`, the row names. If a file is
    imported again, only scores that people have changed in the other tool are updated. Scores that `art-patch send`
    has sent to that tool are not imported. If one row is wrong, nothing is imported.
    """
    try:
        found = feedback.read_feedback(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    with project.opened() as (_, opened):
        who = project.actor("feedback import")
        metrics = feedback.write_feedback(opened, found, renaming.rename, source=str(file), who=who)
    _say(metrics, "path", str(file), project.as_json)


class _Source(Protocol):
    source: str

    def rows(self, since: float | None) -> Iterator[Any]: ...


@command
def pull_langfuse(
    pulling: Pulling,
    project: ActingProject,
    base_url: Annotated[str, LANGFUSE_URL] = "https://cloud.langfuse.com",
) -> None:
    """Read scores from Langfuse.

    LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY choose the project in Langfuse. Each score is added to the trajectory
    with the id of its trace, or whose trace `art-patch send` sent. Scores that `art-patch send` has sent to Langfuse
    are not imported.
    """
    public_key, secret_key = langfuse_keys()
    _pull(
        lambda: feedback.LangfuseScores(base_url, public_key=public_key, secret_key=secret_key),
        "langfuse", pulling, project,
    )  # fmt: skip


@command
def pull_langsmith(
    pulling: Pulling,
    project: ActingProject,
    endpoint: Annotated[
        str, Option(env="LANGSMITH_ENDPOINT", help="Address of LangSmith's API.")
    ] = "https://api.smith.langchain.com",
    langsmith_project: Annotated[
        str | None, Option(env="LANGSMITH_PROJECT", help="Project in LangSmith. Default: all projects.")
    ] = None,
) -> None:
    """Read feedback from LangSmith.

    LANGSMITH_API_KEY chooses the workspace in LangSmith. Each score is added to the trajectory with the id of
    LangSmith's run, or of the trace of that run.
    """
    key = os.environ.get("LANGSMITH_API_KEY", "")
    if not key:
        raise ConfigError("set LANGSMITH_API_KEY; LangSmith makes one in its settings")
    _pull(
        lambda: feedback.LangSmithFeedback(endpoint, api_key=key, project=langsmith_project),
        "langsmith", pulling, project,
    )  # fmt: skip


def langfuse_keys() -> tuple[str, str]:
    """Return the public and the secret key of Langfuse from the environment."""
    public, secret = (os.environ.get(f"LANGFUSE_{name}_KEY", "") for name in ("PUBLIC", "SECRET"))
    if not (public and secret):
        raise ConfigError(
            "set LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY; Langfuse shows them in a project's settings"
        )
    return public, secret


def _pull(made: Callable[[], _Source], name: str, pulling: Pulling, project: ActingProject) -> None:
    # Before the tracker is asked, so that a mistyped time costs no request.
    after = None if pulling.since is None else moment(pulling.since, "--since", time.time())
    with extra(f"pulling from {name}", name):
        source = made()
    with project.opened() as (_, opened):
        # All are read before any is written: a tracker that fails midway leaves the store as it was.
        found = feedback.feedback_of(source.rows(after))
        who = project.actor(f"pull {name}")
        metrics = feedback.write_feedback(opened, found, pulling.rename, source=source.source, who=who)
    _say(metrics, "source", source.source, project.as_json)


def _say(metrics: Counter[str], kind: str, source: str, as_json: bool) -> None:
    names = ("read", "written", "already_there", "ours", "no_number", "unknown_run")
    facts = {name: metrics[name] for name in names}
    if as_json:
        return output.answer({kind: source, **facts})
    rest = ", ".join(f"{facts[name]} {name.replace('_', ' ')}" for name in names[2:] if facts[name])
    words = f"{facts['written']} scores of {facts['read']} rows of {output.visible(source)} written"
    return output.say(words + (f"; {rest}" if rest else ""))
