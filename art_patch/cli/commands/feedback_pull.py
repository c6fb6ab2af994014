"""`art-patch feedback pull`: what people say in Langfuse or LangSmith, asked for there, becomes scores here.

All of it is read each time, or what came since `--since`; a score is known by the tracker's own id, so nothing is
written twice and what was changed there is changed here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from art_patch.cli.options import filters
from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

app = typer.Typer(name="pull", help="Scores that people gave elsewhere, asked for there.", no_args_is_help=True)

RenameOption = Annotated[
    str | None,
    typer.Option("--as", help="Name of the scores, such as `reward`; their own unless given.", show_default=False),
]
GivenSinceOption = Annotated[
    str | None,
    typer.Option("--since", help="Given at or after: 2026-11-21, 2026-11-21T14:00, 7d, 12h.", show_default=False),
]


class _Source(Protocol):
    source: str

    def rows(self, since: float | None) -> Iterator[Any]: ...


def pull_langfuse(
    base_url: Annotated[
        str, typer.Option("--base-url", envvar="LANGFUSE_BASE_URL", help="Of Langfuse.")
    ] = "https://cloud.langfuse.com",
    rename: RenameOption = None,
    since: GivenSinceOption = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Scores of Langfuse's.

    LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY say of which project. A trace is known here by its id, also where
    `art-patch send` made that id. Scores that were sent there from here stay as they are.
    """
    from art_patch.cli.commands.send import langfuse_keys

    public_key, secret_key = langfuse_keys()

    def source() -> _Source:
        from art_patch.feedback import LangfuseScores

        return LangfuseScores(base_url, public_key=public_key, secret_key=secret_key)

    _pull(source, "langfuse", rename, since, project=project, home=home, store=store, who=who, as_json=as_json)


def pull_langsmith(
    endpoint: Annotated[
        str, typer.Option("--endpoint", envvar="LANGSMITH_ENDPOINT", help="Of LangSmith's API.")
    ] = "https://api.smith.langchain.com",
    theirs: Annotated[
        str | None,
        typer.Option(
            "--langsmith-project", envvar="LANGSMITH_PROJECT", help="In LangSmith; all unless given.",
            show_default=False,
        ),
    ] = None,
    rename: RenameOption = None,
    since: GivenSinceOption = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Feedback of LangSmith's.

    LANGSMITH_API_KEY says of which workspace. A run is known here by its own id or that of its trace.
    """
    from art_patch.errors import ConfigError

    key = os.environ.get("LANGSMITH_API_KEY", "")
    if not key:
        raise ConfigError("set LANGSMITH_API_KEY; LangSmith makes one in its settings")

    def source() -> _Source:
        from art_patch.feedback import LangSmithFeedback

        return LangSmithFeedback(endpoint, api_key=key, project=theirs)

    _pull(source, "langsmith", rename, since, project=project, home=home, store=store, who=who, as_json=as_json)


def _pull(
    made: Callable[[], _Source], extra: str, rename: str | None, since: str | None, *, project: ProjectOption,
    home: HomeOption, store: StoreOption, who: WhoOption, as_json: bool,
) -> None:  # fmt: skip
    """Read, then write, and say what came of it."""
    from art_patch.cli.commands.feedback_import import say
    from art_patch.errors import ConfigError
    from art_patch.feedback import feedback_of, write_feedback

    after = filters.make_filter(since=since).since
    try:
        source = made()
    except ModuleNotFoundError as error:
        raise ConfigError(f'pulling from {extra} needs {error.name}; run: pip install "art-patch[{extra}]"') from None
    with opened_store(project=project, home=home, store=store) as (_, opened):
        told = feedback_of(source.rows(after))
        metrics = write_feedback(opened, told, rename, source=source.source, who=who_am_i(who, f"pull {extra}"))
    say(metrics, "source", source.source, as_json)
