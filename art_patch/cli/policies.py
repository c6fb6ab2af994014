"""`art-patch promote` and `art-patch rollback`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from art_patch.cli.options import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i


def promote(
    policy: Annotated[str, typer.Argument(help="NAME@STEP of a candidate or a retired policy.")],
    reason: Annotated[str, typer.Option("--reason", help="Why, for the ledger.")] = "promoted by hand",
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a policy serve, without the gate. The engine must be up: it proves the policy first."""
    from art_patch.errors import EngineError
    from art_patch.promotion import promote as stage

    ledger, engine, close = _open(project, home, store)
    if engine is None:
        raise EngineError("no engine is running, so the policy cannot be proven; start `art-patch serve` and try again")
    champion = stage.promote(ledger, engine, policy, who=who_am_i(who, "promote"), reason=reason)
    close()
    _say(champion.name, as_json)


def rollback(
    reason: Annotated[str, typer.Option("--reason", help="Why, for the ledger.")] = "rolled back by hand",
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to the champion before this one. Works with the engine down, too."""
    from art_patch.promotion import promote as stage

    ledger, engine, close = _open(project, home, store)
    champion = stage.rollback(ledger, engine, who=who_am_i(who, "rollback"), reason=reason)
    close()
    _say(champion.name, as_json)


def _open(project: str | None, home: Any, store: str | None) -> tuple[Any, Any, Any]:
    from art_patch.serving.client import EngineClient
    from art_patch.serving.keys import read_key
    from art_patch.settings import load_settings
    from art_patch.store import open_store

    settings = load_settings(project=project, home=home, store=store)
    opened = open_store(settings.store_url, create=False)
    route = opened.ledger.route()
    base_url = settings.base_url or route.base_url
    engine = EngineClient(base_url, read_key(route.key_file)) if base_url else None
    if engine is not None and not engine.health():
        engine = None
    return opened.ledger, engine, opened.close


def _say(champion: str, as_json: bool) -> None:
    from art_patch.cli.output import answer, stdout

    if as_json:
        answer({"champion": champion})
    else:
        stdout().print(f"[b]{champion}[/] serves; running apps follow within a second")
