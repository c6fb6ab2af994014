"""`art-patch export`: trajectories to a file that other tools read."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_patch.cli.options import filters
from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i

if TYPE_CHECKING:
    from art_patch.rewards import Combination
    from art_patch.store import Filter, Store
    from art_patch.types import Trajectory

FORMATS = ("chat", "trajectories", "sft", "preference", "grpo")
_REMEMBERED_PROMPTS = 100_000


def export(
    file: Annotated[str, typer.Argument(help="Where to; `-` is stdout. A name that ends in .parquet makes Parquet.")],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="chat: OpenAI fine-tuning. sft, preference, grpo: TRL. trajectories: all of it, for import.",
        ),
    ] = "chat",
    parquet: Annotated[bool, typer.Option("--parquet", help="Parquet, whatever the name.")] = False,
    style: Annotated[
        str, typer.Option("--style", help="sft: `messages`, or `prompt` and completion, a row for each answer.")
    ] = "messages",
    pairs: Annotated[
        str, typer.Option("--pairs", help="preference: `best` against worst of each group, or `all` pairs.")
    ] = "best",
    margin: Annotated[
        float, typer.Option("--margin", min=0.0, help="preference: rewards must differ by more than this.")
    ] = 0.0,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="The newest so many trajectories.", show_default=False)
    ] = None,
    user: filters.UserOption = None,
    session: filters.SessionOption = None,
    scenario: filters.ScenarioOption = None,
    group: filters.GroupOption = None,
    tag: filters.TagOption = None,
    name: filters.NameOption = None,
    origin: filters.OriginOption = None,
    policy: filters.PolicyOption = None,
    since: filters.SinceOption = None,
    until: filters.UntilOption = None,
    min_reward: filters.MinRewardOption = None,
    max_reward: filters.MaxRewardOption = None,
    status: filters.StatusOption = None,
    trainable: filters.TrainableOption = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write trajectories to a file: JSON lines or Parquet, newest first.

    The file holds what users said. It can be read by you alone, and the store notes whose data it has, so that
    erasing a user can name it. Trajectories that give no row are counted with the reason. What people said an answer
    should have been (`art_patch.correct`) is the answer in chat and sft, and a pair of its own in preference.
    """
    from art_patch.cli.views.output import bars
    from art_patch.errors import ConfigError
    from art_patch.formats import STREAM, is_parquet, writing
    from art_patch.rewards import load_combination

    for option, value, known in (
        ("--format", format, FORMATS),
        ("--style", style, ("messages", "prompt")),
        ("--pairs", pairs, ("best", "all")),
    ):
        if value not in known:
            raise ConfigError(f"{option} {value!r} is not one of {', '.join(known)}")
    if format in ("preference", "grpo") and (min_reward is not None or max_reward is not None):
        raise ConfigError("a group is exported with all its rewards; choose pairs with --margin, not by reward")
    wanted = filters.make_filter(
        shadows=format == "trajectories", user=user, session=session, scenario=scenario, group=group, tag=tag,
        name=name, origin=origin, policy=policy, since=since, until=until, min_reward=min_reward,
        max_reward=max_reward, status=status, trainable=trainable,
    )  # fmt: skip
    with opened_store(project=project, home=home, store=store) as (settings, opened):
        combination = load_combination(settings.reward, criteria=settings.criteria)
        matching = opened.browse.count(wanted)
        as_parquet = is_parquet(file, parquet)
        options = _Options(format, style, pairs == "all", margin, as_parquet, combination)
        source = _Source(opened, wanted, limit, options)
        total = matching if limit is None else min(matching, limit)
        path = file if file == STREAM else str(Path(file).absolute())
        done = _Done(file, format)
        with bars(quiet=as_json) as progress:
            try:
                with (
                    opened.transfers.note_export(
                        path, format, who=who_am_i(who, "export"), filters=filters.chosen(wanted)
                    ) as note,
                    writing(path, source.columns, parquet=as_parquet, force=force) as write,
                ):
                    done.export = note.id
                    for page in source.pages() if matching else ():
                        note.add(key for _, members in page.rows for key in members)
                        for row, _ in page.rows:
                            write(row)
                        done.add(page)
                        progress("export", min(done.looked_at, total), total, f"{done.rows} rows")
                    done.trajectories = note.trajectories
                    if not done.rows:
                        raise _Nothing
            except _Nothing:
                done.export = None
        _say(done, matching=matching, held=opened.browse.count(type(wanted)()), as_json=as_json, beside=file == STREAM)


class _Nothing(Exception):
    """No row: no file is made, and none is noted."""


@dataclass(slots=True)
class _Page:
    """Rows with the trajectories that each holds something of."""

    looked_at: int
    rows: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list[tuple[dict[str, Any], list[str]]])
    skipped: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class _Done:
    path: str
    format: str
    rows: int = 0
    trajectories: int = 0
    looked_at: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    export: str | None = None

    def add(self, page: _Page) -> None:
        self.rows += len(page.rows)
        self.looked_at += page.looked_at
        self.skipped += page.skipped


@dataclass(frozen=True, slots=True)
class _Options:
    format: str
    style: str
    all_pairs: bool
    margin: float
    parquet: bool
    combination: Combination


class _Source:
    """Pages of rows from the store."""

    def __init__(self, store: Store, wanted: Filter, limit: int | None, options: _Options) -> None:
        from art_patch.formats import COLUMNS

        self._store = store
        self._filter = wanted
        self._limit = limit
        self._options = options
        self._prompts: OrderedDict[bytes, None] = OrderedDict()
        key = "sft-prompt" if options.format == "sft" and options.style == "prompt" else options.format
        self.columns = COLUMNS[key]
        self._bases: dict[str, str] = {}

    def pages(self) -> Iterator[_Page]:
        if self._options.format == "trajectories":
            self._bases = self._store.transfers.bases()
            yield from self._by_trajectory(self._complete)
        elif self._options.format in ("chat", "sft"):
            yield from self._by_trajectory(self._training)
        elif self._options.format == "preference":
            yield from self._by_group()
            yield from self._by_correction()
        else:
            yield from self._by_group()
            yield from self._by_trajectory(self._prompt)

    def _by_trajectory(self, rows_of: Callable[[Sequence[Trajectory], _Page], None]) -> Iterator[_Page]:
        for ids in self._ids():
            page = _Page(len(ids))
            rows_of(self._store.read.trajectories(ids), page)
            yield page

    def _by_correction(self) -> Iterator[_Page]:
        from art_patch.formats import Unusable, correction_row

        for ids in self._ids():
            corrections, page = self._store.corrections(ids), _Page(0)
            for trajectory in self._store.read.trajectories([key for key in ids if key in corrections]):
                try:
                    page.rows.append((correction_row(trajectory, corrections[trajectory.id]), [trajectory.id]))
                except Unusable as reason:
                    page.skipped[str(reason)] += 1
            yield page

    def _ids(self) -> Iterator[list[str]]:
        """Pages of matching trajectories."""
        from art_patch.store import PAGE, Cursor

        left = self._limit
        after: Cursor | None = None
        while left is None or left > 0:
            found = self._store.browse.ids(self._filter, after=after, limit=PAGE if left is None else min(PAGE, left))
            if not found:
                return
            after = found[-1]
            left = None if left is None else left - len(found)
            yield [key for _, key in found]

    def _complete(self, trajectories: Sequence[Trajectory], page: _Page) -> None:
        from art_patch.formats import Bundle, encode, indexed

        ids = [trajectory.id for trajectory in trajectories]
        spans, groups = self._store.transfers.spans(ids), self._store.transfers.groups_of(ids)
        corrections = self._store.corrections(ids)
        for trajectory in trajectories:
            policies = {call.policy for call in trajectory.calls if call.policy in self._bases}
            bases = {policy: self._bases[policy] for policy in sorted(filter(None, policies))}
            beside = tuple(corrections.get(trajectory.id, ()))
            bundle = Bundle(trajectory, spans.get(trajectory.id, ()), groups.get(trajectory.id), bases, beside)
            line = encode(bundle)
            page.rows.append((indexed(line) if self._options.parquet else line, [trajectory.id]))

    def _training(self, trajectories: Sequence[Trajectory], page: _Page) -> None:
        from art_patch.formats import Unusable, chat_row, corrected, sft_prompt_rows, sft_row

        corrections = self._store.corrections([trajectory.id for trajectory in trajectories])
        for recorded in trajectories:
            try:
                trajectory = corrected(recorded, corrections.get(recorded.id, ()))
                if self._options.format == "chat":
                    rows = [chat_row(trajectory)]
                elif self._options.style == "messages":
                    rows = [sft_row(trajectory)]
                else:
                    rows = sft_prompt_rows(trajectory)
            except Unusable as reason:
                page.skipped[str(reason)] += 1
            else:
                page.rows += [(row, [recorded.id]) for row in rows]

    def _prompt(self, trajectories: Sequence[Trajectory], page: _Page) -> None:
        """A prompt to sample from for what no group holds yet, each once."""
        from art_patch.formats import Unusable, grpo_row

        grouped = self._store.transfers.groups_of([trajectory.id for trajectory in trajectories])
        for trajectory in trajectories:
            if trajectory.id in grouped:
                continue
            try:
                row = grpo_row(trajectory)
            except Unusable as reason:
                page.skipped[str(reason)] += 1
                continue
            if self._is_new(row):
                page.rows.append((row, [trajectory.id]))
            else:
                page.skipped["its prompt is in the file already"] += 1

    def _is_new(self, row: dict[str, Any]) -> bool:
        from art_patch.formats import digest

        key = digest(row["prompt"], row.get("tools"))
        if key in self._prompts:
            return False
        # Bounded: a prompt that comes again much later is written again.
        self._prompts[key] = None
        if len(self._prompts) > _REMEMBERED_PROMPTS:
            self._prompts.popitem(last=False)
        return True

    def _by_group(self) -> Iterator[_Page]:
        from art_patch.formats import Unusable, grpo_row, preference_rows
        from art_patch.rewards import rewards_G
        from art_patch.types import Group

        pairs = self._options.format == "preference"
        for key, scenario, how, ids in self._groups():
            group = Group(key, scenario, how, self._store.read.trajectories(ids))
            rewards = rewards_G(group, combination=self._options.combination)
            page = _Page(len(ids) if pairs else 0)
            try:
                if pairs:
                    given = self._options
                    rows = list(preference_rows(group, rewards, all_pairs=given.all_pairs, margin=given.margin))
                else:
                    rows = [grpo_row(group.trajectories[0], group=group, rewards_G=rewards)]
                    self._is_new(rows[0])
            except Unusable as reason:
                page.skipped[str(reason)] += 1
            else:
                page.rows += [(row, list(ids)) for row in rows]
            yield page

    def _groups(self) -> Iterator[tuple[str, str, str, list[str]]]:
        from art_patch.store import PAGE

        after, given = "", count()
        while found := self._store.browse.groups(self._filter, after=after, limit=PAGE):
            after = found[-1][0]
            for group in found:
                if self._limit is not None and next(given) >= self._limit:
                    return
                yield group


def _say(done: _Done, *, matching: int, held: int, as_json: bool, beside: bool) -> None:
    """Tell what was written; on stderr if the rows went to stdout."""
    import json
    import sys

    from art_patch.cli.views.output import answer, stderr, stdout
    from art_patch.cli.views.safe_text import visible

    facts = {name: value for name, value in asdict(done).items() if name != "looked_at"}
    facts["skipped"] = dict(done.skipped.most_common())
    if as_json and not beside:
        return answer(facts)
    if as_json:
        sys.stderr.write(json.dumps(facts) + "\n")
        return None
    console = stderr() if beside else stdout()
    if not held and not matching:
        console.print("the store has no trajectories yet; run your agent with art_patch.patch() first")
    elif not matching:
        console.print(f"none of {held} trajectories matches; nothing was written")
    elif not done.rows:
        console.print("no row came of it; nothing was written")
    else:
        where = "stdout" if beside else visible(done.path)
        console.print(
            f"{done.rows} rows of {done.trajectories} trajectories in {where} ({done.format})",
            markup=False,
            soft_wrap=True,
        )
    for reason, number in done.skipped.most_common():
        console.print(f"  skipped {number}: {reason}", markup=False, soft_wrap=True)
    return None
