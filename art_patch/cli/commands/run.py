"""`art-patch run -- COMMAND`: a program and its children, patched without a line in them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from art_patch.cli.options.opening import refuse_foreign
from art_patch.cli.options.shared import (
    BaseUrlOption,
    HomeOption,
    JsonOption,
    MatchOption,
    ModeOption,
    ProjectOption,
    RedactOption,
    SampleRateOption,
    StoreOption,
)


def run(
    command: Annotated[
        list[str] | None, typer.Argument(help="What to run, after `--`.", show_default=False, metavar="COMMAND")
    ] = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    mode: ModeOption = None,
    match: MatchOption = None,
    sample_rate: SampleRateOption = None,
    redact: RedactOption = None,
    base_url: BaseUrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a program, and what it starts, as if it began with `art_patch.patch()`.

    art-patch run --project support-bot -- python app.py --its-own-option

    It takes this process's place: signals, exit code, input and output are its own.
    Not reached: Python started with -S, -E or -I, or without art_patch installed.
    """
    from art_patch.errors import ConfigError
    from art_patch.settings import load_settings
    from art_patch.store import absolute_url, waits_for_network

    if not command:
        raise ConfigError("there is nothing to run; write it after `--`: art-patch run -- python app.py")
    given = {
        "project": project,
        "home": None if home is None else Path(home).absolute(),  # the program may change its directory
        "store": store,
        "mode": mode,
        "match": match,
        "sample_rate": sample_rate,
        "redact": redact,
        "base_url": base_url,
    }
    settings = load_settings(**given)
    if not waits_for_network(settings.store):  # a program that is started waits for no server
        refuse_foreign(settings)
    if settings.store is not None:
        given["store"] = absolute_url(settings.store)
    _become(command, {name: str(value) for name, value in given.items() if value is not None})


def _become(command: list[str], settings: dict[str, str]) -> NoReturn:
    import os
    import signal
    import sys

    from art_patch.autostart import environment
    from art_patch.errors import CommandNotFound

    sys.stdout.flush()
    # Python ignores these two, and the program would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment(settings, os.environ))
    except OSError as error:
        reason = "there is no such program" if isinstance(error, FileNotFoundError) else error.strerror
        raise CommandNotFound(f"cannot run {command[0]!r} ({reason}); check the name and your PATH") from None
