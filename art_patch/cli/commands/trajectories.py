"""`art-patch trajectories list` and `art-patch trajectories show`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_patch.cli.options import filters
from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption

if TYPE_CHECKING:
    from rich.console import Console

    from art_patch.store import Summary

WIDE = 110
"""Columns of a terminal that has room for who and which task."""

NARROW = 80
"""Columns below which tokens are left out, and the heading is "by"; rich would cut the rewards off."""

_SHORTEST_ID = 12


def list_trajectories(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many.")] = 20,
    after: Annotated[
        str | None, typer.Option("--after", help="Those before this one: its id.", show_default=False)
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
    as_json: JsonOption = False,
) -> None:
    """What was recorded, newest first."""
    from art_patch.cli.views.output import answer, stdout
    from art_patch.store import Filter

    wanted = filters.make_filter(
        user=user, session=session, scenario=scenario, group=group, tag=tag, name=name, origin=origin, policy=policy,
        since=since, until=until, min_reward=min_reward, max_reward=max_reward, status=status, trainable=trainable,
    )  # fmt: skip
    with opened_store(project=project, home=home, store=store) as (_, opened):
        browse = opened.browse
        cursor = None
        if after is not None:
            (start,) = browse.summaries([the_one(opened, after)])
            cursor = (start.last_call_at, start.id)
        found = [key for _, key in browse.ids(wanted, after=cursor, limit=limit)]
        summaries = browse.summaries(found, openings=True)
        matching, held = browse.count(wanted), browse.count(Filter())
    if as_json:
        shown = [asdict(one) | {"status": one.status, "duration_s": one.duration_s} for one in summaries]
        answer({"trajectories": shown, "matching": matching, "held": held})
        return
    console = stdout()
    if not summaries:
        if after is not None and matching:
            console.print("no more")
        elif held:
            console.print(f"none of {held} trajectories matches")
        else:
            console.print("no trajectories are recorded yet; run your agent with art_patch.patch()")
        return
    _print_list(console, summaries, now=time.time())
    if len(summaries) < matching:
        note = f"\n{len(summaries)} of {matching}"
        note += f"; older ones: --after {summaries[-1].id}" if len(summaries) == limit else ""
        console.print(note, markup=False, soft_wrap=True, style="dim")


def show(
    trajectory: Annotated[str, typer.Argument(help="Its id, or as much of its beginning as makes it the only one.")],
    full: Annotated[bool, typer.Option("--full", help="Long texts to their end.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Messages as the JSON that was recorded.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Token ids and log-probabilities in metrics.")] = False,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """One run of the agent: its steps, what was said, who answered, how it was judged.

    `--json` is what export writes.
    """
    from art_patch.cli.views.conversation import print_trajectory
    from art_patch.cli.views.output import answer, stdout
    from art_patch.formats import Bundle, encode

    with opened_store(project=project, home=home, store=store) as (_, opened):
        key = the_one(opened, trajectory)
        (whole,) = opened.read.trajectories([key])
        spans, groups = opened.transfers.spans([key]), opened.transfers.groups_of([key])
        corrections = tuple(opened.corrections([key]).get(key, ()))
        bundle = Bundle(whole, spans.get(key, ()), groups.get(key), corrections=corrections)
        (summary,) = opened.browse.summaries([key])
    if as_json:
        answer(encode(bundle))
    else:
        print_trajectory(stdout(), bundle, summary, full=full, raw=raw, tokens=tokens)


def the_one(store: Any, prefix: str) -> str:
    """Return the id that begins so.

    Raises:
        ConfigError: if none or several do.
    """
    from art_patch.cli.views.safe_text import one_line
    from art_patch.errors import ConfigError

    limit = 6
    ids = store.browse.resolve(prefix, limit=limit) if prefix else []
    if len(ids) == 1:
        return ids[0]
    if not ids:
        raise ConfigError(
            f"no trajectory has an id that begins with {one_line(prefix)!r}; `art-patch trajectories list`"
        )
    several = ", ".join(map(one_line, ids[: limit - 1])) + (", ..." if len(ids) == limit else "")
    raise ConfigError(f"several ids begin with {one_line(prefix)!r}: {several}; say more of it")


def _print_list(console: Console, summaries: list[Summary], *, now: float) -> None:
    from rich.table import Table
    from rich.text import Text

    from art_patch.cli.views.output import ago, seconds
    from art_patch.cli.views.safe_text import one_line

    wide, narrow = console.width >= WIDE, console.width < NARROW
    length = _id_length([one.id for one in summaries])
    rows: list[list[Text]] = []
    for one in summaries:
        about = Text(one_line(one.name or ""), style="bold")
        if one.opening:
            about.append((" " if one.name else "") + one_line(one.opening), style="not bold")
        if one.status == "error":
            about = Text("failed ", style="red").append_text(about)
        by = "imported" if one.origin == "imported" else ", ".join(map(one_line, one.policies))
        who = (Text(one_line(one.user_id or "")), Text(one_line(one.scenario_key or ""))) if wide else ()
        tokens = () if narrow else (Text(short_number(one.prompt_tokens + one.completion_tokens)),)
        took = (Text(seconds(one.duration_s) if one.calls else ""),) if wide else ()
        rows.append(
            [
                Text(one_line(one.id)[:length]),
                Text(ago(now - (one.last_call_at or one.started_at))),
                about,
                *who,
                Text(str(one.calls)),
                *tokens,
                *took,
                Text(by),
                Text("" if one.reward is None else f"{one.reward:.2f}"),
            ]
        )
    by = "by" if narrow else "answered by"
    names = ["id", "ago", "about", *(("user", "task") if wide else ()), "calls", *(() if narrow else ("tokens",))]
    names += [*(("took",) if wide else ()), by, "reward"]
    longest = {"user": 20, "task": 20, by: 20 if wide else 12}
    gap = 2 if wide else 1
    widths = [
        min(max(len(name), *(row[index].cell_len for row in rows)), longest.get(name, console.width))
        for index, name in enumerate(names)
    ]
    place = names.index("about")
    # What is left of the line; rich would take it from the other columns, too.
    rest = console.width - sum(widths) + widths[place] - gap * (len(names) - 1)
    widths[place] = min(widths[place], max(rest, 10))
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for name, width in zip(names, widths, strict=True):
        right = name in ("ago", "calls", "tokens", "took", "reward")
        table.add_column(name, no_wrap=True, overflow="ellipsis", width=width, justify="right" if right else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _id_length(ids: list[str]) -> int:
    """How much of the ids tells those on this page apart; ids of one moment begin alike."""
    for length in range(_SHORTEST_ID, max(map(len, ids), default=0)):
        if len({key[:length] for key in ids}) == len(ids):
            return length
    return max(map(len, ids), default=0)


def short_number(value: int) -> str:
    """Return `812`, `4.1k`, `23k`, `1.2M`."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if value >= size:
            return f"{value / size:.1f}{unit}" if value < 10 * size else f"{value / size:.0f}{unit}"
    return str(value)


app = typer.Typer(name="trajectories", help="Look at what was recorded.", no_args_is_help=True, rich_markup_mode="rich")
