"""`art-patch promote`, `art-patch rollback`, `art-patch reject`, and `art-patch policies` where it lists them."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i

app = typer.Typer(name="policies")

if TYPE_CHECKING:
    from art_patch.serving import EngineClient
    from art_patch.settings import Settings
    from art_patch.store import Ledger
    from art_patch.types import Policy, Route


def promote(
    policy: Annotated[str, typer.Argument(help="NAME@STEP of a candidate, a challenger or a retired policy.")],
    canary: Annotated[
        float | None,
        typer.Option(
            "--canary",
            metavar="PERCENT",
            help="Test it: it answers this share of the sessions. Of a canary: its share changes, its test goes on.",
        ),
    ] = None,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Test it: it is asked in the background what the app asks.")
    ] = False,
    reason: Annotated[
        str | None, typer.Option("--reason", help="Why, for the ledger.  [default: promoted, or tested, by hand]")
    ] = None,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a policy serve, or test it beside the champion, without the gate.

    The engine must be up: it proves the policy first; a canary whose share changes is served already. One policy at a
    time is tested; `art-patch rollback` ends it.
    """
    from art_patch import promotion
    from art_patch.errors import ConfigError, EngineError

    if shadow and canary is not None:
        raise ConfigError("--canary and --shadow exclude each other; a shadow can become a canary later")
    if canary is not None and not 0 < canary <= 100:
        raise ConfigError(f"--canary {canary:g} is no share of the sessions; give a percentage above 0 and up to 100")
    with opened_store(project=project, home=home, store=store) as (settings, opened):
        ledger = opened.ledger
        me, tested, present = who_am_i(who, "promote"), shadow or canary is not None, ledger.policy(policy)
        is_canary = present is not None and present.state == "canary"
        why = reason or ("its share changed by hand" if tested and is_canary else None)
        why = why or ("tested by hand" if tested else "promoted by hand")
        if canary is not None and is_canary:
            promotion.change_share(ledger, policy, canary, who=me, reason=why)
        elif (engine := find_engine(settings, ledger)) is None:
            raise EngineError(
                "no engine is running, so the policy cannot be proven; start `art-patch serve` and try again"
            )
        elif tested:
            state = "shadow" if shadow else "canary"
            promotion.challenge(ledger, engine, policy, state=state, percent=canary, who=me, reason=why)
        else:
            promotion.promote(ledger, engine, policy, who=me, reason=why)
        route = ledger.route()
    _say_served(route, policy, as_json)


def rollback(
    reason: Annotated[str, typer.Option("--reason", help="Why, for the ledger.")] = "rolled back by hand",
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give up the policy that is tested; where none is, go back to the champion before this one.

    Works with the engine down, too.
    """
    from art_patch import promotion
    from art_patch.cli.views.output import answer, stdout

    with opened_store(project=project, home=home, store=store) as (settings, opened):
        ledger, me = opened.ledger, who_am_i(who, "rollback")
        rejected = promotion.give_up(ledger, None, who=me, reason=reason)  # before an engine that hangs is waited for
        if rejected is None:
            champion = promotion.rollback(ledger, find_engine(settings, ledger, within_s=1.0), who=me, reason=reason)
        else:
            champion = ledger.champion()
            _let_go(settings, ledger, rejected)
    serves = champion.name if champion else None
    if as_json:
        answer({"champion": serves, "rejected": rejected})
    elif rejected is not None:
        stdout().print(f"{rejected} is given up; [b]{serves}[/] answers every session, in running apps within a second")
    else:
        stdout().print(f"[b]{serves}[/] serves again; running apps follow within a second")


def reject(
    policy: Annotated[str, typer.Argument(help="NAME@STEP of a candidate, a challenger or a retired policy.")],
    reason: Annotated[str, typer.Option("--reason", help="Why, for the ledger.")],
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give it up for good: it never serves again, and nobody goes back to it. Of one that is tested, ends the test.

    Works with the engine down, too; one that is up unloads it. What serves is not rejected: `art-patch rollback` first.
    Exit codes: 0 rejected; 8 there is no such policy; 14 it serves, or is rejected already.
    """
    from art_patch import promotion
    from art_patch.cli.views.output import answer, stdout

    with opened_store(project=project, home=home, store=store) as (settings, opened):
        ledger = opened.ledger
        present = ledger.policy(policy)
        promotion.reject(ledger, None, policy, who=who_am_i(who, "reject"), reason=reason)  # as in a rollback
        unloaded = policy not in promotion.wanted(ledger) and _let_go(settings, ledger, policy)
        route = ledger.route()
    was = present.state if present else None
    if as_json:
        answer({"champion": route.champion, "rejected": policy, "was": was, "unloaded": unloaded})
        return
    rest = "the engine let it go" if unloaded else "the engine did not have to let it go"
    stdout().print(f"{policy} is rejected for good, was {was}; [b]{route.champion}[/] serves; {rest}")


def policies(
    context: typer.Context,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Every policy: where it stands, what it came from, how the gate found it, and its share of the sessions."""
    from dataclasses import asdict

    from art_patch.cli.views.output import answer
    from art_patch.errors import ConfigError

    if (command := context.invoked_subcommand) is not None:
        given = [name for name in context.params if _is_given(context, name)]
        if given:
            raise ConfigError(f"options of `art-patch policies {command}` go behind its name; there are some before it")
        return

    with opened_store(project=project, home=home, store=store) as (_, opened):
        found, route = opened.ledger.policies(), opened.ledger.route()
    if as_json:
        answer({"policies": [asdict(policy) | {"percent": _percent(policy, route)} for policy in found]})
    else:
        _print(found, route, time.time())


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def find_engine(settings: Settings, ledger: Ledger, *, within_s: float = 5.0) -> EngineClient | None:
    """The project's engine, if it answers."""
    from art_patch.serving import EngineClient

    engine = EngineClient.of_route(settings, ledger.route())
    return engine if engine is not None and engine.health(timeout_s=within_s) else None


def _let_go(settings: Settings, ledger: Ledger, rejected: str) -> bool:
    """Have the engine unload a policy that nobody is sent to any more; the next promotion does it otherwise."""
    from art_patch.errors import ConfigError, EngineError

    with suppress(ConfigError, EngineError):
        if (engine := find_engine(settings, ledger)) is not None:
            engine.unload(rejected)
            return True
    return False


def _say_served(route: Route, policy: str, as_json: bool) -> None:
    from art_patch.cli.views.output import answer, stdout

    state = route.challenger_state if route.challenger == policy else "champion"
    if as_json:
        share = route.challenger_percent if state == "canary" else None
        answer({"champion": route.champion, "policy": policy, "state": state, "percent": share})
        return
    said = {
        "shadow": f"[b]{policy}[/] is asked in the background what apps ask; {route.champion} serves",
        "canary": f"[b]{policy}[/] answers {route.challenger_percent or 0:g} % of the sessions, {route.champion} all "
        "others",
    }.get(state or "", f"[b]{policy}[/] serves")
    stdout().print(f"{said}; running apps follow within a second")


def _percent(policy: Policy, route: Route) -> float | None:
    """Its share of the sessions that a policy answers; `None` where it answers none."""
    canary = (route.challenger_percent or 0.0) if route.challenger_state == "canary" else 0.0
    if policy.name == route.champion:
        return 100 - canary
    return canary if canary and policy.name == route.challenger else None


def _print(found: tuple[Policy, ...], route: Route, now: float) -> None:
    from rich.table import Table

    from art_patch.cli.views.output import ago, stdout

    if not found:
        stdout().print("no policies yet; start `art-patch serve --base MODEL`")
        return
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("policy", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("from", no_wrap=True)
    table.add_column("made", justify="right", no_wrap=True)
    table.add_column("gate", overflow="fold")
    table.add_column("sessions", justify="right", no_wrap=True)
    for policy in found:
        share = _percent(policy, route)
        name = f"[b]{policy.name}[/]" if policy.state == "champion" else policy.name
        made, sessions = f"{ago(now - policy.created_at)} ago", "" if share is None else f"{share:g} %"
        table.add_row(name, policy.state, policy.parent or "the base", made, _gate(policy), sessions)
    stdout().print(table)


def _gate(policy: Policy) -> str:
    """What the gate measured, as far as it came."""
    gate: Any = policy.metrics.get("gate") or {}
    words: list[str] = []
    if "candidate" in gate and "champion" in gate:
        words.append(f"{gate['candidate']:.3f} against {gate['champion']:.3f}")
    if "lower_bound" in gate:
        words.append(f"difference above {gate['lower_bound']:+.3f}")
    if "scenarios" in gate:
        words.append(f"{gate['scenarios']} scenarios")
    return ", ".join(words) or "-"
