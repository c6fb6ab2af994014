"""Show runs, decisions and answers: `art-patch trajectories list` and `show`, `art-patch history`, `art-patch diff`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any, get_args

import typer

from art_patch import formats, insights, store, types
from art_patch._lib.words import MOST_IDS, one_of, the_one
from art_patch.cli import output
from art_patch.cli.options import Project, TrajectoryFilter, require_policy
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ConfigError
from art_patch.trajectories import number_tool_calls

WIDE = 110  # columns of a terminal that has room for everything
NARROW = 80  # below so many columns there is no room for user and session

_SHORTEST_ID = 12  # characters; an id begins with its time, so shorter beginnings are often alike


@dataclass(frozen=True, slots=True)
class Listing:
    """The options that say which page of the chosen trajectories is listed, and what they must say."""

    search: Annotated[
        list[str] | None, Option('Trajectories that say this: words of one call, begin* or a "phrase". Repeatable.')
    ] = None
    tool: Annotated[str | None, Option("Trajectories in which the model called this tool.")] = None
    limit: Annotated[int, Option("Number of trajectories.", also=("-n",), least=1)] = 20
    after: Annotated[str | None, Option("List trajectories older than the one with this id: the next page.")] = None
    sort: Annotated[str, Option("First: newest; reward, the lowest one; latency, that with the slowest call.")] = (
        "newest"
    )

    def wanted(self) -> insights.RunsWanted:
        """Return which page of which runs these options ask for."""
        by: store.Sort = self.sort  # pyright: ignore[reportAssignmentType] - the command has checked it
        return insights.RunsWanted(tuple(self.search or ()), self.tool, by, self.limit, self.after)


@command
def list_trajectories(wanted: TrajectoryFilter, listing: Listing, project: Project) -> None:
    """List recorded trajectories, newest or worst first.

    `--search` and `--tool` look in an index of words: of what users, tools and the model said, and of the names and
    arguments of the tools that it called, but not of system prompts. Case and accents do not matter. Server and job
    extend the index; this command does so for up to two seconds, and says what it lacks. If many calls say a word, the
    newest 5,000 of them are looked at; `--until` looks at older ones.
    """
    one_of("--sort", listing.sort, get_args(store.Sort))
    if listing.after is not None and listing.sort != "newest":
        raise ConfigError("--after goes on in the order of time; with --sort, show more with -n")
    chosen, asked = wanted.chosen(), listing.wanted()
    with project.opened() as (settings, opened):
        if asked.searches and settings.search == "off":
            raise ConfigError("the search is off; set ART_PATCH_SEARCH=on for this command, for serve and for retrain")
        require_policy(opened, chosen.policy)
        page = insights.runs_page(opened, chosen, asked)
        found, summaries = page.found, opened.browse.summaries(page.ids, openings=True)
        matching = opened.browse.count(chosen) if found is None else len(found.ids)
        held = opened.browse.count(store.Filter())
    shown = [asdict(one) | {"status": one.status, "duration_s": one.duration_s} for one in summaries]
    facts = {"trajectories": shown, "matching": matching, "held": held}
    if project.answered(facts | ({"search": {"lag": found.lag, "more": found.more}} if found is not None else {})):
        return
    if not summaries:
        none = f"none of {held} trajectories matches"
        if not held:
            none = "no trajectories are recorded yet; run your agent with art_patch.patch()"
        output.stdout().print("no more" if listing.after is not None and matching else none)
    else:
        _print_list(summaries, now=time.time(), slowest=listing.sort == "latency" or chosen.slower_than_s is not None)
    notes: list[str] = []
    if summaries and len(summaries) < matching:
        note = f"{len(summaries)} of {matching}"
        # The last id is shown whole: it is what the next command needs.
        whole = len(summaries) == listing.limit and listing.sort == "newest"
        notes.append(f"{note}; older ones: --after {summaries[-1].id}" if whole else note)
    if found is not None and found.more:
        notes.append("only the newest calls that say it were looked at; --until looks at older ones")
    if found is not None and found.lag:
        notes.append(_lag(found.lag))
    for number, note in enumerate(notes):
        output.say(f"{'' if number else chr(10)}{note}", style="dim")


def _lag(calls: int) -> str:
    number = f"{calls:,}" if calls <= store.MOST_COUNTED else f"more than {store.MOST_COUNTED:,}"
    lacks = f"the index lacks the newest {number} calls" if calls != 1 else "the index lacks the newest call"
    return f"{lacks}; the same search again, `art-patch serve` and `art-patch retrain` go on"


@command
def show(
    project: Project,
    trajectory: Annotated[
        str | None, typer.Argument(help="Id of the trajectory, or a beginning of it that no other id has.")
    ] = None,
    session: Annotated[
        str | None, Option("Show the runs of this session instead, in order: what its user saw.", metavar="ID")
    ] = None,
    full: Annotated[bool, Option("Print long texts completely.")] = False,
    raw: Annotated[bool, Option("Print messages as the recorded JSON.")] = False,
    tokens: Annotated[bool, Option("Print numbers of token ids, and log-probabilities.")] = False,
) -> None:
    """Show one run of the agent: its steps, messages and scores, and which policy or provider answered each call.

    With `--session`: what a user asked and was answered, from run to run, with the scores of each run. System prompts,
    results of tools, copies that the user never saw and all but the newest 200 runs are left out. `--json` prints a run
    in the format of `art-patch export --format trajectories`.
    """
    if (trajectory is None) == (session is None):
        raise ConfigError("name a trajectory by its id, or a session with --session; `trajectories list` has both")
    with project.opened() as (_, opened):
        if trajectory is not None:
            keys = [insights.the_run(opened, trajectory)]
        else:
            begin_so = opened.browse.sessions_like(session, limit=MOST_IDS) if session else []
            session = the_one(session or "", begin_so, "session", listed_by="art-patch trajectories list")
            keys = [key for _, key in opened.browse.ids(store.Filter(session=session))]
        matching = opened.browse.count(store.Filter(session=session)) if session is not None else 1
        bundles = _bundles(opened, keys)
        summaries = {one.id: one for one in opened.browse.summaries(keys)}
    lines = [formats.encode(bundle) for bundle in bundles]
    if project.answered(
        lines[0] if session is None else {"session": session, "matching": matching, "trajectories": lines}
    ):
        return
    from art_patch.cli.conversation import Page, print_session, print_trajectory

    page = Page(output.stdout(), full=full, raw=raw, tokens=tokens)
    if session is None:
        print_trajectory(page, bundles[0], summaries[keys[0]])
    else:
        print_session(page, session, bundles, summaries, matching=matching)


def _bundles(opened: store.Store, keys: Sequence[str]) -> list[formats.Bundle]:
    """Return these runs with all that belongs to them, in the order in which they began."""
    groups, corrections = opened.transfers.groups_of(keys), opened.evidence.corrections(keys)
    return [
        formats.Bundle(one, one.spans, groups.get(one.id), corrections=tuple(corrections.get(one.id, ())))
        for one in sorted(opened.read.trajectories(keys), key=lambda one: (one.info.started_at, one.id))
    ]


def _print_list(summaries: Sequence[store.Summary], *, now: float, slowest: bool) -> None:
    console = output.stdout()
    wide, narrow = console.width >= WIDE, console.width < NARROW
    length, by = _id_length([one.id for one in summaries]), "answered by" if wide else "by"
    rows: list[dict[str, output.Text]] = []
    for one in summaries:
        about = output.cell(one.name or "", "bold")
        if one.opening:
            about.append((" " if one.name else "") + output.one_line(one.opening), style="not bold")
        if one.status == "error":
            about = output.Text("failed ", style="red").append_text(about)
        row = {
            "id": output.cell(output.one_line(one.id)[:length]),
            "ago": output.Text(output.ago(now - (one.last_call_at or one.started_at))),
            "about": about,
            "user": output.cell(one.user_id or ""),
            "session": output.cell(one.session_id or ""),
            "task": output.cell(one.scenario_key or ""),
            "calls": output.Text(str(one.calls)),
            "tokens": output.Text(short_number(one.prompt_tokens + one.completion_tokens)),
            "took": output.Text(output.seconds(one.duration_s) if one.calls else ""),
            "slowest": output.Text(output.seconds(one.slowest_ms / 1_000) if one.calls else ""),
            by: output.Text("imported" if one.origin == "imported" else ", ".join(map(output.one_line, one.policies))),
            "reward": output.Text("" if one.reward is None else f"{one.reward:.2f}"),
        }
        rows.append(row)
    hidden = {name for name in ("user", "session", "task") if not any(row[name].plain for row in rows)}
    hidden |= set() if slowest else {"slowest"}
    if not wide:
        # Who it was matters more than how much it was; both do not fit.
        people = not narrow and not {"user", "session"} <= hidden
        hidden |= {"task", "took"} | ({"calls", "tokens"} if people else {"user", "session", "tokens"})
    rows = [{name: text for name, text in row.items() if name not in hidden} for row in rows]
    # So that one long name does not take the line from "about".
    longest = {"user": 20, "session": 20, "task": 20, by: 20} if wide else {"user": 12, "session": 10, by: 12}
    gap = 2 if wide else 1
    needed = {name: max(len(name), *(row[name].cell_len for row in rows)) for name in rows[0]}
    widths = {name: min(width, longest.get(name, console.width)) for name, width in needed.items()}
    # "about" gets what is left of the line. Without a width of its own rich would shrink the other columns, too.
    rest = console.width - (sum(widths.values()) - widths["about"]) - gap * (len(widths) - 1)
    # At least ten columns, even if the line becomes too long for a very narrow terminal.
    widths["about"] = min(widths["about"], max(rest, 10))
    table = output.Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for name, width in widths.items():
        right = name in ("ago", "calls", "tokens", "took", "slowest", "reward")
        table.add_column(name, no_wrap=True, overflow="ellipsis", width=width, justify="right" if right else "left")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def _id_length(ids: list[str]) -> int:
    """Return how many characters tell the ids of this page apart; ids of one moment begin alike."""
    longest = max(map(len, ids))
    return next((n for n in range(_SHORTEST_ID, longest) if len({key[:n] for key in ids}) == len(ids)), longest)


def short_number(value: int) -> str:
    """Return a number as a short text of about four characters: `812`, `4.1k`, `23k`, `1.2M`."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if value >= size:
            return f"{value / size:.1f}{unit}" if value < 10 * size else f"{value / size:.0f}{unit}"
    return str(value)


@command
def history(
    project: Project, limit: Annotated[int, Option("Number of decisions.", also=("-n",), least=1)] = 20
) -> None:
    """List each change of a policy's state, newest first: when, from which state to which, by whom, why.

    Entries of this history can be added, but never changed or deleted.
    """
    with project.opened() as (_, opened):
        moves = opened.ledger.history(limit=limit)
    if project.answered({"history": moves}):
        return
    if not moves:
        output.stdout().print("nothing was decided yet; start `art-patch serve --base MODEL`")
        return
    console, width = output.stdout(), max(len(move["policy"]) for move in moves)
    for move in moves:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(move["at"]))
        before, after = _state(move, "from_state", "percent_before"), _state(move, "to_state", "percent")
        console.print(output.Text(f"{when}  {move['policy']:{width}}  {before} -> {after}"))
        output.print_below(console, f"by {move['who']}: {move['reason']}")


def _state(move: types.JSON, which: str, share: str) -> str:
    """Return the state before or after a move; for a canary with its share of the sessions, if it is known."""
    state: str | None = move[which]
    percent = move["metrics"].get(share) if state == "canary" else None
    return f"{state or 'new'}" if percent is None else f"{state} {percent:g} %"


@command
def diff(
    a: Annotated[str, typer.Argument(help="NAME@STEP of a policy, or upstream.")],
    b: Annotated[str, typer.Argument(help="NAME@STEP of another policy, or upstream.")],
    project: Project,
    limit: Annotated[int, Option("Number of prompts.", also=("-n",), least=1)] = 10,
) -> None:
    """Show the answers of two policies to the same recorded prompts, side by side, newest first.

    Two answers are alike if they say the same and call the same tools with the same arguments.
    """
    with project.opened() as (_, opened):
        # Upstream is a party without a policy: its calls have none.
        names = [None if name == types.UPSTREAM_ARM else name for name in (a, b)]
        for name in names:
            require_policy(opened, name)
        count, pairs = opened.browse.answered_by_both(*names, limit=limit)
    shown = [
        {"messages": pair.a.messages, "a": _facts(pair.a), "b": _facts(pair.b), "alike": _are_alike(pair)}
        for pair in pairs
    ]
    if project.answered({"a": a, "b": b, "prompts": count, "pairs": shown}):
        return
    if pairs:
        return _print_pairs(a, b, count, pairs)
    output.say(
        f"no prompt is recorded that both {a} and {b} answered; "
        "`art-patch promote POLICY --shadow` asks a policy what the champion answers"
    )


def _are_alike(pair: store.Pair) -> bool:
    """Whether both answers mean the same: ids of tool calls are random, and white space in arguments says nothing."""
    one, other = ([_meant(message) for message in _answers(call)] for call in pair)
    return one == other


def _answers(call: types.Call) -> tuple[types.JSON, ...]:
    return number_tool_calls(choice.message for choice in call.choices)


def _meant(message: types.JSON) -> list[str]:
    """The message as text, and the arguments of each tool as the same text if they are the same JSON."""
    given: list[Any] = [*(message.get("tool_calls") or ()), {"function": message.get("function_call")}]
    functions = [call.get("function") or call.get("custom") for call in given if isinstance(call, dict)]
    tools = [each for each in functions if isinstance(each, dict)]
    said = insights.words_of({"content": message.get("content")}), str(message.get("refusal") or "")
    return [*said, *(f"{each.get('name')}({_same_text(each.get('arguments', each.get('input')))})" for each in tools)]


def _same_text(arguments: Any) -> str:
    with suppress(TypeError, ValueError, RecursionError):  # a model wrote it
        return json.dumps(json.loads(arguments), sort_keys=True)
    return str(arguments)


def _facts(call: types.Call) -> dict[str, Any]:
    return {
        "call": call.id,
        "trajectory": call.trajectory_id,
        "at": call.started_at,
        "answers": [choice.message for choice in call.choices],
        "completion_tokens": call.completion_tokens,
        "duration_ms": call.duration_ms,
        "shadow_of": call.shadow_of,
    }


def _print_pairs(a: str, b: str, count: int, pairs: Sequence[store.Pair]) -> None:
    console, same = output.stdout(), 0
    for pair in pairs:
        last = pair.a.messages[-1] if pair.a.messages else None
        asked = "" if last is None else f"{last.get('role', '?')}: {insights.words_of(last)}"
        answers = [output.visible("\n--\n".join(map(insights.words_of, _answers(call)))) for call in pair]
        same += _are_alike(pair)
        table = output.Table.grid(padding=(0, 2), expand=True)
        for _ in pair:
            table.add_column(ratio=1, overflow="fold")
        took = (f"{call.completion_tokens} tokens, {output.seconds(call.duration_ms / 1000)}" for call in pair)
        table.add_row(*(output.Text(f"{name}  {each}", style="dim") for name, each in zip((a, b), took, strict=True)))
        table.add_row(*(output.Text(text) for text in answers))
        console.print(output.Text(output.one_line(asked), style="bold", overflow="ellipsis", no_wrap=True))
        console.print(table)
        console.print()
    shown = f"the {len(pairs)} newest are above, {same} of them" if count > len(pairs) else f"{same} of these"
    output.say(f"{count} prompts were answered by both; {shown} alike", style="dim")
