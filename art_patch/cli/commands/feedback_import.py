"""`art-patch feedback import`: what people said elsewhere becomes scores here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i


def import_feedback(
    file: Annotated[Path, typer.Argument(help="Langfuse's scores or LangSmith's feedback: JSON, JSON lines or CSV.")],
    rename: Annotated[
        str | None,
        typer.Option("--as", help="Name of the scores, such as `reward`; their own unless given.", show_default=False),
    ] = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read scores that people gave in Langfuse or LangSmith.

    A trace is known here by its id, also where `art-patch send` made that id. Importing again changes nothing but what
    changed there; scores that were sent there from here stay as they are. One wrong row, and nothing is imported.
    """
    from art_patch.errors import ConfigError
    from art_patch.feedback import read_feedback, write_feedback

    try:
        told = read_feedback(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    with opened_store(project=project, home=home, store=store) as (_, opened):
        metrics = write_feedback(opened, told, rename, source=str(file), who=who_am_i(who, "feedback import"))
    say(metrics, "path", str(file), as_json)


def say(metrics: Counter[str], kind: str, source: str, as_json: bool) -> None:
    """Say what `write_feedback` returned; `kind` is the source's name in JSON."""
    from art_patch.cli.views.output import answer, stdout
    from art_patch.cli.views.safe_text import visible

    names = ("read", "written", "already_there", "ours", "no_number", "unknown_run")
    facts = {name: metrics[name] for name in names}
    if as_json:
        return answer({kind: source, **facts})
    rest = ", ".join(f"{facts[name]} {name.replace('_', ' ')}" for name in names[2:] if facts[name])
    words = f"{facts['written']} scores of {facts['read']} rows of {visible(source)} written"
    return stdout().print(words + (f"; {rest}" if rest else ""), markup=False, soft_wrap=True)
