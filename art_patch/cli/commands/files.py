"""`art-patch export` and `import`: trajectories to and from a file, in formats of art_patch and of other tools."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from art_patch import formats, rewards, store
from art_patch._lib.words import one_of
from art_patch.cli import output
from art_patch.cli.options import ActingProject, TrajectoryFilter, conditions, require_policy
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ConfigError, MalformedFile
from art_patch.types import Group, Trajectory

FORMATS = ("chat", "trajectories", "sft", "preference", "grpo")
_REMEMBERED_PROMPTS = 100_000
_BATCH = 200  # trajectories in a transaction
_STEP_S = 1e-6  # between two rows; a float holds today's time to a quarter of this


@dataclass(frozen=True, slots=True)
class Form:
    """The options that choose the format of the exported rows."""

    format: Annotated[
        str, Option("chat: for OpenAI fine-tuning. sft, preference, grpo: for TRL. trajectories: complete, for import.")
    ] = "chat"
    parquet: Annotated[bool, Option("Write Parquet even if the file's name does not end in .parquet.")] = False
    style: Annotated[str, Option("For sft: `messages`, or `prompt` and completion: one row per answer.")] = "messages"
    pairs: Annotated[str, Option("For preference: `best` against worst of each group, or `all` pairs.")] = "best"
    margin: Annotated[
        float, Option("For preference: leave out pairs whose rewards differ by this much or less.", least=0.0)
    ] = 0.0

    def check(self, wanted: TrajectoryFilter) -> None:
        """Raise `ConfigError` if an option has an unknown value, or if the filter cannot be used with the format."""
        one_of("--format", self.format, FORMATS)
        one_of("--style", self.style, ("messages", "prompt"))
        one_of("--pairs", self.pairs, ("best", "all"))
        if self.format in ("preference", "grpo") and (wanted.min_reward, wanted.max_reward) != (None, None):
            raise ConfigError("a group is exported with all its rewards; choose pairs with --margin, not by reward")


@command
def export(
    file: Annotated[
        str, typer.Argument(help="File to write; `-` is stdout. A name that ends in .parquet makes Parquet.")
    ],
    form: Form,
    wanted: TrajectoryFilter,
    project: ActingProject,
    force: Annotated[bool, Option("Replace the file if it exists.")] = False,
    limit: Annotated[
        int | None, Option("Largest number of trajectories to export; the newest are taken.", least=1)
    ] = None,
) -> None:
    """Write trajectories to a file of JSON lines or Parquet, newest first.

    The file holds users' text. Only you can read it, and the store notes whose data it holds, so that `art-patch erase`
    can list the file; it does not delete it. Trajectories from which no row can be made are counted, with the reason. A
    correction (`art_patch.correct`) replaces the model's answer in the formats chat and sft. In the format preference,
    correction and answer become a pair.
    """
    form.check(wanted)
    chosen = wanted.chosen(shadows=form.format == "trajectories")
    with project.opened() as (settings, opened):
        require_policy(opened, chosen.policy)
        combination = rewards.load_combination(settings.reward, criteria=settings.criteria)
        matching = opened.browse.count(chosen)
        as_parquet = form.parquet or file.endswith(".parquet")
        source = _Source(opened, chosen, limit, form, as_parquet, combination)
        columns = formats.COLUMNS["sft-prompt" if (form.format, form.style) == ("sft", "prompt") else form.format]
        total = matching if limit is None else min(matching, limit)
        # Absolute, because `erase` names the file later from another directory.
        path = file if file == formats.STREAM else str(Path(file).absolute())
        done, looked_at = _Done(file, form.format), 0
        with output.bars(quiet=project.as_json) as progress:
            try:
                who, filters = project.actor("export"), conditions(chosen)
                with (
                    opened.transfers.note_export(path, form.format, who=who, filters=filters) as note,
                    formats.writing(path, columns, parquet=as_parquet, force=force) as write,
                ):
                    done.export = note.id
                    for page in source.pages() if matching else ():
                        # Noted before the rows are written: a file that is cut short must not hold an unknown user.
                        note.add(key for _, members in page.rows for key in members)
                        for row, _ in page.rows:
                            write(row)
                        done.rows += len(page.rows)
                        done.skipped += page.skipped
                        looked_at += page.looked_at
                        progress("export", min(looked_at, total), total, f"{done.rows} rows")
                    done.trajectories = note.trajectories
                    if not done.rows:
                        raise _Nothing
            except _Nothing:
                # The note was withdrawn together with the file.
                done.export = None
        held = opened.browse.count(store.Filter())
    _say_export(done, matching=matching, held=held, as_json=project.as_json, beside=file == formats.STREAM)


class _Nothing(Exception):
    """No row was written. Raised so that both context managers undo their work: no file, and no note of one."""


@dataclass(slots=True)
class _Page:
    """Rows, each with ids of the trajectories whose text it holds; how many were looked at; why others gave none."""

    looked_at: int
    rows: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list[tuple[dict[str, Any], list[str]]])
    skipped: Counter[str] = field(default_factory=Counter[str])

    @contextmanager
    def skipping(self) -> Generator[None]:
        """Count the reason if no row can be made in this block."""
        try:
            yield
        except formats.Unusable as reason:
            self.skipped[str(reason)] += 1


@dataclass(slots=True)
class _Done:
    """The answer of the command, as far as the export has come."""

    path: str
    format: str
    rows: int = 0
    trajectories: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    export: str | None = None


@dataclass(slots=True)
class _Source:
    """Makes the rows of an export from the store, page by page, so that memory does not grow with the store."""

    opened: store.Store
    filter: store.Filter
    limit: int | None
    form: Form
    parquet: bool
    combination: rewards.Combination
    bases: dict[str, str] = field(default_factory=dict[str, str])
    prompts: OrderedDict[bytes, None] = field(default_factory=OrderedDict[bytes, None])

    def pages(self) -> Iterator[_Page]:
        """Yield all pages; in preference and grpo first those of groups, then those of single trajectories."""
        if self.form.format == "trajectories":
            self.bases = self.opened.transfers.bases()
            yield from self._by_trajectory(self._complete)
        elif self.form.format in ("chat", "sft"):
            yield from self._by_trajectory(self._training)
        elif self.form.format == "preference":
            yield from self._by_group()
            yield from self._by_correction()
        else:
            yield from self._by_group()
            yield from self._by_trajectory(self._prompt)

    def _by_trajectory(self, add_rows: Callable[[Sequence[Trajectory], _Page], None]) -> Iterator[_Page]:
        for ids in self._ids():
            page = _Page(len(ids))
            add_rows(self.opened.read.trajectories(ids), page)
            yield page

    def _by_correction(self) -> Iterator[_Page]:
        for ids in self._ids():
            corrections, page = self.opened.evidence.corrections(ids), _Page(0)
            corrected = self._may_teach([key for key in ids if key in corrections], _Page(0))  # counted with its group
            for trajectory in self.opened.read.trajectories(corrected):
                with page.skipping():
                    row = formats.correction_row(trajectory, corrections[trajectory.id])
                    page.rows.append((row, [trajectory.id]))
            yield page

    def _ids(self) -> Iterator[list[str]]:
        left, after = math.inf if self.limit is None else self.limit, None
        while found := self.opened.browse.ids(self.filter, after=after, limit=int(min(store.PAGE, left))):
            after, left = found[-1], left - len(found)
            yield [key for _, key in found]

    def _complete(self, trajectories: Sequence[Trajectory], page: _Page) -> None:
        ids = [trajectory.id for trajectory in trajectories]
        groups = self.opened.transfers.groups_of(ids)
        corrections = self.opened.evidence.corrections(ids)
        for trajectory in trajectories:
            key, policies = trajectory.id, {call.policy for call in trajectory.calls}
            # With their bases, so that an import can tell whether token ids mean the same there.
            bases = {policy: base for policy, base in sorted(self.bases.items()) if policy in policies}
            fixes = tuple(corrections.get(key, ()))
            line = formats.encode(formats.Bundle(trajectory, trajectory.spans, groups.get(key), bases, fixes))
            page.rows.append((formats.indexed(line) if self.parquet else line, [key]))

    def _training(self, trajectories: Sequence[Trajectory], page: _Page) -> None:
        ids = self._may_teach([trajectory.id for trajectory in trajectories], page)
        corrections = self.opened.evidence.corrections(ids)
        for recorded in (trajectory for trajectory in trajectories if trajectory.id in ids):
            with page.skipping():
                trajectory = formats.corrected(recorded, corrections.get(recorded.id, ()))
                if self.form.format == "chat":
                    rows = [formats.chat_row(trajectory)]
                elif self.form.style == "messages":
                    rows = [formats.sft_row(trajectory)]
                else:
                    rows = formats.sft_prompt_rows(trajectory)
                page.rows += [(row, [recorded.id]) for row in rows]

    def _prompt(self, trajectories: Sequence[Trajectory], page: _Page) -> None:
        """Add a prompt to sample from for each trajectory without a group; equal prompts once."""
        grouped = self.opened.transfers.groups_of([trajectory.id for trajectory in trajectories])
        ids = self._may_teach([trajectory.id for trajectory in trajectories if trajectory.id not in grouped], page)
        for trajectory in trajectories:
            if trajectory.id not in ids:
                continue
            with page.skipping():
                row = formats.grpo_row(trajectory)
                if not self._is_new(row):
                    raise formats.Unusable("its prompt is in the file already")
                page.rows.append((row, [trajectory.id]))

    def _is_new(self, row: dict[str, Any]) -> bool:
        # Clients may write the keys of equal prompts in another order.
        text = json.dumps([row["prompt"], row.get("tools")], sort_keys=True)
        key = blake2b(text.encode(), digest_size=16).digest()
        if key in self.prompts:
            return False
        # Bounded, so that memory does not grow: a prompt that comes again much later is written again.
        self.prompts[key] = None
        if len(self.prompts) > _REMEMBERED_PROMPTS:
            self.prompts.popitem(last=False)
        return True

    def _by_group(self) -> Iterator[_Page]:
        pairs = self.form.format == "preference"
        for key, scenario, how, ids in islice(self._groups(), self.limit):
            page = _Page(len(ids) if pairs else 0)  # in grpo `_prompt` looks at them once more, and counts them
            if not (ids := self._may_teach(ids, page)):
                yield page
                continue
            group = Group(key, scenario, how, self.opened.read.trajectories(ids))
            rewards_G = rewards.rewards_G(group, combination=self.combination)
            with page.skipping():
                if pairs:
                    all_pairs, margin = self.form.pairs == "all", self.form.margin
                    rows = list(formats.preference_rows(group, rewards_G, all_pairs=all_pairs, margin=margin))
                else:
                    rows = [formats.grpo_row(group.trajectories[0], group=group, rewards_G=rewards_G)]
                    self._is_new(rows[0])  # remembered: a lone run with the same prompt gets no row of its own
                page.rows += [(row, list(ids)) for row in rows]
            yield page

    def _may_teach(self, ids: Sequence[str], page: _Page) -> list[str]:
        """Return those of the trajectories that may be learned from; count the others, which no training file holds."""
        allowed = self.opened.consent.learned_from(ids)
        page.skipped += Counter({"it may not be learned from": len(ids) - len(allowed)})  # adds nothing where that is 0
        return [key for key in ids if key in allowed]

    def _groups(self) -> Iterator[tuple[str, str, str, list[str]]]:
        after = ""
        # By the last id and not by number, so that new groups shift no page.
        while found := self.opened.browse.groups(self.filter, after=after, limit=store.PAGE):
            after = found[-1][0]
            yield from found


def _say_export(done: _Done, *, matching: int, held: int, as_json: bool, beside: bool) -> None:
    """Print the result; on stderr if the rows went to stdout (`beside`)."""
    if as_json:
        facts = asdict(done) | {"skipped": dict(done.skipped.most_common())}
        return output.answer(facts, sys.stderr if beside else None)
    console = output.stderr() if beside else output.stdout()
    if not held and not matching:
        console.print("the store has no trajectories yet; run your agent with art_patch.patch() first")
    elif not matching:
        console.print(f"none of {held} trajectories matches; nothing was written")
    elif not done.rows:
        console.print("no row came of it; nothing was written")
    else:
        where = "stdout" if beside else output.visible(done.path)
        words = f"{done.rows} rows of {done.trajectories} trajectories in {where} ({done.format})"
        console.print(words, markup=False, soft_wrap=True)
    for reason, number in done.skipped.most_common():
        console.print(f"  skipped {number}: {reason}", markup=False, soft_wrap=True)
    return None


# --- import ---


@command
def import_file(
    file: Annotated[str, typer.Argument(help="File of JSON lines or Parquet; `-` is stdin.")],
    project: ActingProject,
    format: Annotated[
        str,
        Option(
            "chat: OpenAI fine-tuning, ShareGPT. preference: any of theirs. sft, grpo: TRL. trajectories: art_patch's. "
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
    expected: formats.ImportFormat = format  # pyright: ignore[reportAssignmentType] - checked in the line above
    settings = project.settings()
    now = time.time()
    with formats.reading(file) as rows, output.bars(quiet=project.as_json) as progress:
        total = 0
        # The file is read twice: once to check it, once to write. So a wrong last line leaves the store as it was.
        for total, _ in enumerate(_bundles(rows, file, expected, now), 1):
            if total % _BATCH == 0:
                # The total is not known yet, so the bar stays just short of full.
                progress("check", total, total + 1)
        metrics: Counter[str] = Counter()
        # An empty file must not make a store.
        if total:
            with closing(store.open_store(settings.store_url, project=settings.project)) as opened:
                bundles = _bundles(rows, file, expected, now)
                while page := list(islice(bundles, _BATCH)):
                    metrics += _write(opened, page, now)
                    progress("import", metrics["read"], total)
                opened.transfers.note_import(file, who=project.actor("import"), metrics=dict(metrics), now=now)
    _say_import(file, metrics, project)


def _bundles(
    rows: Callable[[], Iterator[tuple[str, Mapping[str, Any]]]], file: str, expected: formats.ImportFormat, now: float
) -> Iterator[formats.Bundle]:
    for number, (place, row) in enumerate(rows()):
        try:
            # Each row is a little older than the one before, because lists and exports show the newest first.
            yield from formats.bundles_of(row, expected=expected, at=now - number * _STEP_S)
        except MalformedFile as error:
            name = "stdin" if file == formats.STREAM else file
            raise MalformedFile(f"{name}, {place}: {error}; nothing was imported") from None


def _write(opened: store.Store, page: list[formats.Bundle], now: float) -> Counter[str]:
    """Write the trajectories that the store does not have, in one transaction, then their groups; return the counts."""
    here = opened.transfers.bases()
    known = opened.read.known([bundle.trajectory.id for bundle in page])
    new: dict[str, formats.Bundle] = {}
    for bundle in page:
        if (key := bundle.trajectory.id) not in known and key not in new:
            # A policy of this name has another base here, so its token ids would mean other texts.
            # `here.get(name, base)`: a policy that this store does not know is no contradiction.
            strangers = (name for name, base in bundle.bases.items() if here.get(name, base) != base)
            new[key] = bundle.without_tokens_of(strangers)
    if new:
        records = [record for bundle in new.values() for record in bundle.without_replay().records]
        opened.write(records, restores=True)
    # Also for those that were here: an import that was cut short may have come as far as the trajectories.
    opened.transfers.add_groups({b.trajectory.id: b.group for b in page if b.group is not None}, now=now)
    return Counter(
        read=len(page),
        trajectories=len(new),
        calls=sum(len(bundle.trajectory.calls) for bundle in new.values()),
        scores=sum(len(bundle.trajectory.scores) for bundle in new.values()),
        already_there=len(page) - len(new),
        offers_dropped=sum(bundle.offers_replay for bundle in new.values()),
    )


def _say_import(file: str, metrics: Counter[str], project: ActingProject) -> None:
    names = ("read", "trajectories", "calls", "scores", "already_there", "offers_dropped")
    if project.answered({"path": file, **{name: metrics[name] for name in names}}):
        return None
    if not metrics["read"]:
        return output.say(f"{output.visible(file)} is empty; nothing was imported")
    there = f"; {metrics['already_there']} were there already" if metrics["already_there"] else ""
    words = f"{metrics['trajectories']} trajectories with {metrics['calls']} calls imported{there}"
    if metrics["offers_dropped"]:
        words += f"; {metrics['offers_dropped']} of them named a function to run again, which was left out"
    return output.say(words)
