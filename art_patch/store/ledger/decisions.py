"""State changes of policies, the route and the audit log, inside one transaction that decides alone (`decide_alone`).

A state change of a policy (a move) also changes other policies where needed, such as the old champion, and the route
that running apps read. The table `promotions` has one row for each move, which is never changed or deleted: who did it,
when, why, and the metrics behind it.
"""

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, insert, select, update

from art_patch.errors import ConfigError, NotFound, TransitionError
from art_patch.store.backends.database import Database, decide_alone
from art_patch.store.ledger.route import CONTROL_KEY, ROUTE_KEY
from art_patch.store.queries.loading import rows_in
from art_patch.store.schema import EVERY_AGENT, tables
from art_patch.types import CHALLENGERS, CONTINUABLE, JSON, Policy, PolicyState, check_move

# Reason for rejecting a challenger when another policy is promoted, or a rollback happens, during its test.
OVERTAKEN = "the champion changed while it was tested"

# Action of the audit entry of an update that made no policy.
UPDATE_ENDED = "update ended"

# A group becomes `stale` after so many rejected candidates learned from it. One rejection proves little: a gate of a
# few scenarios misses most small improvements. But a group that spoils every candidate must not come back for ever.
MOST_TRIES = 3


_P = tables.policies.c


@dataclass(frozen=True, slots=True)
class Cause:
    """Who changes the state of a policy, when and why, and the metrics behind it."""

    who: str
    reason: str
    at: float
    metrics: JSON = field(default_factory=dict[str, Any])


def policies_where(connection: Connection, *conditions: ColumnElement[bool]) -> tuple[Policy, ...]:
    """Return the policies that meet all conditions, oldest first."""
    query = select(*tables.columns_of(tables.policies, Policy)).where(*conditions).order_by(_P.created_at)
    return tuple(Policy(*row) for row in connection.execute(query))


def policy_of(connection: Connection, name: str) -> Policy | None:
    """Return the policy with this `NAME@STEP`; `None` if the store has none."""
    return next(iter(policies_where(connection, _P.name == name)), None)


def agent_of(connection: Connection, policy: str) -> int:
    """Return the id of the agent that a policy belongs to: the agent named `NAME` for the policy `NAME@STEP`.

    If there is none, the project's agent without a name gets this name; if every agent has a name, a new one is added.
    """
    table, project = tables.agents, connection.get_execution_options()["project_id"]
    name = policy.rpartition("@")[0]
    found = connection.scalar(select(table.c.id).where(table.c.name == name))
    if found is None:
        found = connection.scalar(select(table.c.id).where(table.c.name.is_(None)))
        if found is not None:
            connection.execute(update(table).where(table.c.id == found).values(name=name))
    if found is None:  # no two transactions do this at once: each of them decides alone
        found = (connection.scalar(select(func.max(table.c.id))) or 0) + 1
        connection.execute(insert(table).values(id=found, project_id=project, name=name))
    return found


def champion_of(connection: Connection) -> Policy | None:
    """Return the champion, the policy that serves; `None` if there is none."""
    return next(iter(policies_where(connection, _P.state == "champion")), None)


def learner_of(connection: Connection) -> Policy | None:
    """Return the policy that is trained while upstream answers; `None` if a champion serves, or none is trained."""
    return next(iter(policies_where(connection, _P.state == "learner")), None)


def challenger_of(connection: Connection) -> Policy | None:
    """Return the policy under test, in state `shadow` or `canary`; `None` if no test is running."""
    return next(iter(policies_where(connection, _P.state.in_(CHALLENGERS))), None)


def answered(connection: Connection) -> tuple[str | None, ...]:
    """Return who answered one after the other, as `Ledger.answered`."""
    moves = tables.promotions.c
    gone = set(connection.scalars(select(_P.name).where(_P.state == "rejected")))
    turns = select(moves.policy, moves.from_state, moves.to_state).where(moves.to_state.in_(("champion", "learner")))
    stack: list[str | None] = []
    for name, before, state in connection.execute(turns.order_by(moves.id)):
        answers = None if state == "learner" else name
        if answers in gone:
            continue
        # One goes back to a champion without a test. Who has won a test follows the one whom it was tested against.
        goes_back = answers is not None and before not in CHALLENGERS and stack[-1:] != [None]
        if goes_back and stack[-2:-1] == [answers]:
            stack.pop()
        elif stack[-1:] != [answers]:  # else it serves again after nobody did: it is not its own predecessor
            stack.append(answers)
    return tuple(stack)


def insert_policy(connection: Connection, policy: Policy, who: str, reason: str) -> None:
    """Store a new policy and the change into its first state; `TransitionError` if it may not begin there."""
    check_move(policy.name, None, policy.state)
    row = {name: getattr(policy, name) for name in Policy.__slots__}
    row |= {"metrics": dict(policy.metrics), "agent_id": agent_of(connection, policy.name)}
    connection.execute(insert(tables.policies).values(row))
    _note_move(connection, policy.name, None, policy.state, Cause(who, reason, policy.created_at, policy.metrics))


def move(
    connection: Connection, name: str, state: PolicyState, cause: Cause, percent: float | None = None,
    was: PolicyState | None = None,
) -> Policy:  # fmt: skip
    """Change a policy's state inside the caller's transaction, with the effects and errors of `Ledger.move`."""
    policy = policy_of(connection, name)
    if policy is None:
        raise NotFound(f"there is no policy {name!r}; `art-patch policies` lists them")
    if was not in (None, policy.state):
        raise TransitionError(f"{name} is {policy.state} and was {was}: somebody else has decided on it meanwhile")
    check_move(name, policy.state, state)
    _check_share(state, percent)
    # Read before anything is written: afterwards this policy may be one of them.
    champion, challenger, learner = champion_of(connection), challenger_of(connection), learner_of(connection)
    share: dict[str, float | None] = {}
    if state == "learner" and champion is not None and champion.name != name:
        raise TransitionError(f"{champion.name} serves, so {name} cannot become the learner, which waits to serve")
    if state in CHALLENGERS:
        check_test(connection, policy, state, percent)
        before: JSON = (_route_of(connection).get("challenger") or {}) if policy.state == state else {}
        if state == "canary":
            share = {"percent_before": before.get("percent"), "percent": percent}
        # A change of the share continues the test, so `since` stays: evidence is counted from there.
        test = {"policy": name, "state": state, "percent": percent, "since": before.get("since", cause.at)}
        turn_route(connection, {"challenger": test} | ({"learner": None} if policy.state == "learner" else {}))
    elif state == "champion":
        turn_route(connection, {"champion": name, "challenger": None, "learner": None})
    elif policy.state == "champion" or state == "learner":
        route: JSON = {"champion": None, "learner": name if state == "learner" else None}
        goes_on = champion is None and challenger is not None and challenger.name != name
        turn_route(connection, route if goes_on else {**route, "challenger": None})
    elif challenger is not None and challenger.name == name:
        turn_route(connection, {"challenger": None})
    elif policy.state == "learner":
        turn_route(connection, {"learner": None})
    moved = _put(connection, policy, state, cause, share)
    for other in (champion, learner) if state in ("champion", "learner") else ():
        if other is not None and other.name != name:
            _put(connection, other, "retired", Cause(cause.who, f"replaced by {name}", cause.at))
    # A test beside upstream goes on, whoever learns.
    if "champion" in (state, policy.state) and challenger is not None and challenger.name != name:
        ended = "retired" if _was_retired(connection, challenger.name) else "rejected"
        _put(connection, challenger, ended, Cause(cause.who, OVERTAKEN, cause.at))
    if state == "rejected" and champion is None and policy.state in ("learner", "canary"):
        _learn_on(connection, policy, cause)
    return moved


def end_test(connection: Connection, name: str, cause: Cause) -> Policy:
    """End a policy's test inside the caller's transaction, as `Ledger.end_test`."""
    policy = policy_of(connection, name)
    # What ends a test would retire a champion, or reject a learner for good: what two who end one test at once make.
    if policy is not None and policy.state not in CHALLENGERS:
        raise TransitionError(f"{name} is {policy.state}, and no test of it is running; nothing to end")
    return move(connection, name, after_test(connection, name), cause)


def after_test(connection: Connection, name: str) -> PolicyState:
    """Return what a policy under test becomes if it does not win.

    A canary beside upstream learns on, unless another policy learns. A policy that was retired before is retired again:
    it may still be gone back to. Any other one is rejected.
    """
    policy = policy_of(connection, name)
    leads = champion_of(connection) or learner_of(connection)
    if policy is not None and policy.state == "canary" and leads is None:
        return "learner"
    return "retired" if policy is not None and _was_retired(connection, policy.name) else "rejected"


def _was_retired(connection: Connection, name: str) -> bool:
    moves = tables.promotions.c
    query = select(moves.id).where(moves.policy == name, moves.to_state == "retired").limit(1)
    return connection.scalar(query) is not None


def _learn_on(connection: Connection, rejected: Policy, cause: Cause) -> None:
    """Make the nearest parent of a rejected learner the learner again, or the base: training goes on there."""
    if learner_of(connection) is not None:
        return
    above = None if rejected.parent is None else policy_of(connection, rejected.parent)
    while above is not None and above.state != "retired":
        above = None if above.parent is None else policy_of(connection, above.parent)
    if above is None:  # a policy that was imported has no parent
        above = policy_of(connection, f"{rejected.model}@0")
    if above is not None and above.state == "retired":
        move(connection, above.name, "learner", Cause(cause.who, f"{rejected.name} was rejected", cause.at))


def _check_share(state: PolicyState, percent: float | None) -> None:
    if state == "canary" and (percent is None or not 0 < percent <= 100):
        raise ConfigError(f"a canary answers a share of the sessions above 0 and up to 100 percent, not {percent}")
    if state != "canary" and percent is not None:
        raise ConfigError(f"a share of the sessions goes with a canary only, not with {state}")


def check_test(connection: Connection, policy: Policy, state: PolicyState, percent: float | None) -> None:
    """Raise `TransitionError` if a policy cannot be tested as `state`, on `percent` of the sessions, as things are."""
    name, champion, challenger = policy.name, champion_of(connection), challenger_of(connection)
    # A canary may be tested against upstream. What a shadow answers, nobody compares with upstream's answers.
    if champion is None and state == "shadow":
        raise TransitionError(
            f"no champion serves that {name} could be tested against as a shadow; test it beside upstream: "
            f"`art-patch promote {name} --canary 5`"
        )
    if challenger is not None and challenger.name != name:
        raise TransitionError(
            f"{challenger.name} is {challenger.state} already, and one policy is tested at a time; "
            f"`art-patch promote {challenger.name}` or `art-patch rollback` ends its test"
        )
    before: JSON = _route_of(connection).get("challenger") or {}
    if state == "canary" == policy.state and before.get("percent") == percent:
        raise TransitionError(f"{name} answers {percent:g} % of the sessions already; nothing to do")


def _put(
    connection: Connection, policy: Policy, state: PolicyState, cause: Cause, of_move: JSON | None = None
) -> Policy:
    """Set the state and note the move. Its metrics are added to the policy's too; `of_move` stays with the move."""
    merged = dict(policy.metrics) | dict(cause.metrics)
    connection.execute(update(tables.policies).where(_P.name == policy.name).values(state=state, metrics=merged))
    told = replace(cause, metrics={**cause.metrics, **(of_move or {})})
    _note_move(connection, policy.name, policy.state, state, told)
    moved = replace(policy, state=state, metrics=merged)
    # A policy that was retired has served or led, and one that is continued goes on: both keep their groups.
    if state == "rejected" and not moved.may_be_continued and not _was_retired(connection, policy.name):
        _give_back(connection, policy.name)
    return moved


def give_up(connection: Connection, name: str) -> None:
    """Continue a rejected candidate no more, unless one that goes on from it may yet serve; its groups are used again.

    For good: an update that continued it after all would learn from its groups twice.
    """
    policy = policy_of(connection, name)
    if policy is None or not policy.may_be_continued or name not in _ended(connection, name):
        return
    metrics = dict(policy.metrics) | {"gate": policy.metrics["gate"] | {CONTINUABLE: False}}
    connection.execute(update(tables.policies).where(_P.name == name).values(metrics=metrics))
    _give_back(connection, name)


def _ended(connection: Connection, name: str) -> set[str]:
    """Return the policies that never serve and in no other policy go on; `name` is not continued any more."""
    policies, moves = policies_where(connection), tables.promotions.c
    # A policy that served once may be served again by a rollback.
    served = set(connection.scalars(select(moves.policy).where(moves.to_state == "champion")))
    served |= {each.name for each in policies if each.state != "rejected"}
    going_on = served | {each.name for each in policies if each.may_be_continued and each.name != name}
    parents = {each.name: each.parent for each in policies}
    # What they started from is in their weights.
    for each in tuple(going_on):
        above = parents.get(each)
        while above is not None and above not in going_on:
            going_on.add(above)
            above = parents.get(above)
    return parents.keys() - going_on


def _give_back(connection: Connection, policy: str) -> None:
    """Return groups to `scored` that only policies learned from that ended; end those without enough runs or tries."""
    g, t = tables.groups, tables.trainings
    its = select(t.c.group_id).where(t.c.policy == policy)
    learned = connection.scalars(select(g.c.id).where(g.c.id.in_(its), g.c.state == "trained").order_by(g.c.id)).all()
    ended = _ended(connection, policy)
    run = tables.trajectories.c
    learners: dict[str, set[str]] = defaultdict(set)
    for group, learner in rows_in(connection, select(t.c.group_id, t.c.policy), t.c.group_id, learned):
        learners[group].add(learner)
    runs = Counter(group for (group,) in rows_in(connection, select(run.group_id), run.group_id, learned))
    for group in learned:
        # Another policy that learned from the group may still serve or be continued, and would learn from it twice.
        if not learners[group] <= ended:
            continue
        state, reason = "scored", f"{policy} was rejected"
        if runs[group] < 2:
            state, reason = "dead", "fewer than two of its runs are left"
        elif len(learners[group]) >= MOST_TRIES:
            state, reason = "stale", f"{len(learners[group])} candidates that learned from it were rejected"
        values = {"state": state, "reason": reason, "policy": None}
        connection.execute(update(g).where(g.c.id == group).values(values))


def _note_move(connection: Connection, name: str, before: PolicyState | None, after: PolicyState, cause: Cause) -> None:
    row = {"policy": name, "from_state": before, "to_state": after, "at": cause.at, "who": cause.who}
    row |= {"reason": cause.reason, "metrics": dict(cause.metrics), "agent_id": agent_of(connection, name)}
    row |= {"id": (connection.scalar(select(func.max(tables.promotions.c.id))) or 0) + 1}
    connection.execute(insert(tables.promotions).values(row))
    detail = {"policy": name, "from": before, "to": after, "reason": cause.reason}
    note(connection, cause.who, "move", detail, cause.at)


def add_scenarios(
    connection: Connection, database: Database, held_out: Mapping[str, bool], now: float | None = None
) -> None:
    """Store new scenarios (key -> held out). A known one never changes sides: training data must not test a policy."""
    at = time.time() if now is None else now
    rows = [{"key": key, "held_out": held, "first_seen_at": at} for key, held in sorted(held_out.items())]
    connection.execute(database.insert(tables.scenarios).on_conflict_do_nothing(), rows)


def turn_route(connection: Connection, changes: JSON) -> None:
    """Change some keys of the route that running apps read; older releases ignore keys that they do not know."""
    set_control(connection, ROUTE_KEY, json.dumps(_route_of(connection) | dict(changes)))


def engine_of(connection: Connection) -> tuple[str | None, float | None]:
    """Return the engine's address in the route, and when the engine was announced (seconds since the epoch)."""
    route = _route_of(connection)
    return route.get("base_url"), route.get("engine_since")


def _route_of(connection: Connection) -> dict[str, Any]:
    return json.loads(control_of(connection, ROUTE_KEY) or "{}")


def control_of(connection: Connection, key: str) -> str | None:
    """Return the value of one row of the table `control`; `None` if there is none."""
    return connection.scalar(select(tables.control.c.value).where(tables.control.c.key == key))


def set_control(connection: Connection, key: str, value: str) -> None:
    """Set one row of `control`, which running apps read. The transaction excludes every other one that sets it."""
    table = tables.control
    row = {"key": key, "value": value, "updated_at": time.time()}
    if key != ROUTE_KEY:  # the route is one agent's; whatever else stands here is the whole project's
        row["agent_id"] = EVERY_AGENT
    if not connection.execute(update(table).where(table.c.key == key).values(row)).rowcount:
        connection.execute(insert(table).values(row))


def shares_of(connection: Connection) -> list[tuple[float, float]]:
    """Return when the control group's share was set, and to how many percent, oldest first; empty if it never was."""
    return [(at, percent) for at, percent in json.loads(control_of(connection, CONTROL_KEY) or "[]")]


def set_share(connection: Connection, percent: float, who: str, at: float) -> None:
    """Set the share of the control group, and note it, unless it is this one already."""
    shares = shares_of(connection)
    if not shares or percent != shares[-1][1]:  # a 0 that was set stays: no promotion begins a group
        set_control(connection, CONTROL_KEY, json.dumps([*shares, (at, percent)][-100:]))
        note(connection, who, "control group", {"percent": percent}, at)


# `previous` of the first audit entry of a project.
GENESIS = "0" * 64


def audit_hash(previous: str, at: float, who: str, action: str, detail: Mapping[str, Any]) -> str:
    """Return the SHA-256 over an audit entry and the hash of the entry before it (`previous`), which chains the two."""
    body = json.dumps([previous, at, who, action, dict(detail)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(body.encode()).hexdigest()


def note(connection: Connection, who: str, action: str, detail: JSON, at: float) -> None:
    """Add an entry to the audit log. Its hash covers the entry before it, so missing and changed ones are detected."""
    table = tables.audit
    decide_alone(connection)  # else two entries could follow the same one
    newest = connection.execute(select(table.c.id, table.c.hash).order_by(table.c.id.desc()).limit(1)).first()
    last, previous = newest or (0, GENESIS)
    digest = audit_hash(previous, at, who, action, detail)
    row = {"at": at, "who": who, "action": action, "detail": dict(detail), "previous": previous, "hash": digest}
    connection.execute(insert(table).values(row | {"id": last + 1}))
