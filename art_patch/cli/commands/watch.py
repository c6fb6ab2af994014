"""`art-patch watch`: looking after the policy that is tested; and what `art-patch serve` looks after beside serving."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated

import typer

from art_patch.cli.options.opening import open_existing
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i

if TYPE_CHECKING:
    from art_patch.pipeline import WatchReport
    from art_patch.promotion import CanaryConfig
    from art_patch.serving import EngineClient
    from art_patch.settings import Settings
    from art_patch.store import Store
    from art_patch.types import Route


def watch(
    once: Annotated[bool, typer.Option("--once", help="One look, not until the test is over.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 5.0,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look after the policy that is tested beside the champion, until it is promoted or rejected.

    A running `art-patch serve` does the same. Exit codes: 0 promoted, still tested, or nothing is; 4 rejected. With
    `--json` each look is a line.
    """
    from art_patch.errors import GateRejected
    from art_patch.pipeline import watch as stage
    from art_patch.serving import EngineClient
    from art_patch.settings import load_settings

    settings = load_settings(project=project, home=home, store=store)
    opened = open_existing(settings)
    engine = EngineClient.of_route(settings, opened.ledger.route())
    config, me, stop = canary_config(settings), who_am_i(who, "watch"), Event()
    seen: list[WatchReport] = []

    def on_report(report: WatchReport) -> None:
        if report.outcome == "nothing to watch" and (tested := seen[-1].challenger if seen else report.challenger):
            report = _ended(opened, tested)  # somebody else, `art-patch serve` say, has decided
        is_over = once or report.outcome != "goes on"
        _say(report, as_json=as_json, whole=is_over or not seen, news=not seen or report.reason != seen[-1].reason)
        seen.append(report)
        if is_over:
            stop.set()

    if once:
        from art_patch.pipeline import watch_once

        on_report(watch_once(opened, engine, config, who=me))
    else:
        stage(opened, engine, config, who=me, stop=stop, every_s=every, on_report=on_report)
    opened.close()
    if seen[-1].outcome == "rejected":
        raise typer.Exit(GateRejected.exit_code)


def canary_config(settings: Settings) -> CanaryConfig:
    """Return when a challenger is given up and when it has won, as the project's settings say."""
    from art_patch.promotion import CanaryConfig

    return CanaryConfig(
        min_sessions=settings.canary_sessions,
        max_hours=settings.canary_hours,
        margin=settings.canary_margin,
        latency_ratio=settings.canary_latency_ratio,
    )


def watch_beside(
    settings: Settings, engine: EngineClient, address: str, key_file: Callable[[], str | None], *, who: str, stop: Event
) -> list[Thread]:
    """Look after challengers, who must serve, and the route, in threads until `stop` is set; beside a server of ours.

    Args:
        settings: the project's.
        engine: a client of the server.
        address: where apps reach it.
        key_file: puts the server's key where apps find it, and says where.
        who: for the ledger.
        stop: ends them.
    """
    from art_patch.pipeline import ServingUpkeep
    from art_patch.pipeline import watch as stage
    from art_patch.store import open_store

    config = canary_config(settings)

    def look_after_challengers() -> None:
        # Of its own: nothing waits for another's.
        with closing(open_store(settings.store_url, create=False, project=settings.project)) as store:
            stage(store, engine, config, who=who, stop=stop)

    def keep() -> None:
        with closing(open_store(settings.store_url, create=False, project=settings.project)) as store:

            def take(before: Route) -> bool:
                return store.ledger.replace_engine(before, address, key_file=key_file(), who=who)

            ServingUpkeep(store.ledger, engine, address, take).keep(stop)

    threads = [
        Thread(target=look_after_challengers, name="art_patch-watch", daemon=True),
        Thread(target=keep, name="art_patch-keep", daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def _ended(store: Store, name: str) -> WatchReport:
    from art_patch.pipeline import WatchReport

    policy, champion = store.ledger.policy(name), store.ledger.champion()
    reason = next((move["reason"] for move in store.ledger.history() if move["policy"] == name), "nobody said why")
    serves = policy is not None and policy.state == "champion"
    return WatchReport("promoted" if serves else "rejected", reason, name, champion.name if champion else None)


def _say(report: WatchReport, *, as_json: bool, whole: bool, news: bool) -> None:
    from rich.markup import escape

    from art_patch.cli.views.output import answer, stdout

    if as_json:
        answer(report.as_json())
        return
    if news or whole:
        name = f"[b]{report.challenger}[/] " if report.challenger else ""
        against = f" against {report.champion}" if report.state else ""
        stdout().print(f"{name}{report.outcome}{against}: {escape(report.reason)}", soft_wrap=True)
    if whole and report.metrics:
        _table(report)


def _table(report: WatchReport) -> None:
    from rich.table import Table

    from art_patch.cli.views.output import stdout

    table = Table("", f"{report.challenger}", f"{report.champion}", "compared", "", box=None, pad_edge=False)
    for name in ("calls", "sessions", "failed"):
        table.add_row(name, *(str(report.metrics[arm][name]) for arm in ("challenger", "champion")), "", "")
    for name, signal in report.metrics["signals"].items():
        both = (f"{signal[arm]:.3g}" if arm in signal else "" for arm in ("challenger", "champion"))
        table.add_row(name, *both, str(signal["compared"]), signal["says"])
    stdout().print(table)
