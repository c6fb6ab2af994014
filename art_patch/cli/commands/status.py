"""`art-patch status` and `art-patch mode`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i

if TYPE_CHECKING:
    from art_patch.settings import Settings

APPS_SEEN_S = 3_600.0
"""How far back the reports of app processes are shown."""


def status(
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Text for Prometheus to scrape.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What is recorded, who serves, and what happened last."""
    from art_patch.cli.views.output import answer
    from art_patch.errors import ConfigError
    from art_patch.rewards import PEOPLE, disagreement
    from art_patch.store import without_password

    if prometheus and as_json:
        raise ConfigError("--prometheus and --json are two forms of one answer; leave one out")
    with opened_store(project=project, home=home, store=store) as (settings, opened):
        route, champion = opened.ledger.route(), opened.ledger.champion()
        differ = disagreement(opened.browse.opinions(PEOPLE))
        facts: dict[str, Any] = {
            "project": settings.project,
            "store": without_password(settings.store_url),
            "mode": route.mode or settings.mode,
            "canary_percent": settings.canary_percent if route.canary_percent is None else route.canary_percent,
            "champion": champion.name if champion else None,
            "challenger": {
                "policy": route.challenger,
                "state": route.challenger_state,
                "percent": route.challenger_percent,
                "since": route.challenger_since,
            }
            if route.challenger
            else None,
            "engine": _engine(settings, route.base_url, route.key_file),
            "recorded": opened.read.counts(),
            "disagreement": asdict(differ) | {"share": differ.share},
            "policies": [
                {"name": p.name, "state": p.state, "created_at": p.created_at, "parent": p.parent}
                for p in opened.ledger.policies()
            ],
            "history": opened.ledger.history(limit=10),
            "apps": [
                {"id": report.id, "at": report.at, **report.facts}
                for report in opened.read.apps(since=time.time() - APPS_SEEN_S)
            ],
        }
    if prometheus:
        from art_patch._lib.version import __version__
        from art_patch.trackers import exposition

        typer.echo(exposition(facts, version=__version__), nl=False)
    else:
        answer(facts) if as_json else _print(facts)


def mode(
    value: Annotated[str, typer.Argument(help="off, record, shadow, canary, route, or auto: each app's own setting.")],
    percent: Annotated[
        float | None,
        typer.Option("--percent", min=0, max=100, help="Of the sessions, in mode canary; 5 unless apps say otherwise."),
    ] = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Switch every running app of the project, without a redeploy."""
    from art_patch.cli.views.output import answer, stdout
    from art_patch.errors import ConfigError
    from art_patch.types import Mode

    modes = get_args(Mode)
    if value not in (*modes, "auto"):
        raise ConfigError(f"mode {value!r} is not one of {', '.join(modes)}, auto")
    if percent is not None and value != "canary":
        raise ConfigError("--percent goes with mode canary only")
    chosen = None if value == "auto" else cast(Mode, value)
    with opened_store(project=project, home=home, store=store) as (settings, opened):
        opened.ledger.set_mode(chosen, canary_percent=percent, who=who_am_i(who, "mode"))
        apps = len(opened.read.apps(since=time.time() - APPS_SEEN_S))
    if as_json:
        answer({"project": settings.project, "mode": value, "canary_percent": percent, "apps": apps})
    else:
        share = "" if percent is None else f" with {percent:g} % of the sessions"
        seen = f"{apps} app {'process' if apps == 1 else 'processes'} seen in the last hour"
        follow = f"running apps follow within {settings.poll_interval_s:g} s"
        stdout().print(f"mode of [b]{settings.project}[/]: {value}{share}; {follow}; {seen}", soft_wrap=True)


def _engine(settings: Settings, base_url: str | None, key_file: str | None) -> dict[str, Any]:
    if base_url is None:
        return {"base_url": None, "healthy": False, "models": []}
    from art_patch.errors import EngineError
    from art_patch.serving import EngineClient

    client = EngineClient.of_project(settings, base_url, key_file)
    try:
        return {"base_url": base_url, "healthy": client.health(), "models": list(client.models())}
    except EngineError as error:
        return {"base_url": base_url, "healthy": False, "models": [], "error": str(error)}


def _print(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from art_patch.cli.views.output import ago, stdout

    console, recorded, engine, now = stdout(), facts["recorded"], facts["engine"], time.time()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    last = f", last {ago(now - recorded['last_call_at'])} ago" if recorded["last_call_at"] else ""
    served = f"{recorded['calls_by_policy']} by our policies, {recorded['calls_fell_back']} fell back"
    groups = ", ".join(f"{count} {state}" for state, count in recorded["groups"].items()) or "none yet"
    health = "healthy" if engine["healthy"] else "[red]not reachable[/]: calls go upstream"
    if engine["healthy"] and facts["champion"] not in (None, *engine["models"]):
        health = f"[red]does not have {facts['champion']} loaded[/]: calls go upstream"
    rows = [
        ("project", facts["project"]),
        ("store", facts["store"]),
        (
            "mode",
            f"canary, {facts['canary_percent']:g} % of the sessions" if facts["mode"] == "canary" else facts["mode"],
        ),
        ("champion", f"[b]{facts['champion']}[/]" if facts["champion"] else "none: calls go upstream"),
        ("engine", f"{engine['base_url']} {health}" if engine["base_url"] else "none running; start `art-patch serve`"),
        ("calls", f"{recorded['calls']} ({served}, {recorded['calls_not_ok']} not ok{last})"),
        ("trainable", f"{recorded['calls_trainable']} calls"),
        ("trajectories", f"{recorded['trajectories']} in {recorded['scenarios']} grouped scenarios"),
        ("groups", groups),
    ]
    if (tested := facts["challenger"]) is not None:
        rows.insert(4, ("challenger", _tested(tested, now)))
    if recorded["calls_shadow"]:
        rows.append(("shadow", f"{recorded['calls_shadow']} calls asked in the background, beside the above"))
    if recorded["calls_resampled"]:
        rows.append(("re-sampled", f"{recorded['calls_resampled']} answers of our own beside the above"))
    if (judge := recorded["judge"])["calls"]:
        rows.append(("judge", _spent(judge)))
    if (differ := facts["disagreement"])["pairs"]:
        rows.append(("people", _differ(differ)))
    for name, value in rows:
        table.add_row(name, str(value))
    for reason, count in recorded["untrainable"].items():
        table.add_row("", f"[dim]{count} not trainable: {reason}[/]")
    console.print(table)
    _print_apps(facts["apps"], now)
    if facts["history"]:
        moves = Table(box=None, padding=(0, 2), header_style="dim")
        for column in ("when", "policy", "became", "by", "why"):
            moves.add_column(column, overflow="fold")
        for move in facts["history"]:
            moves.add_row(f"{ago(now - move['at'])} ago", move["policy"], move["to_state"], move["who"], move["reason"])
        console.print()
        console.print(moves)


def _tested(challenger: dict[str, Any], now: float) -> str:
    from art_patch.cli.views.output import ago

    share = "asked in the background" if challenger["percent"] is None else f"{challenger['percent']:g} % of sessions"
    return f"[b]{challenger['policy']}[/] {challenger['state']}, {share}, for {ago(now - challenger['since'])}"


def _spent(judge: dict[str, Any]) -> str:
    unpriced = f", and {judge['unpriced']} calls of unknown price" if judge["unpriced"] else ""
    tokens = judge["prompt_tokens"] + judge["completion_tokens"]
    return f"{judge['calls']} calls, {tokens:,} tokens, ${judge['cost_usd']:.2f}{unpriced}"


def _differ(metrics: dict[str, Any]) -> str:
    tied = f", sees no difference in {metrics['tied']}" if metrics["tied"] else ""
    return (
        f"the judge orders {metrics['against']} of {metrics['pairs']} sibling pairs ({metrics['share']:.0%}) "
        f"the other way round than they do{tied}"
    )


def _print_apps(apps: list[dict[str, Any]], now: float) -> None:
    from rich.table import Table

    from art_patch.cli.views.output import ago, stdout

    if not apps:
        return
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("app process")
    table.add_column("last seen")
    for column in ("mode", "recorded", "dropped", "fell back", "shadowed"):
        table.add_column(column, justify="right")
    table.add_column("sees", overflow="fold")
    notes: list[str] = []
    for app in apps:
        numbers = (app["mode"], *(str(app[key]) for key in ("recorded", "dropped", "fallbacks", "shadowed")))
        table.add_row(
            app["id"], f"{ago(now - app['at'])} ago", *numbers, ", ".join(app["instrumented"]) or "nothing yet"
        )
        notes += [
            f"{app['id']}: {count} calls went past the patch by {name}" for name, count in app["bypasses"].items()
        ]
        notes += [f"{app['id']}: {sentence}" for sentence in app["degraded"]]
    console = stdout()
    console.print()
    console.print(table)
    for note in notes:
        console.print(f"[yellow]{note}[/]")
