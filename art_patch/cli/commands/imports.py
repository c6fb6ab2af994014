"""`art-patch import`: trajectories from a file of ours or of another tool."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i

if TYPE_CHECKING:
    from art_patch.formats import Bundle, ImportFormat
    from art_patch.store import Store

_PAGE = 200
_STEP_S = 1e-6  # a float holds today's time to a quarter of this


def import_file(
    file: Annotated[str, typer.Argument(help="JSON lines or Parquet; `-` is stdin.")],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="chat: OpenAI fine-tuning. preference: OpenAI's or TRL's. sft, grpo: TRL. trajectories: ours. "
            "auto: look at each line.",
        ),
    ] = "auto",
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read trajectories from a file.

    The whole file is checked first: one wrong line, and nothing is imported (exit code 15). What is in the store
    already stays as it is, so importing a file twice adds nothing. Text without token ids is never trained on here.
    A function that a row names for `retrain --replay` is left out, for a file must not say what to execute.

    `import scores FILE` and `import scores langfuse|langsmith` are `feedback import` and `feedback pull`.
    """
    from art_patch.cli.views.output import bars
    from art_patch.errors import ConfigError
    from art_patch.formats import ImportFormat, reading
    from art_patch.settings import load_settings
    from art_patch.store import open_store

    known = get_args(ImportFormat)
    if format not in known:
        raise ConfigError(f"--format {format!r} is not one of {', '.join(known)}")
    expected: ImportFormat = format  # pyright: ignore[reportAssignmentType] - looked up just now
    settings = load_settings(project=project, home=home, store=store)
    now = time.time()
    with reading(file) as rows, bars(quiet=as_json) as progress:
        total = 0
        for total, _ in enumerate(_bundles(rows, file, expected, now), 1):
            if total % _PAGE == 0:
                progress("check", total, total + 1)
        metrics: Counter[str] = Counter()
        if total:
            opened = open_store(settings.store_url, project=settings.project)
            try:
                for page in _pages(_bundles(rows, file, expected, now)):
                    metrics += _write(opened, page, now)
                    progress("import", metrics["read"], total)
                opened.transfers.note_import(file, who=who_am_i(who, "import"), metrics=dict(metrics), now=now)
            finally:
                opened.close()
    _say(file, metrics, as_json)


def _bundles(
    rows: Callable[[], Iterator[tuple[str, Mapping[str, Any]]]], file: str, expected: ImportFormat, now: float
) -> Iterator[Bundle]:
    """What the file holds, each a little older than the one before: the newest come first in lists and exports."""
    from art_patch.errors import MalformedFile
    from art_patch.formats import STREAM, bundles_of

    for number, (place, row) in enumerate(rows()):
        try:
            yield from bundles_of(row, expected=expected, at=now - number * _STEP_S)
        except MalformedFile as error:
            name = "stdin" if file == STREAM else file
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


def _write(store: Store, page: list[Bundle], now: float) -> Counter[str]:
    """Write what the store does not have yet: a page in one transaction, then groups."""
    here = store.transfers.bases()
    known = store.transfers.known([bundle.trajectory.id for bundle in page])
    new: dict[str, Bundle] = {}
    for bundle in page:
        if bundle.trajectory.id not in known and bundle.trajectory.id not in new:
            strangers = (name for name, base in bundle.bases.items() if here.get(name, base) != base)
            new[bundle.trajectory.id] = bundle.without_tokens_of(strangers)
    offers = sum(bundle.offers_replay for bundle in new.values())
    if new:
        store.write([record for bundle in new.values() for record in bundle.without_replay().records])
    # Also for those that were here: an import that was cut short may have come as far as the trajectories.
    store.transfers.add_groups({b.trajectory.id: b.group for b in page if b.group is not None}, now=now)
    return Counter(
        read=len(page),
        trajectories=len(new),
        calls=sum(len(bundle.trajectory.calls) for bundle in new.values()),
        scores=sum(len(bundle.trajectory.scores) for bundle in new.values()),
        already_there=len(page) - len(new),
        offers_dropped=offers,
    )


def _say(file: str, metrics: Counter[str], as_json: bool) -> None:
    from art_patch.cli.views.output import answer, stdout
    from art_patch.cli.views.safe_text import visible

    names = ("read", "trajectories", "calls", "scores", "already_there", "offers_dropped")
    if as_json:
        return answer({"path": file, **{name: metrics[name] for name in names}})
    if not metrics["read"]:
        return stdout().print(f"{visible(file)} is empty; nothing was imported", markup=False, soft_wrap=True)
    there = f"; {metrics['already_there']} were there already" if metrics["already_there"] else ""
    words = f"{metrics['trajectories']} trajectories with {metrics['calls']} calls imported{there}"
    if metrics["offers_dropped"]:
        words += f"; {metrics['offers_dropped']} of them named a function to run again, which was left out"
    return stdout().print(words, markup=False, soft_wrap=True)
