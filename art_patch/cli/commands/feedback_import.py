"""`art-patch feedback import`: what people said elsewhere becomes scores here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i

if TYPE_CHECKING:
    from art_patch.feedback import Feedback
    from art_patch.store import Store
    from art_patch.types import Score, Trajectory

_PAGE = 200


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
    from art_patch.feedback import read_feedback

    try:
        told = read_feedback(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    with opened_store(project=project, home=home, store=store) as (_, opened):
        metrics = write_feedback(opened, told, rename, source=str(file), who=who_am_i(who, "feedback import"))
    say(metrics, "path", str(file), as_json)


def write_feedback(
    store: Store, told: Sequence[Feedback], rename: str | None, *, source: str, who: str
) -> Counter[str]:
    """Write what the store does not have yet; return how many rows came to what.

    Args:
        store: where to.
        told: the rows.
        rename: name of the scores; their own unless given.
        source: where they are from, for the ledger.
        who: by whom, likewise.
    """
    metrics = Counter[str](read=len(told))
    runs = _runs_of(store, told)
    for start in range(0, len(told), _PAGE):
        new, seen = _scores(store, told[start : start + _PAGE], runs, rename)
        store.write(new)
        metrics.update(seen)
    store.transfers.note_import(source, who=who, metrics=dict(metrics))
    return metrics


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


def _runs_of(store: Store, told: Sequence[Feedback]) -> dict[str, str]:
    """The trajectory behind each id that the file names."""
    from art_patch.store import PAGE, Cursor, Filter
    from art_patch.trackers import trace_id_of

    named = {run for one in told for run in one.runs}
    found = {key: key for key in store.read.known(sorted(named))}
    if all(any(run in found for run in one.runs) for one in told):
        return found
    after: Cursor | None = None  # a trace id that was made of an id is found by making it again
    while page := store.browse.ids(Filter(), after=after, limit=PAGE):
        after = page[-1]
        found |= {made: key for _, key in page if (made := trace_id_of(key)) in named and made not in found}
    return found


def _scores(
    store: Store, told: Sequence[Feedback], runs: dict[str, str], rename: str | None
) -> tuple[list[Score], Counter[str]]:
    """Scores to write, and how many rows gave none for which reason."""
    from art_patch.types import Score

    keys = [next((runs[run] for run in one.runs if run in runs), None) for one in told]
    wholes: dict[str, Trajectory] = {t.id: t for t in store.read.trajectories(sorted({key for key in keys if key}))}
    new: list[Score] = []
    seen = Counter[str]()
    for one, key in zip(told, keys, strict=True):
        if key is None or one.value is None:
            seen["unknown_run" if key is None else "no_number"] += 1
            continue
        there = {score.id: score for score in wholes[key].scores}
        if one.theirs in there:
            seen["ours"] += 1
            continue
        at = wholes[key].info.started_at if one.at is None else one.at
        score = Score(one.id, key, rename or one.name, one.value, one.source, at, comment=one.comment)
        if there.get(one.id) == score:
            seen["already_there"] += 1
        else:
            new.append(score)
            seen["written"] += 1
    return new, seen
