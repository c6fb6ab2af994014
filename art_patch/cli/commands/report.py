"""How well the champion does and what it costs: `art-patch report`, by day in `days`, and by task in `scenarios`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from art_patch import insights, promotion, store
from art_patch.cli import options, output
from art_patch.cli.commands.trajectories import short_number
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ConfigError

_DAY_S = 86_400.0
_COLOURS = {"switch": "green", "do not switch": "red", "not enough data": "yellow"}
_NAMES = {"reward": "by your rewards", "judged": "by the judge"}

Rows = list[list[str]]  # a header row and the rows below it. The first cell of each row is its name
_TIE = 1e-9


@command
def report(
    project: options.Project,
    cost: options.Prices,
    days: Annotated[float, Option("Number of days to look back.", least=0.01)] = 7.0,
    max_loss: Annotated[
        float,
        Option(
            "How much lower than upstream's the champion's mean score may be and still count as good.",
            least=0.0,
            also=("--margin",),
        ),
    ] = 0.05,
    markdown: Annotated[bool, Option("Print Markdown.")] = False,
) -> None:
    """Compare the champion with upstream: quality, failures, latency, money. The verdict may be "do not switch".

    Quality is measured by the scores from users, code and the judge. The money saved is upstream's price for the
    champion's answers, minus the cost of GPU, judge and updates. An unknown cost is reported as unknown, never counted
    as zero.

    Exit codes: 0 whatever the verdict; 2 an option has an impossible value; 19 there is no store.
    """
    if markdown and project.as_json:
        raise ConfigError("--markdown and --json are two forms; choose one")
    prices = cost.by_model()
    until = time.time()
    with project.opened() as (settings, opened):
        used = opened.reports.usage(since=until - days * _DAY_S, until=until)
        look = opened.ledger.control_look()
    made = insights.make_report(used, prices, gpu_usd_per_hour=cost.gpu_usd_per_hour, max_loss=max_loss)
    if look is not None:
        made = replace(made, reasons=(*made.reasons, f"the control group, {promotion.look_in_words(look)}"))
    facts = {"project": settings.project, "days": days, "control_look": look}
    if markdown:
        typer.echo(_as_markdown(made, settings.project), nl=False)
    elif not project.answered(facts | _as_facts(made)):
        _show(made, settings.project)


def _as_facts(report: insights.Report) -> dict[str, Any]:
    """Return the report as a dictionary for JSON, with computed sums and differences. Unknown numbers are `None`."""
    facts = asdict(report)
    facts["upstream_change"] = report.upstream_change and report.upstream_change._asdict()
    facts["money"] = report.money.as_facts()
    for told, comparison in zip(facts["comparisons"], report.comparisons, strict=True):
        told["difference"] = comparison.difference
    return facts


def _show(report: insights.Report, project: str) -> None:
    """Print the report on the console: the verdict, its reasons, the tables, and warnings."""
    console, colour = output.stdout(), _COLOURS[report.verdict]
    console.print(f"{project}, {_when(report)}", style="dim", markup=False)
    console.print(f"[b {colour}]{report.verdict}[/]")
    for reason in report.reasons:
        _bullet(console, reason)
    for rows in _tables(report):
        table = output.Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for index, head in enumerate(rows[0]):
            table.add_column(head, justify="right" if index else "left", overflow="fold")
        for row in rows[1:]:
            table.add_row(*map(output.Text, row))
        console.print()
        console.print(table)
    if notes := list(_notes(report)):
        console.print("\n[yellow]to keep in mind[/]")
        for note in notes:
            _bullet(console, note)


def _as_markdown(report: insights.Report, project: str) -> str:
    """Return the report as a Markdown text for the option `--markdown`."""
    lines = [f"# {project}: {report.verdict}", "", f"{_when(report).capitalize()}.", ""]
    lines += [f"- {_escaped(reason)}" for reason in report.reasons]
    for rows in _tables(report):
        head, *rest = ([_escaped(cell) for cell in row] for row in rows)
        lines += ["", f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rest]
    if notes := [f"- {_escaped(note)}" for note in _notes(report)]:
        lines += ["", "To keep in mind:", "", *notes]
    return "\n".join(lines) + "\n"


def _tables(report: insights.Report) -> Iterator[Rows]:
    sides = report.sides
    yield [
        ["", *(side.name for side in sides)],
        ["calls", *(f"{side.calls:,}" for side in sides)],
        ["share", *(output.share(side.share) for side in sides)],
        ["failed", *(output.share(side.failed) for side in sides)],
        ["latency p50", *(_ms(side.p50_ms) for side in sides)],
        ["latency p95", *(_ms(side.p95_ms) for side in sides)],
    ]
    yield _scores(report)
    yield _money(report)


def _scores(report: insights.Report) -> Rows:
    rows = [["quality", report.sides[0].name, "upstream", "difference", "95 % limits"]]
    for each in report.comparisons:
        counted = (each.ours_scored, each.theirs_scored)
        unit = "" if each.kind == "reward" else " groups"
        means = [
            "not scored" if mean is None else f"{mean:.3f} of {count:,}{unit}"
            for mean, count in zip((each.ours, each.theirs), counted, strict=True)
        ]
        difference = "" if each.difference is None else f"{each.difference:+.3f}"
        # With too few scores a difference is shown, but no confidence limits.
        limits = "too few" if each.difference is not None else ""
        if each.low is not None and each.high is not None:
            limits = f"{each.low:+.3f}..{each.high:+.3f}"
        rows.append([_NAMES[each.kind], *means, difference, limits])
    unscored = [f"{report.unscored[side]:,}" if side in report.unscored else "" for side in ("champion", "upstream")]
    return [*rows, ["unscored runs", *unscored, "", ""]]


def _money(report: insights.Report) -> Rows:
    money = report.money
    # One unknown part makes a sum unknown; it is never counted as zero.
    every = None if money.avoided_usd is None or money.upstream_usd is None else money.avoided_usd + money.upstream_usd
    # Costs stand with a minus: the last row is the sum of the column.
    costs = (("GPU", money.gpu_usd), ("judge", money.judge_usd), ("updates", money.training_usd))
    return [
        ["money", "as it was", "if ours had answered every call"],
        ["paid to upstream", output.usd(money.upstream_usd), output.usd(0.0)],
        ["not paid, for ours answered", output.usd(money.avoided_usd), output.usd(every)],
        *([name, *[output.usd(None if cost is None else -cost)] * 2] for name, cost in costs),
        ["saved in all", output.usd(money.saved_usd), output.usd(money.saved_if_all_usd)],
    ]


def _notes(report: insights.Report) -> Iterator[str]:
    yield from report.cautions
    if (change := report.upstream_change) is not None:
        runs = output.counted(report.outdated, "run", "runs")
        yield f"{output.changed(change)}; the comparison leaves out what upstream did before ({runs})"
    elif report.outdated:
        runs = output.counted(report.outdated, "run", "runs")
        yield f"the comparison leaves out {runs} of upstream's that began before its model changed"
    yield from report.money.notes
    if report.fallbacks:
        most = sorted(report.fallbacks.items(), key=lambda item: -item[1])
        reasons = ", ".join(f"{output.one_line(reason)} {count:,}" for reason, count in most[:10])
        yield f"calls that went upstream after all: {reasons}"
    if report.mixed:
        yield f"{report.mixed:,} runs were answered by several policies and count in no side's quality"


def _bullet(console: output.Console, text: str) -> None:
    # A grid, so that the second line of a long text is indented like its first.
    row = output.Table.grid(padding=(0, 1, 0, 0))
    row.add_column()
    row.add_column(overflow="fold")
    row.add_row("·", output.cell(text))
    console.print(row)


def _when(report: insights.Report) -> str:
    begin, end = (f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}" for at in (report.since, report.until))
    return f"from {begin} to {end}"


def _escaped(text: str) -> str:
    # Recorded reasons may hold a pipe, which would end the cell, or a tag, which a browser would obey.
    return output.one_line(text).replace("|", "\\|").replace("<", "&lt;")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"


# --- by day and by task ---


@command
def days(
    project: options.Project,
    number: Annotated[int, Option("Number of days, with today.", name="days", least=1, most=366)] = 14,
) -> None:
    """Show by day how well upstream and the policies answered, and what was spent; then what each promotion cost.

    A run counts on the day of its last call, for whoever answered all of it. The judge's cost is what the store has;
    calls without a price are named, not counted as free. What upstream costs depends on your contract, so its tokens
    are shown; `art-patch report` computes money. Days begin at midnight, local time.
    """
    today = datetime.fromtimestamp(time.time()).replace(hour=0, minute=0, second=0, microsecond=0)
    bounds = [(today + timedelta(days=day)).timestamp() for day in range(1 - number, 2)]
    with project.opened() as (settings, opened):
        found, promotions = opened.series.days(bounds), opened.series.promotions()
    names = [f"{datetime.fromtimestamp(each.since):%Y-%m-%d}" for each in found]
    shown = [{"day": name, **asdict(each)} for name, each in zip(names, found, strict=True)]
    facts = {"project": settings.project, "days": shown, "promotions": [asdict(each) for each in promotions]}
    if not project.answered(facts):
        _print_days(dict(zip(names, found, strict=True)), promotions)


def _print_days(found: dict[str, store.Day], promotions: Sequence[store.Promotion]) -> None:
    console, number = output.stdout(), ("runs", "reward", "fell back", "tokens", "judge")
    table = output.table("day", "by", *number, right=number, whole=("day",), padding=(0, 1, 0, 0))
    for name, day in found.items():
        lines = [each for each in day.answered if each.calls or each.runs]
        spent = short_number(day.prompt_tokens + day.completion_tokens), _usd(day.judge_usd, day.judge_unpriced)
        if not lines and not day.judge_calls:
            continue
        for place, each in enumerate(lines or [None]):
            # What is spent is the day's, so it stands on its first line only.
            of_day = (str(day.fell_back), *spent) if place == 0 else ("", "", "")
            reward = "" if each is None or each.reward is None else f"{each.reward:.2f}"
            by = "" if each is None else each.policy or "upstream"
            row = (name if place == 0 else "", by, "" if each is None else str(each.runs), reward, *of_day)
            table.add_row(*map(output.cell, row))
    if table.row_count:
        console.print(table)
        output.say("tokens: upstream's, as far as it said; judge: its cost", style="dim")
    else:
        console.print("nothing was recorded or judged in these days")
    for each in promotions:
        took = f"{output.counted(each.updates, 'update', 'updates')} of {output.seconds(each.update_s)}"
        untimed = f" ({each.updates_untimed} without a time)" if each.updates_untimed else ""
        at = f"{datetime.fromtimestamp(each.at):%Y-%m-%d %H:%M}"
        cost = f"judge {_usd(each.judge_usd, each.judge_unpriced)}"
        console.print(output.cell(f"{at} {each.policy} became champion: {took}{untimed}, {cost}"))


def _usd(usd: float, unpriced: int) -> str:
    if not unpriced:
        return f"${usd:.2f}"
    return f"${usd:.2f} + {unpriced} calls of unknown price" if usd else f"unknown price ({unpriced} calls)"


@command
def scenarios(
    project: options.Project, limit: Annotated[int, Option("Number of scenarios.", also=("-n",), least=1)] = 20
) -> None:
    """List the tasks with the most runs: mean reward, whether held out, and how the newest candidate did there.

    `won` and `lost` compare the mean reward of the runs that the candidate answered alone, as in a canary test, with
    those of the champion, or of upstream where it is the champion. The candidate is the newest policy that has answered
    apps. The gate's own answers are not kept by task, so they are not in it: `art-patch policies show NAME` has its
    result. A task without a name of yours is shown by what a user asked first in one of its runs.
    """
    with project.opened() as (settings, opened):
        held, found = opened.series.scenarios(limit=limit)
        openings = {one.id: one.opening for one in opened.browse.summaries([e.example for e in found], openings=True)}
        champion = opened.ledger.champion()
        theirs = champion.name if champion is not None else "upstream"
        newest, idle = _candidate(opened, theirs)
    shown = [
        asdict(each) | {"opening": openings.get(each.example), "outcome": _outcome(each, newest, theirs)}
        for each in found
    ]
    facts: dict[str, Any] = {"project": settings.project, "scenarios": shown, "held": held}
    if project.answered(facts | {"candidate": newest, "champion": theirs, "not_answering": idle}):
        return
    if not found:
        output.stdout().print("no run is in a group yet; `art-patch score` and `art-patch retrain` form groups")
        return
    numbers = ("runs", "reward", "candidate", "champion")
    whole = (*numbers, "outcome", "held out")
    table = output.table(*whole, "task", right=numbers, whole=whole, padding=(0, 2, 0, 0))
    # Cut here: a column that must not wrap would take its room from the numbers and their heads.
    console = output.stdout()
    room = max(16, console.width - sum(len(name) + 2 for name in (*whole, "")))
    for each in found:
        values = (each.reward, each.by_policy.get(newest or ""), each.by_policy.get(theirs))
        means = ("" if value is None else f"{value:.2f}" for value in values)
        row = (str(each.runs), *means, _outcome(each, newest, theirs) or "", "yes" if each.held_out else "")
        task = output.one_line(_task(each.key, openings.get(each.example)))
        table.add_row(*map(output.cell, (*row, task if len(task) <= room else f"{task[: room - 1]}…")))
    console.print(table)
    said = f"\n{len(found)} of {held}; candidate {newest or 'none yet'}, champion {theirs}"
    if idle:
        said += f"; newer and without an answer to apps: {', '.join(idle)}"
    output.say(said, style="dim")


def _candidate(opened: store.Store, champion: str) -> tuple[str | None, list[str]]:
    """Return the newest policy beside the champion that has answered apps, and the newer ones, which have not."""
    trained = [each for each in opened.ledger.policies() if each.path is not None and each.name != champion]
    idle: list[str] = []
    for each in sorted(trained, key=lambda each: each.created_at, reverse=True):
        if opened.reports.learned(each.name).answered:
            return each.name, idle
        idle.append(each.name)
    return None, idle


def _task(key: str, opening: str | None) -> str:
    """Return what tells a task from others: the key that the user gave it, else the beginning of its text."""
    return opening if opening and key.startswith("task:") else key[:200]


def _outcome(scenario: store.Scenario, candidate: str | None, champion: str) -> str | None:
    ours, theirs = scenario.by_policy.get(candidate or ""), scenario.by_policy.get(champion)
    if ours is None or theirs is None:
        return None
    return "tie" if abs(ours - theirs) <= _TIE else "won" if ours > theirs else "lost"
