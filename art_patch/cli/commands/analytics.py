"""`art-patch analytics`: what came of the runs, at a glance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from art_patch.cli.options import filters
from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption

if TYPE_CHECKING:
    from art_patch.insights import Analytics


def analytics(
    success_at: Annotated[float, typer.Option("--success-at", help="Reward from which on a run succeeded.")] = 0.5,
    user: filters.UserOption = None,
    session: filters.SessionOption = None,
    scenario: filters.ScenarioOption = None,
    tag: filters.TagOption = None,
    name: filters.NameOption = None,
    policy: filters.PolicyOption = None,
    since: filters.SinceOption = None,
    until: filters.UntilOption = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """How many runs succeeded, what they took, which tools they asked for, and how they failed.

    A run that failed did not succeed; one that neither failed nor was judged is in no rate.
    """
    from dataclasses import asdict

    from art_patch.cli.views.output import answer
    from art_patch.insights import analyse
    from art_patch.trackers import pages_of_episodes

    wanted = filters.make_filter(
        user=user, session=session, scenario=scenario, tag=tag, name=name, policy=policy, since=since, until=until
    )
    with opened_store(project=project, home=home, store=store) as (settings, opened):
        episodes = (episode for page in pages_of_episodes(opened, wanted) for episode in page)
        found = analyse(episodes, success_at=success_at)
    if as_json:
        answer({"project": settings.project, "success_at": success_at, **asdict(found)})
    else:
        _print(found)


def _print(found: Analytics) -> None:
    from rich.table import Table
    from rich.text import Text

    from art_patch.cli.views.output import stdout
    from art_patch.cli.views.safe_text import visible

    console = stdout()
    if not found.overall.runs:
        console.print("no run matches; `art-patch trajectories list` shows what there is")
        return
    outcomes = Table(box=None, padding=(0, 2), header_style="dim")
    outcomes.add_column("answered by")
    for column in ("runs", "failed", "judged", "success", "reward", "calls a run"):
        outcomes.add_column(column, justify="right")
    for name, one in {"all": found.overall, **found.by_policy}.items():
        rate = "unknown" if one.success_rate is None else f"{one.success_rate:.0%}"
        numbers = (one.runs, one.failed, one.judged, rate, _number(one.mean_reward), _number(one.mean_steps))
        outcomes.add_row(name, *map(str, numbers))
    console.print(outcomes)
    for title, rows in (
        ("tool", [(visible(one.name), one.times, one.runs, f"{one.share:.0%}") for one in found.actions]),
        ("error", [(visible(one.pattern), one.times, one.runs, visible(one.example)) for one in found.errors]),
    ):
        if rows:
            table = Table(box=None, padding=(0, 2), header_style="dim")
            table.add_column(title, overflow="fold")
            table.add_column("times", justify="right")
            table.add_column("runs", justify="right")
            table.add_column("share" if title == "tool" else "newest", justify="right")
            for text, *numbers in rows:
                table.add_row(Text(text), *map(str, numbers))
            console.print()
            console.print(table)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
