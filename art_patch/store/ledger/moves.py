"""Where policies stand and where calls go, inside one transaction that decides alone (`locks.decide_alone`).

A move changes a policy's state, everything that follows from it, and the route that running apps read, all or nothing.
`promotions` keeps each move for good: who, when, why, and the metrics it rested on.

A policy that is rejected and never served gives its groups back: they are `scored` again, and the next update learns
from them. What a policy learned that serves, served or may still serve stays `trained`. `trainings` keeps both.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from art_patch.errors import ConfigError, StoreError, TransitionError
from art_patch.store.ledger.audit import note
from art_patch.store.ledger.route import ROUTE_KEY
from art_patch.store.queries.loading import some_of
from art_patch.store.schema import EVERY_AGENT, tables
from art_patch.types import CHALLENGERS, JSON, Policy, PolicyState, check_move

OVERTAKEN = "the champion changed while it was tested"
"""Why a challenger is rejected that another policy's promotion, or a rollback, met halfway."""

MOST_TRIES = 3
"""Rejected candidates that learned from a group before it is put aside. A good candidate often needs a second test,
because a gate of a few scenarios misses most small improvements; a group that spoils each candidate must end."""


def policy_of(connection: Connection, name: str) -> Policy | None:
    """Return the policy of this name."""
    query = select(*tables.columns_of(tables.policies, Policy)).where(tables.policies.c.name == name)
    row = connection.execute(query).mappings().first()
    return None if row is None else Policy(**row)


def agent_of(connection: Connection, policy: str) -> int:
    """Return the id of the agent whose line a policy belongs to. The first policy names the project's first agent."""
    table, project = tables.agents, connection.get_execution_options()["project_id"]
    name = policy.rpartition("@")[0]
    of_project = select(table.c.id).where(table.c.project_id == project)
    found = connection.scalar(of_project.where(table.c.name == name))
    if found is None:
        found = connection.scalar(of_project.where(table.c.name.is_(None)))
        if found is not None:
            connection.execute(update(table).where(table.c.id == found).values(name=name))
    if found is None:  # no two transactions do this at once: each of them decides alone
        found = (connection.scalar(select(func.max(table.c.id))) or 0) + 1
        connection.execute(insert(table).values(id=found, project_id=project, name=name))
    return found


def champion_of(connection: Connection) -> Policy | None:
    """Return the policy that serves."""
    return _in_state(connection, ("champion",))


def challenger_of(connection: Connection) -> Policy | None:
    """Return the policy that is tested beside the champion."""
    return _in_state(connection, CHALLENGERS)


def insert_policy(connection: Connection, policy: Policy, *, who: str, reason: str, at: float) -> None:
    """Keep a new policy.

    Raises:
        TransitionError: if it may not begin in its state.
    """
    check_move(policy.name, None, policy.state)
    row = {name: getattr(policy, name) for name in Policy.__slots__}
    row |= {"metrics": dict(policy.metrics), "agent_id": agent_of(connection, policy.name)}
    connection.execute(insert(tables.policies).values(row))
    _note_move(connection, policy.name, None, policy.state, who=who, reason=reason, metrics=policy.metrics, at=at)


def move(
    connection: Connection,
    name: str,
    state: PolicyState,
    *,
    who: str,
    reason: str,
    metrics: JSON,
    at: float,
    percent: float | None = None,
) -> Policy:
    """Move a policy to another state, with what follows; `Ledger.move` says what.

    Raises:
        StoreError: if there is no such policy.
        TransitionError: if the table of moves forbids it, or another policy is being tested.
        ConfigError: if the share is none.
    """
    policy = policy_of(connection, name)
    if policy is None:
        raise StoreError(f"there is no policy {name!r}; `art-patch policies` lists them")
    check_move(name, policy.state, state)
    _check_share(state, percent)
    champion, challenger = champion_of(connection), challenger_of(connection)
    share: dict[str, float | None] = {}
    if state in CHALLENGERS:
        _check_free(name, champion, challenger)
        before = _test_of(connection) if policy.state == state else {}
        if state == "canary":
            share = {"percent_before": before.get("percent"), "percent": percent}
            _check_differs(name, share)
        # A test whose share changes goes on: it began when it began (`promotion.evidence`).
        test = {"policy": name, "state": state, "percent": percent, "since": before.get("since", at)}
        turn_route(connection, {"challenger": test})
    elif state == "champion":
        turn_route(connection, {"champion": name, "challenger": None})
    elif challenger is not None and challenger.name == name:
        turn_route(connection, {"challenger": None})
    moved = _put(connection, policy, state, who=who, reason=reason, metrics=metrics, at=at, of_move=share)
    if state == "champion":
        if champion is not None:
            _put(connection, champion, "retired", who=who, reason=f"replaced by {name}", metrics={}, at=at)
        if challenger is not None and challenger.name != name:
            _put(connection, challenger, "rejected", who=who, reason=OVERTAKEN, metrics={}, at=at)
    return moved


def _in_state(connection: Connection, states: Sequence[PolicyState]) -> Policy | None:
    query = select(*tables.columns_of(tables.policies, Policy)).where(tables.policies.c.state.in_(states))
    row = connection.execute(query).mappings().first()
    return None if row is None else Policy(**row)


def _check_share(state: PolicyState, percent: float | None) -> None:
    if state == "canary" and (percent is None or not 0 < percent <= 100):
        raise ConfigError(f"a canary answers a share of the sessions above 0 and up to 100 percent, not {percent}")
    if state != "canary" and percent is not None:
        raise ConfigError(f"a share of the sessions goes with a canary only, not with {state}")


def _check_differs(name: str, share: JSON) -> None:
    if share["percent"] == share["percent_before"]:
        raise TransitionError(f"{name} answers {share['percent']:g} % of the sessions already; nothing to do")


def _check_free(name: str, champion: Policy | None, challenger: Policy | None) -> None:
    if champion is None:
        raise TransitionError(f"no champion serves that {name} could be tested against; start `art-patch serve`")
    if challenger is not None and challenger.name != name:
        raise TransitionError(
            f"{challenger.name} is {challenger.state} already, and one policy is tested at a time; "
            f"`art-patch promote {challenger.name}` or `art-patch rollback` ends its test"
        )


def _put(
    connection: Connection,
    policy: Policy,
    state: PolicyState,
    *,
    who: str,
    reason: str,
    metrics: JSON,
    at: float,
    of_move: JSON | None = None,
) -> Policy:
    """Move the policy; `metrics` become its own, too, those `of_move` are kept with the move alone."""
    merged = dict(policy.metrics) | dict(metrics)
    connection.execute(
        update(tables.policies).where(tables.policies.c.name == policy.name).values(state=state, metrics=merged)
    )
    told = {**metrics, **(of_move or {})}
    _note_move(connection, policy.name, policy.state, state, who=who, reason=reason, metrics=told, at=at)
    if state == "rejected" and policy.state != "retired":
        _give_back(connection, policy.name)
    return replace(policy, state=state, metrics=merged)


def _give_back(connection: Connection, policy: str) -> None:
    """Let the groups that only rejected policies learned from wait again; those without enough runs or tries end."""
    g, t, p, moves = tables.groups, tables.trainings, tables.policies.c, tables.promotions.c
    its = select(t.c.group_id).where(t.c.policy == policy)
    learned = connection.scalars(select(g.c.id).where(g.c.id.in_(its), g.c.state == "trained").order_by(g.c.id)).all()
    given_up = set(connection.scalars(select(p.name).where(p.state == "rejected")))
    given_up -= set(connection.scalars(select(moves.policy).where(moves.to_state == "champion")))  # these served once
    run = tables.trajectories.c
    for some in some_of(learned):
        learners: dict[str, set[str]] = defaultdict(set)
        for group, learner in connection.execute(select(t.c.group_id, t.c.policy).where(t.c.group_id.in_(some))):
            learners[group].add(learner)
        runs = Counter(connection.scalars(select(run.group_id).where(run.group_id.in_(some))))
        for group in some:
            if not learners[group] <= given_up:
                continue
            state, reason = "scored", f"{policy} was rejected"
            if runs[group] < 2:
                state, reason = "dead", "fewer than two of its runs are left"
            elif len(learners[group]) >= MOST_TRIES:
                state, reason = "stale", f"{len(learners[group])} candidates that learned from it were rejected"
            values = {"state": state, "reason": reason, "policy": None, "claimed_by": None, "claimed_until": None}
            connection.execute(update(g).where(g.c.id == group).values(values))


def _note_move(
    connection: Connection,
    name: str,
    before: PolicyState | None,
    after: PolicyState,
    *,
    who: str,
    reason: str,
    metrics: JSON,
    at: float,
) -> None:
    row = {"policy": name, "from_state": before, "to_state": after, "at": at, "who": who, "reason": reason}
    row |= {"metrics": dict(metrics), "agent_id": agent_of(connection, name)}
    connection.execute(insert(tables.promotions).values(row))
    note(connection, who, "move", {"policy": name, "from": before, "to": after, "reason": reason}, at)


def turn_route(connection: Connection, changes: JSON) -> None:
    """Change what the route says; apps of any release pass over the keys that they do not know."""
    set_control(connection, ROUTE_KEY, json.dumps(_route_of(connection) | dict(changes)))


def engine_of(connection: Connection) -> tuple[str | None, float | None]:
    """Return where the route leads, and since when."""
    route = _route_of(connection)
    return route.get("base_url"), route.get("engine_since")


def _test_of(connection: Connection) -> JSON:
    """What the route says of the policy that is tested."""
    return _route_of(connection).get("challenger") or {}


def _route_of(connection: Connection) -> dict[str, Any]:
    value = connection.scalar(select(tables.control.c.value).where(tables.control.c.key == ROUTE_KEY))
    return json.loads(value or "{}")


def set_control(connection: Connection, key: str, value: str) -> None:
    """Keep `value` where running apps look for it."""
    table = tables.control
    row = {"key": key, "value": value, "updated_at": time.time()}
    if key != ROUTE_KEY:  # the route is one agent's; whatever else stands here is the whole project's
        row["agent_id"] = EVERY_AGENT
    if not connection.execute(update(table).where(table.c.key == key).values(row)).rowcount:
        connection.execute(insert(table).values(row))  # nobody else does: we decide alone
