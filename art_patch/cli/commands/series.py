"""`art-patch days` and `art-patch scenarios`: quality and cost by day and by promotion, and rewards by task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated, Any

from art_patch import store
from art_patch.cli import output
from art_patch.cli.commands.trajectories import short_number
from art_patch.cli.options import Project
from art_patch.cli.typed_options import Option, command

_TIE = 1e-9


@command
def days(
    project: Project, number: Annotated[int, Option("Number of days, with today.", name="days", least=1, most=366)] = 14
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
    project: Project, limit: Annotated[int, Option("Number of scenarios.", also=("-n",), least=1)] = 20
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
