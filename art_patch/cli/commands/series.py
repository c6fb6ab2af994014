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

    `won` and `lost` compare the mean reward of the runs that the newest candidate answered alone, as in a canary test,
    with those of the champion, or of upstream where it is the champion. The gate's own answers are not kept by task, so
    they are not in it: `art-patch policies show NAME` has its result.
    """
    with project.opened() as (settings, opened):
        held, found = opened.series.scenarios(limit=limit)
        champion = opened.ledger.champion()
        theirs = champion.name if champion is not None else "upstream"
        trained = [each for each in opened.ledger.policies() if each.path is not None and each.name != theirs]
        newest = max(trained, key=lambda each: each.created_at).name if trained else None
    shown = [asdict(each) | {"outcome": _outcome(each, newest, theirs)} for each in found]
    facts: dict[str, Any] = {"project": settings.project, "scenarios": shown, "held": held}
    if project.answered(facts | {"candidate": newest, "champion": theirs}):
        return
    if not found:
        output.stdout().print("no run is in a group yet; `art-patch score` and `art-patch retrain` form groups")
        return
    numbers = ("runs", "reward", "candidate", "champion")
    table = output.table("scenario", *numbers, "outcome", "held out", right=numbers, padding=(0, 1, 0, 0))
    for each in found:
        values = (each.reward, each.by_policy.get(newest or ""), each.by_policy.get(theirs))
        means = ("" if value is None else f"{value:.2f}" for value in values)
        row = (each.key[:200], str(each.runs), *means, _outcome(each, newest, theirs) or "")
        table.add_row(*map(output.cell, (*row, "yes" if each.held_out else "")))
    table.columns[0].no_wrap, table.columns[0].overflow = True, "ellipsis"
    output.stdout().print(table)
    output.say(f"\n{len(found)} of {held}; candidate {newest or 'none yet'}, champion {theirs}", style="dim")


def _outcome(scenario: store.Scenario, candidate: str | None, champion: str) -> str | None:
    ours, theirs = scenario.by_policy.get(candidate or ""), scenario.by_policy.get(champion)
    if ours is None or theirs is None:
        return None
    return "tie" if abs(ours - theirs) <= _TIE else "won" if ours > theirs else "lost"
