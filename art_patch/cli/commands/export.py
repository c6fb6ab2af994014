"""`art-patch export`: writes trajectories to a file that training tools or `art-patch import` can read."""

from __future__ import annotations

import json
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_patch import formats, rewards, store
from art_patch.cli import output
from art_patch.cli.options import ActingProject, TrajectoryFilter, conditions, one_of
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ConfigError
from art_patch.types import Group

if TYPE_CHECKING:
    from art_patch.types import Trajectory

FORMATS = ("chat", "trajectories", "sft", "preference", "grpo")
_REMEMBERED_PROMPTS = 100_000

_Rows = list[tuple[dict[str, Any], list[str]]]
"""Rows of the file, each with the ids of the trajectories that it holds text of."""


@dataclass(frozen=True, slots=True)
class Form:
    """The options that choose the format of the exported rows."""

    format: Annotated[
        str,
        Option(
            help="chat: for OpenAI fine-tuning. sft, preference, grpo: for TRL. trajectories: complete, for import."
        ),
    ] = "chat"
    parquet: Annotated[bool, Option(help="Write Parquet even if the file's name does not end in .parquet.")] = False
    style: Annotated[
        str, Option(help="For sft: `messages`, or `prompt` and completion, with a row for each answer.")
    ] = "messages"
    pairs: Annotated[str, Option(help="For preference: `best` against worst of each group, or `all` pairs.")] = "best"
    margin: Annotated[
        float, Option(least=0.0, help="For preference: leave out pairs whose rewards differ by this much or less.")
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
    force: Annotated[bool, Option(help="Replace the file if it exists.")] = False,
    limit: Annotated[
        int | None, Option(least=1, help="Largest number of trajectories to export; the newest are taken.")
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
        combination = rewards.load_combination(settings.reward, criteria=settings.criteria)
        matching = opened.browse.count(chosen)
        as_parquet = formats.is_parquet(file, form.parquet)
        source = _Source(opened, chosen, limit, form, as_parquet, combination)
        total = matching if limit is None else min(matching, limit)
        # Absolute, because `erase` names the file later from another directory.
        path = file if file == formats.STREAM else str(Path(file).absolute())
        done = _Done(file, form.format)
        with output.bars(quiet=project.as_json) as progress:
            try:
                with (
                    opened.transfers.note_export(
                        path, form.format, who=project.actor("export"), filters=conditions(chosen)
                    ) as note,
                    formats.writing(path, source.columns, parquet=as_parquet, force=force) as write,
                ):
                    done.export = note.id
                    for page in source.pages() if matching else ():
                        # Noted before the rows are written: a file that is cut short must not hold an unknown user.
                        note.add(key for _, members in page.rows for key in members)
                        for row, _ in page.rows:
                            write(row)
                        done.add(page)
                        progress("export", min(done.looked_at, total), total, f"{done.rows} rows")
                    done.trajectories = note.trajectories
                    if not done.rows:
                        raise _Nothing
            except _Nothing:
                # The note was withdrawn together with the file.
                done.export = None
        held = opened.browse.count(store.Filter())
    _say(done, matching=matching, held=held, as_json=project.as_json, beside=file == formats.STREAM)


class _Nothing(Exception):
    """No row was written. Raised so that both context managers undo their work: no file, and no note of one."""


@dataclass(slots=True)
class _Page:
    """Some rows, the number of trajectories that were looked at for them, and why others gave no row."""

    looked_at: int
    rows: _Rows = field(default_factory=_Rows)
    skipped: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class _Done:
    """The answer of the command, as far as the export has come."""

    path: str
    format: str
    rows: int = 0
    trajectories: int = 0
    looked_at: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    export: str | None = None

    def add(self, page: _Page) -> None:
        """Count a page that was written."""
        self.rows += len(page.rows)
        self.looked_at += page.looked_at
        self.skipped += page.skipped


@dataclass(slots=True)
class _Source:
    """Makes the rows of an export from the store, page by page, so that memory does not grow with the store."""

    opened: store.Store
    filter: store.Filter
    limit: int | None
    form: Form
    parquet: bool
    combination: rewards.Combination
    columns: Any = None
    bases: dict[str, str] = field(default_factory=dict[str, str])
    prompts: OrderedDict[bytes, None] = field(default_factory=OrderedDict[bytes, None])

    def __post_init__(self) -> None:
        """Look up the columns of the format."""
        prompts = self.form.format == "sft" and self.form.style == "prompt"
        self.columns = formats.COLUMNS["sft-prompt" if prompts else self.form.format]

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
            corrections, page = self.opened.corrections(ids), _Page(0)
            for trajectory in self.opened.read.trajectories([key for key in ids if key in corrections]):
                try:
                    row = formats.correction_row(trajectory, corrections[trajectory.id])
                    page.rows.append((row, [trajectory.id]))
                except formats.Unusable as reason:
                    page.skipped[str(reason)] += 1
            yield page

    def _ids(self) -> Iterator[list[str]]:
        """Yield the ids of matching trajectories in pages, up to the limit."""
        left = self.limit
        after: store.Cursor | None = None
        while left is None or left > 0:
            size = store.PAGE if left is None else min(store.PAGE, left)
            found = self.opened.browse.ids(self.filter, after=after, limit=size)
            if not found:
                return
            after = found[-1]
            left = None if left is None else left - len(found)
            yield [key for _, key in found]

    def _complete(self, trajectories: Sequence[Trajectory], page: _Page) -> None:
        ids = [trajectory.id for trajectory in trajectories]
        spans, groups = self.opened.transfers.spans(ids), self.opened.transfers.groups_of(ids)
        corrections = self.opened.corrections(ids)
        for trajectory in trajectories:
            policies = {call.policy for call in trajectory.calls if call.policy in self.bases}
            # With their bases, so that an import can tell whether token ids mean the same there.
            bases = {policy: self.bases[policy] for policy in sorted(filter(None, policies))}
            key = trajectory.id
            bundle = formats.Bundle(
                trajectory, spans.get(key, ()), groups.get(key), bases, tuple(corrections.get(key, ()))
            )
            line = formats.encode(bundle)
            page.rows.append((formats.indexed(line) if self.parquet else line, [key]))

    def _training(self, trajectories: Sequence[Trajectory], page: _Page) -> None:
        corrections = self.opened.corrections([trajectory.id for trajectory in trajectories])
        for recorded in trajectories:
            try:
                trajectory = formats.corrected(recorded, corrections.get(recorded.id, ()))
                if self.form.format == "chat":
                    rows = [formats.chat_row(trajectory)]
                elif self.form.style == "messages":
                    rows = [formats.sft_row(trajectory)]
                else:
                    rows = formats.sft_prompt_rows(trajectory)
            except formats.Unusable as reason:
                page.skipped[str(reason)] += 1
            else:
                page.rows += [(row, [recorded.id]) for row in rows]

    def _prompt(self, trajectories: Sequence[Trajectory], page: _Page) -> None:
        """Add a prompt to sample from for each trajectory without a group; equal prompts once."""
        grouped = self.opened.transfers.groups_of([trajectory.id for trajectory in trajectories])
        for trajectory in trajectories:
            if trajectory.id in grouped:
                continue
            try:
                row = formats.grpo_row(trajectory)
            except formats.Unusable as reason:
                page.skipped[str(reason)] += 1
                continue
            if self._is_new(row):
                page.rows.append((row, [trajectory.id]))
            else:
                page.skipped["its prompt is in the file already"] += 1

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
        for key, scenario, how, ids in self._groups():
            group = Group(key, scenario, how, self.opened.read.trajectories(ids))
            rewards_G = rewards.rewards_G(group, combination=self.combination)
            # In grpo the trajectories are looked at once more, by `_prompt`, and counted there.
            page = _Page(len(ids) if pairs else 0)
            try:
                if pairs:
                    all_pairs, margin = self.form.pairs == "all", self.form.margin
                    rows = list(formats.preference_rows(group, rewards_G, all_pairs=all_pairs, margin=margin))
                else:
                    rows = [formats.grpo_row(group.trajectories[0], group=group, rewards_G=rewards_G)]
                    self._is_new(rows[0])  # remembered: a lone run with the same prompt gets no row of its own
            except formats.Unusable as reason:
                page.skipped[str(reason)] += 1
            else:
                page.rows += [(row, list(ids)) for row in rows]
            yield page

    def _groups(self) -> Iterator[tuple[str, str, str, list[str]]]:
        after, given = "", count()
        # By the last id and not by number, so that new groups shift no page.
        while found := self.opened.browse.groups(self.filter, after=after, limit=store.PAGE):
            after = found[-1][0]
            for group in found:
                if self.limit is not None and next(given) >= self.limit:
                    return
                yield group


def _say(done: _Done, *, matching: int, held: int, as_json: bool, beside: bool) -> None:
    """Print the result; on stderr if the rows went to stdout (`beside`)."""
    facts = {each.name: getattr(done, each.name) for each in fields(done) if each.name != "looked_at"}
    facts["skipped"] = dict(done.skipped.most_common())
    if as_json and not beside:
        return output.answer(facts)
    if as_json:
        sys.stderr.write(json.dumps(facts) + "\n")
        return None
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
