"""`art-patch import`: reads trajectories from a file that art_patch or another tool has written."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from art_patch import formats, store
from art_patch.cli import output
from art_patch.cli.options import ActingProject, one_of
from art_patch.cli.typed_options import Option, command
from art_patch.errors import MalformedFile

if TYPE_CHECKING:
    from art_patch.formats import Bundle, ImportFormat

_PAGE = 200  # trajectories in a transaction
_STEP_S = 1e-6  # between two rows; a float holds today's time to a quarter of this


@command
def import_file(
    file: Annotated[str, typer.Argument(help="File of JSON lines or Parquet; `-` is stdin.")],
    project: ActingProject,
    format: Annotated[
        str,
        Option(
            help="chat: OpenAI fine-tuning. preference: OpenAI's or TRL's. sft, grpo: TRL. trajectories: art_patch's. "
            "auto: decide for each line."
        ),
    ] = "auto",
) -> None:
    """Read trajectories from a file.

    The whole file is checked first: if one line is wrong, nothing is imported (exit code 15). A trajectory that the
    store already has is not changed, so importing a file twice adds nothing. Text without token ids is never trained
    on. If a row names a function for `retrain --replay`, the name is not imported, because a file must not decide which
    code is executed.

    `import scores FILE` is the same as `feedback import`; `import scores langfuse|langsmith` as `feedback pull`.
    """
    one_of("--format", format, get_args(formats.ImportFormat))
    expected: ImportFormat = format  # pyright: ignore[reportAssignmentType] - checked in the line above
    settings = project.settings()
    now = time.time()
    with formats.reading(file) as rows, output.bars(quiet=project.as_json) as progress:
        total = 0
        # The file is read twice: once to check it, once to write. So a wrong last line leaves the store as it was.
        for total, _ in enumerate(_bundles(rows, file, expected, now), 1):
            if total % _PAGE == 0:
                # The total is not known yet, so the bar stays just short of full.
                progress("check", total, total + 1)
        metrics: Counter[str] = Counter()
        # An empty file must not make a store.
        if total:
            opened = store.open_store(settings.store_url, project=settings.project)
            try:
                for page in _pages(_bundles(rows, file, expected, now)):
                    metrics += _write(opened, page, now)
                    progress("import", metrics["read"], total)
                opened.transfers.note_import(file, who=project.actor("import"), metrics=dict(metrics), now=now)
            finally:
                opened.close()
    _say(file, metrics, project.as_json)


def _bundles(
    rows: Callable[[], Iterator[tuple[str, Mapping[str, Any]]]], file: str, expected: ImportFormat, now: float
) -> Iterator[Bundle]:
    """Yield the trajectories of the file."""
    for number, (place, row) in enumerate(rows()):
        try:
            # Each row is a little older than the one before, because lists and exports show the newest first.
            yield from formats.bundles_of(row, expected=expected, at=now - number * _STEP_S)
        except MalformedFile as error:
            name = "stdin" if file == formats.STREAM else file
            raise MalformedFile(f"{name}, {place}: {error}; nothing was imported") from None


def _pages(bundles: Iterator[Bundle]) -> Iterator[list[Bundle]]:
    page: list[Bundle] = []
    for bundle in bundles:
        page.append(bundle)
        if len(page) == _PAGE:
            yield page
            page = []
    if page:
        yield page


def _write(opened: store.Store, page: list[Bundle], now: float) -> Counter[str]:
    """Write the trajectories that the store does not have, in one transaction, then their groups; return the counts."""
    here = opened.transfers.bases()
    known = opened.transfers.known([bundle.trajectory.id for bundle in page])
    new: dict[str, Bundle] = {}
    for bundle in page:
        if bundle.trajectory.id not in known and bundle.trajectory.id not in new:
            # A policy of this name has another base here, so its token ids would mean other texts.
            # `here.get(name, base)`: a policy that this store does not know is no contradiction.
            strangers = (name for name, base in bundle.bases.items() if here.get(name, base) != base)
            new[bundle.trajectory.id] = bundle.without_tokens_of(strangers)
    offers = sum(bundle.offers_replay for bundle in new.values())
    if new:
        opened.write([record for bundle in new.values() for record in bundle.without_replay().records])
    # Also for those that were here: an import that was cut short may have come as far as the trajectories.
    opened.transfers.add_groups({b.trajectory.id: b.group for b in page if b.group is not None}, now=now)
    return Counter(
        read=len(page),
        trajectories=len(new),
        calls=sum(len(bundle.trajectory.calls) for bundle in new.values()),
        scores=sum(len(bundle.trajectory.scores) for bundle in new.values()),
        already_there=len(page) - len(new),
        offers_dropped=offers,
    )


def _say(file: str, metrics: Counter[str], as_json: bool) -> None:
    names = ("read", "trajectories", "calls", "scores", "already_there", "offers_dropped")
    if as_json:
        return output.answer({"path": file, **{name: metrics[name] for name in names}})
    if not metrics["read"]:
        return output.say(f"{output.visible(file)} is empty; nothing was imported")
    there = f"; {metrics['already_there']} were there already" if metrics["already_there"] else ""
    words = f"{metrics['trajectories']} trajectories with {metrics['calls']} calls imported{there}"
    if metrics["offers_dropped"]:
        words += f"; {metrics['offers_dropped']} of them named a function to run again, which was left out"
    return output.say(words)
