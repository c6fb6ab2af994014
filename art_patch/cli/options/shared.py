"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ProjectOption = Annotated[
    str | None, typer.Option("--project", envvar="ART_PATCH_PROJECT", help="Which agent's traffic and policies.")
]
HomeOption = Annotated[
    Path | None, typer.Option("--home", envvar="ART_PATCH_HOME", help="Directory of all projects.", show_default=False)
]
StoreOption = Annotated[
    str | None, typer.Option("--store", envvar="ART_PATCH_STORE", help="Database URL.", show_default=False)
]
ModeOption = Annotated[
    str | None, typer.Option("--mode", envvar="ART_PATCH_MODE", help="off, record, shadow, canary or route.")
]
MatchOption = Annotated[
    str | None,
    typer.Option("--match", envvar="ART_PATCH_MATCH", help="Glob of the models that are ours, or re:EXPRESSION."),
]
SampleRateOption = Annotated[
    float | None,
    typer.Option("--sample-rate", envvar="ART_PATCH_SAMPLE_RATE", help="Share of trajectories that is recorded, 0..1."),
]
RedactOption = Annotated[
    str | None,
    typer.Option("--redact", envvar="ART_PATCH_REDACT", help="`secrets` takes keys and passwords out of the record."),
]
BaseUrlOption = Annotated[
    str | None,
    typer.Option("--base-url", envvar="ART_PATCH_BASE_URL", help="The engine; the store knows it.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
WhoOption = Annotated[
    str | None, typer.Option("--who", help="Name for the ledger; your user name unless given.", show_default=False)
]


def who_am_i(given: str | None, command: str) -> str:
    """Return who acts, for the ledger: `USER (art-patch COMMAND)`."""
    import getpass

    try:
        user = given or getpass.getuser()
    except (KeyError, OSError):  # a container without a passwd entry
        user = "unknown"
    return f"{user} (art-patch {command})"
