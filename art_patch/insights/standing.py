"""What a project looks like now, and its settings: `art-patch status` and `config`, and the first pages of the web."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from art_patch import doctor, pipeline, rewards, serving, store, types
from art_patch._lib.process import lives
from art_patch.errors import EngineError
from art_patch.settings import Settings, variable_of

APPS_SEEN_S = 3_600.0
"""Reports of app processes that are older are not shown."""

_ANSWER_S = 5.0  # within which an engine answers each of two questions


def project_status(settings: Settings, opened: store.Store) -> dict[str, Any]:
    """Return all that `art-patch status` tells.

    The engine and each server are asked whether they are up, which takes seconds if they are not.
    """
    differ = rewards.disagreement(opened.evidence.opinions(rewards.PEOPLE))
    return {
        **who_serves(settings, opened),
        **engines(settings, opened),
        "recorded": opened.read.counts(),
        "disagreement": asdict(differ) | {"share": differ.share},
    }


def engines(settings: Settings, opened: store.Store) -> dict[str, Any]:
    """Return the engine that apps use, and all servers that have announced themselves, each as it answers now."""
    route = opened.ledger.route()
    return {
        "engine": _engine(settings, route.base_url, route.key_file),
        "servers": [_server(settings, server, route) for server in opened.servers.all()],
    }


def who_serves(settings: Settings, opened: store.Store, *, now: float | None = None) -> dict[str, Any]:
    """Return who serves, learns and is tested, the newest decisions, and the apps, all from the end of an index."""
    now = time.time() if now is None else now
    route, champion = opened.ledger.route(), opened.ledger.champion()
    change = opened.evidence.upstream_change(now=now)
    apps = opened.read.apps(since=now - APPS_SEEN_S)
    challenger = {key: getattr(route, f"challenger_{key}") for key in ("state", "percent", "since")}
    return {
        "project": settings.project,
        "store": store.without_password(settings.store_url),
        # A mode in the store takes precedence over each app's own setting.
        "mode": route.mode or settings.mode,
        "canary_percent": settings.canary_percent if route.canary_percent is None else route.canary_percent,
        # Without a champion, all sessions are upstream's; the share that is set begins with the next one.
        "control_percent": route.control_percent,
        "control_since": _control_since(opened.ledger, champion) if route.control_percent else None,
        "upstream_change": change._asdict() if change and change.at >= now - store.CONTROL_S else None,
        "control_look": opened.ledger.control_look() if route.control_percent else None,
        "champion": champion.name if champion else None,
        "serving_since": opened.ledger.history(limit=1, policy=champion.name)[0]["at"] if champion else None,
        "learner": pipeline.standing(opened, min_scenarios=settings.gate_scenarios),
        "challenger": {"policy": route.challenger, **challenger} if route.challenger else None,
        "policies": [
            {key: getattr(policy, key) for key in ("name", "state", "created_at", "parent")}
            for policy in opened.ledger.policies()
        ],
        "history": opened.ledger.history(limit=10),
        "apps": [{**each.facts, "id": each.id, "at": each.at} for each in apps],
    }


def _control_since(ledger: store.Ledger, champion: types.Policy | None) -> float | None:
    """Return since when as many sessions as now stay with upstream, while the champion serves; `None` without one."""
    if champion is None:
        return None
    served = ledger.history(limit=1, policy=champion.name)[0]["at"]
    return max(served, *(at for at, _ in ledger.control_shares()[-1:]))


def _engine(settings: Settings, base_url: str | None, key_file: str | None) -> dict[str, Any]:
    shown = None if base_url is None else store.without_password(base_url)
    unknown = {"base_url": shown, "healthy": False, "models": []}
    if base_url is None:
        return unknown
    client = serving.EngineClient.of_project(settings, base_url, key_file, timeout_s=_ANSWER_S)
    try:
        healthy = client.health(timeout_s=_ANSWER_S)
        return {"base_url": shown, "healthy": healthy, "models": list(client.models())}
    except EngineError as error:
        return unknown | {"error": str(error)}


def _server(settings: Settings, server: store.Server, route: types.Route) -> dict[str, Any]:
    """Return the facts of a server that has announced itself; it has the route, stands by, is leaving or has ended."""
    alive = lives(server.owner)
    state = "leaving" if server.leaving else "has the route" if server.base_url == route.base_url else "stands by"
    times = {"since": server.since, "renewed_at": server.renewed_at}
    facts = {"state": "ended" if alive is False else state, "process": str(server.owner), **times}
    return _engine(settings, server.base_url, route.key_file) | facts


def settings_in_force(
    settings: Settings, arguments: Collection[str], variables: Mapping[str, str], *, env_file: Collection[str] = (),
    mode: types.Mode | None = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return each setting with its `value` and `source`; of one that holds a key or a password, that it is set.

    `arguments` are the settings given on the command line, `env_file` the variables that an env file set, and `mode`
    the mode in the store, which takes precedence.
    """
    found = doctor.sources(settings, arguments, variables)
    of_file = {name.upper() for name in env_file}
    for name, one in found.items():
        if one["source"] == "environment" and variable_of(name) in of_file:
            one["source"] = "env file"
    if mode is not None:
        found["mode"] = {"value": mode, "source": "store"}
    return found
