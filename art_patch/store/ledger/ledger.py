"""The ledger: groups, policies, promotions, the route and the audit log. Every write here is durable.

A write that changes policies, the route or the mode excludes every other such write until it is committed.
"""

import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from sqlalchemy import Connection, delete, insert, select, update

from art_patch.errors import ConfigError, NotFound
from art_patch.store.backends.database import Part, decide_alone
from art_patch.store.ledger import decisions
from art_patch.store.ledger.decisions import Cause, note
from art_patch.store.ledger.route import CANARY_KEY, MODE_KEY, route_of
from art_patch.store.queries.loading import rows_in
from art_patch.store.schema import tables
from art_patch.store.schema.codec import run_key
from art_patch.types import JSON, Group, Judgement, Mode, Policy, PolicyState, Route, TrainedRow

LEARNS = "upstream answers; it learns until it has proven itself"
"""Reason of the move of a base that is served where upstream's answers are on record."""


class Ledger(Part):
    """Stores the decisions of the job and the operator. Each decision and its audit entry are one transaction."""

    # groups

    def add_groups(self, groups: Sequence[Group], *, state: str = "formed", now: float | None = None) -> None:
        """Store new groups in this state, and mark their trajectories as grouped."""
        at = time.time() if now is None else now
        if not groups:
            return
        with self._database.write(durable=True) as connection:
            # Reversed, so that the first group of a scenario decides whether it is held out.
            scenarios = {g.scenario_key: g.held_out for g in reversed(groups)}
            decisions.add_scenarios(connection, self._database, scenarios, at)
            connection.execute(
                insert(tables.groups),
                [
                    {"id": g.id, "scenario_key": g.scenario_key, "how": g.how, "held_out": g.held_out}
                    | {"created_at": at, "state": state}
                    for g in groups
                ],
            )
            table = tables.trajectories
            for group in groups:
                ids = [t.id for t in group.trajectories]
                connection.execute(update(table).where(table.c.id.in_(ids)).values(group_id=group.id))

    def add_wordings(self, scenarios: Mapping[str, tuple[str, bool]], *, now: float) -> None:
        """Store wording key -> (scenario key, held out); a wording that is known keeps its scenario and its side."""
        rows: list[JSON] = [
            {"key": wording, "scenario_key": key, "held_out": held_out, "first_seen_at": now}
            for wording, (key, held_out) in sorted(scenarios.items())
        ]
        if rows:
            with self._database.write(durable=True) as connection:
                connection.execute(self._database.insert(tables.wordings).on_conflict_do_nothing(), rows)

    def note_cycle(self, *, now: float) -> tuple[float, ...]:
        """Note that a cycle looks at the runs without siblings; return when the newest earlier ones did, up to 50."""
        with self._deciding() as connection:
            earlier: list[float] = json.loads(decisions.control_of(connection, "cycles") or "[]")
            decisions.set_control(connection, "cycles", json.dumps([*earlier, now][-50:]))
        return tuple(earlier)

    def set_groups(
        self, ids: Sequence[str], state: str, *, reason: str | None = None, policy: str | None = None
    ) -> None:
        """Set groups, used by `policy`, to `scored`, `trained`, `spent` (by the gate) or another state."""
        with self._database.write(durable=True) as connection:
            _set_groups(connection, ids, state, reason, policy)

    def add_judgement(self, judgement: Judgement) -> None:
        """Store the record of one judgement: which group was judged, the cost, and whether it succeeded."""
        row = {name: getattr(judgement, name) for name in Judgement.__slots__} | {"facts": dict(judgement.facts)}
        with self._database.write(durable=True) as connection:
            connection.execute(self._database.insert(tables.judgements).on_conflict_do_nothing(), [row])

    # policies

    def policies(self) -> tuple[Policy, ...]:
        """Return every policy in the store, whatever its state, oldest first."""
        return self._read(decisions.policies_where)

    def policy(self, name: str) -> Policy | None:
        """Return the policy with this `NAME@STEP`; `None` if the store has none."""
        return self._read(decisions.policy_of, name)

    def champion(self) -> Policy | None:
        """Return the champion, the policy that serves; `None` if there is none."""
        return self._read(decisions.champion_of)

    def learner(self) -> Policy | None:
        """Return the policy that is trained while upstream answers; `None` if a champion serves, or none is trained."""
        return self._read(decisions.learner_of)

    def leader(self) -> Policy | None:
        """Return the policy that updates go on from; `None` if there is none yet.

        That is the champion. While upstream answers, it is the learner, or the canary that it has become.
        """
        with self._database.read() as connection:
            return (
                decisions.champion_of(connection)
                or decisions.learner_of(connection)
                or decisions.challenger_of(connection)
            )

    def champions(self) -> tuple[str, ...]:
        """Return the names of all champions so far, oldest promotion first; a rollback lists one again."""
        table = tables.promotions
        with self._database.read() as connection:
            query = select(table.c.policy).where(table.c.to_state == "champion").order_by(table.c.id)
            return tuple(connection.scalars(query))

    def replaced_upstream(self, champion: str) -> bool:
        """Return whether upstream was the champion before this one; a rollback to a champion tells nothing new."""
        return self.answered()[-2:] == (None, champion)

    def answered(self) -> tuple[str | None, ...]:
        """Return who answered one after the other, `None` for upstream; without what rollbacks left, and the rejected.

        The last one answers now, and the one before is who the next rollback goes back to.
        """
        return self._read(decisions.answered)

    def challenger(self) -> Policy | None:
        """Return the policy under test, in state `shadow` or `canary`; `None` if no test is running."""
        return self._read(decisions.challenger_of)

    def add_base(
        self, name: str, base: str, base_sha256: str, *, who: str, upstream_answers: bool = False,
        now: float | None = None,
    ) -> Policy:  # fmt: skip
        """Store the base model as the policy `name`, which is `NAME@0`, and return that policy.

        If there is neither a champion nor a learner, it becomes champion; with `upstream_answers`, it becomes the
        learner, since upstream is the champion wherever its answers are on record. A base that was retired or rejected
        stays so. If the store has the policy already, nothing else changes.
        """
        at = time.time() if now is None else now
        with self._deciding() as connection:
            policy = decisions.policy_of(connection, name)
            if policy is None:
                policy = Policy(name, base=base, base_sha256=base_sha256, state="candidate", created_at=at)
                decisions.insert_policy(connection, policy, who, "base model")
            leads = decisions.champion_of(connection) or decisions.learner_of(connection)
            # A base that was retired or rejected does not come back by a restart of the server.
            if leads is None and policy.state == "candidate":
                state, why = ("learner", LEARNS) if upstream_answers else ("champion", "first policy served")
                policy = decisions.move(connection, name, state, Cause(who, why, at))
            return policy

    def add_candidate(
        self, policy: Policy, *, trained_on: Sequence[str], also: Sequence[str] = (), rows: Sequence[TrainedRow] = (),
        who: str, reason: str | None = None,
    ) -> None:  # fmt: skip
        """Store a new candidate, and set the state of the groups it was trained on to `trained`.

        `also` are trajectories outside of these groups that it was trained on, `rows` its answers in these groups;
        answers that were erased meanwhile are left out.
        """
        with self._deciding() as connection:
            decisions.insert_policy(connection, policy, who, reason or f"trained on {len(trained_on)} groups")
            _set_groups(connection, trained_on, "trained", None, policy.name)
            # Runs outside of the groups stand beside them under a hash, so that an erasure finds the policy too.
            taught = {*trained_on, *map(run_key, also)}
            if taught:
                its = {"policy": policy.name, "agent_id": decisions.agent_of(connection, policy.name)}
                connection.execute(insert(tables.trainings), [its | {"group_id": key} for key in sorted(taught)])
                _keep_rows(connection, rows, its)

    def move(
        self, name: str, state: PolicyState, *, who: str, reason: str, metrics: JSON | None = None,
        percent: float | None = None, was: PolicyState | None = None, now: float | None = None,
        control_percent: float | None = None,
    ) -> Policy:  # fmt: skip
        """Change the state of a policy, and the route with it, in one transaction.

        If the policy becomes champion, the old champion is retired, and the route sends calls to the new one. If the
        champion becomes the learner, or is retired without a successor, calls go upstream. A policy in `shadow` or
        `canary` is the one under test in the route; without a champion, a canary is tested against upstream. If the
        champion changes during the test, the test ends without a winner, because the champion it was compared with
        no longer serves.

        There is one learner, and none while a champion serves: a new one retires the one before. If it is rejected,
        its nearest parent that was the learner before is the learner again. Neither ends a test beside upstream.

        If a policy is rejected and never served, its groups become `scored` again. Instead, a group becomes `stale` if
        three rejected candidates learned from it, or `dead` if fewer than two of its runs are left; neither is used
        again. It stays `trained` if another policy that learned from it, or goes on from one that did, has served or
        may still serve, or if the gate said that the next update may continue the rejected candidate.

        A change from `canary` to `canary` sets another share of the sessions and continues the test. Each change to
        `canary` records `percent_before` and `percent`.

        Args:
            metrics: the numbers behind the decision. They are stored with the state change and added to the policy's
                metrics.
            percent: share of the sessions that a canary answers, above 0 and up to 100; for `canary` only.
            was: the state that the caller has decided on; given, no other state is changed.
            control_percent: share of the control group that begins with a champion in upstream's place, if none is set.

        Raises:
            NotFound: if there is no such policy.
            TransitionError: if `types.MOVES` does not allow the change, if the policy is not what it `was` any more, if
                there is no champion to test against, if another policy is under test, or if the canary has this share
                already.
            ConfigError: if `percent` is missing for `canary`, or given for another state.
        """
        at = time.time() if now is None else now
        with self._deciding() as connection:
            begins = state == "champion" and decisions.champion_of(connection) is None
            if begins and control_percent and not decisions.shares_of(connection):
                decisions.set_share(connection, control_percent, who, at)
            return decisions.move(connection, name, state, Cause(who, reason, at, metrics or {}), percent, was)

    def check_test(self, policy: Policy, state: PolicyState, percent: float | None = None) -> None:
        """Raise `TransitionError` if `move` would refuse to test this policy as things are now."""
        with self._database.read() as connection:
            decisions.check_test(connection, policy, state, percent)

    def end_test(
        self, name: str, *, who: str, reason: str, metrics: JSON | None = None, now: float | None = None
    ) -> Policy:
        """End the test of a policy that has not won: it becomes what `after_test` says.

        Raises `TransitionError` if it is not under test any more.
        """
        cause = Cause(who, reason, time.time() if now is None else now, metrics or {})
        with self._deciding() as connection:
            return decisions.end_test(connection, name, cause)

    def after_test(self, name: str) -> PolicyState:
        """Return what a policy under test would become without winning: `learner`, `retired` or `rejected`."""
        return self._read(decisions.after_test, name)

    def give_up(self, policy: str) -> None:
        """Continue a rejected candidate no more; its groups are used again, as `move` has it of other candidates.

        Nothing changes if a policy that goes on from it has served, may yet serve, or may itself be continued.
        """
        with self._deciding() as connection:
            decisions.give_up(connection, policy)

    def keep_metrics(self, name: str, *, metrics: JSON) -> None:
        """Add metrics to a policy's, without a change of its state; `NotFound` if there is no such policy."""
        table = tables.policies
        with self._deciding() as connection:
            if (policy := decisions.policy_of(connection, name)) is None:
                raise NotFound(f"there is no policy {name!r}; `art-patch policies` lists them")
            merged = dict(policy.metrics) | dict(metrics)
            connection.execute(update(table).where(table.c.name == name).values(metrics=merged))

    def keep_verdict(self, name: str, *, metrics: JSON, who: str, reason: str, now: float | None = None) -> None:
        """Record that a candidate won its gate and waits for a person; `NotFound` if there is no such candidate."""
        at = time.time() if now is None else now
        table = tables.policies
        with self._deciding() as connection:
            policy = decisions.policy_of(connection, name)
            if policy is None or policy.state != "candidate":
                raise NotFound(f"there is no candidate {name!r}; `art-patch status` lists the policies")
            merged = dict(policy.metrics) | dict(metrics) | {"waits": {"since": at, "reason": reason}}
            connection.execute(update(table).where(table.c.name == name).values(metrics=merged))
            note(connection, who, "verdict", {"policy": name, "reason": reason}, at)

    def note_attempt(
        self, job: str, *, policy: str, took_s: float, why: str, who: str, now: float | None = None
    ) -> None:
        """Add an audit entry about an update that made no policy, so that `art-patch report` counts its cost.

        `job` is the fingerprint of the training job, `policy` the name it would have got, and `why` the error's class.
        """
        detail = {"job": job, "policy": policy, "took_s": took_s, "why": why}
        with self._database.write(durable=True) as connection:
            note(connection, who, decisions.UPDATE_ENDED, detail, time.time() if now is None else now)

    def history(self, *, limit: int | None = 50, policy: str | None = None) -> list[JSON]:
        """Return the newest `limit` state changes of policies, or those of one policy, newest first."""
        with self._database.read() as connection:
            table = tables.promotions
            columns = [column for column in table.c if column.name not in tables.SCOPE]
            its = [] if policy is None else [table.c.policy == policy]
            rows = connection.execute(select(*columns).where(*its).order_by(table.c.id.desc()).limit(limit))
            return [dict(row) for row in rows.mappings()]

    # route

    def route(self) -> Route:
        """Return the route: where running apps send their calls."""
        return route_of(self._database.control())

    def set_engine(
        self, base_url: str | None, *, key_file: str | None = None, before: Route | None = None, who: str,
        now: float | None = None,
    ) -> bool:  # fmt: skip
        """Set the address of the engine that apps send calls to. With `None` there is no engine: calls go upstream.

        With `before`, only if the route still names the engine of that route. Return whether the address was set.
        """
        at = time.time() if now is None else now
        with self._deciding() as connection:
            # The address alone does not tell: another engine may have started at the same one.
            if before is not None and decisions.engine_of(connection) != (before.base_url, before.engine_since):
                return False
            decisions.turn_route(connection, {"base_url": base_url, "key_file": key_file, "engine_since": at})
            note(connection, who, "engine", {"base_url": base_url}, at)
            return True

    def set_mode(self, mode: Mode | None, *, canary_percent: float | None = None, who: str) -> None:
        """Overrule the mode of all apps; with `None`, each app uses the mode of its own settings again.

        Running apps read the change within their poll interval. `canary_percent` is the share of sessions that a policy
        answers in mode `canary`; without it, each app uses the share of its own settings.
        """
        with self._deciding() as connection:
            for key, value in ((MODE_KEY, mode), (CANARY_KEY, canary_percent)):
                if value is None:
                    connection.execute(delete(tables.control).where(tables.control.c.key == key))
                else:
                    decisions.set_control(connection, key, str(value))
            note(connection, who, "mode", {"mode": mode, "canary_percent": canary_percent}, time.time())

    def control_shares(self) -> tuple[tuple[float, float], ...]:
        """Return when the control group's share was set, and to how many percent, oldest first; empty if it never was.

        A share holds while a champion serves: without one, upstream answers all sessions.
        """
        with self._database.read() as connection:
            return tuple(decisions.shares_of(connection))

    def set_control_group(self, percent: float, *, who: str, now: float | None = None) -> None:
        """Set the share of the sessions that stays with upstream, so that policies can be compared with it.

        Running apps read the change within their poll interval. A larger share keeps the sessions of a smaller one.

        Raises:
            ConfigError: `percent` is not between 0 and 50, since policies must answer most sessions.
        """
        at = time.time() if now is None else now
        if not 0 <= percent <= 50:
            raise ConfigError(f"the control group has from 0 to 50 percent of the sessions, not {percent}")
        with self._deciding() as connection:
            decisions.set_share(connection, percent, who, at)

    def keep_control_look(self, look: JSON) -> None:
        """Keep what the newest comparison of the champion with the control group found, for people."""
        with self._deciding() as connection:
            decisions.set_control(connection, "control_look", json.dumps(look))

    def control_look(self) -> JSON | None:
        """Return the newest comparison of the present champion, since it serves, with the control group; or `None`."""
        with self._database.read() as connection:
            look = json.loads(decisions.control_of(connection, "control_look") or "null")
            champion = decisions.champion_of(connection)
        if look is None or champion is None or look["policy"] != champion.name:
            return None
        # It may have served before, until a rollback; its newest move is the one that let it serve again.
        return look if look["at"] >= self.history(limit=1, policy=champion.name)[0]["at"] else None

    @contextmanager
    def _deciding(self) -> Generator[Connection]:
        with self._database.write(durable=True) as connection:
            decide_alone(connection)
            yield connection


def _keep_rows(connection: Connection, rows: Sequence[TrainedRow], its: JSON) -> None:
    """Keep the rows of a new policy whose call is still there: an erasure may have ended while the policy was made."""
    calls = tables.calls.c
    there = {key for (key,) in rows_in(connection, select(calls.id), calls.id, [row.call_id for row in rows])}
    kept = [asdict(row) | dict(its) for row in rows if row.call_id in there]
    if kept:
        connection.execute(insert(tables.trained_rows), kept)


def _set_groups(connection: Connection, ids: Sequence[str], state: str, reason: str | None, policy: str | None) -> None:
    table = tables.groups
    values = {"state": state, "reason": reason} | ({"policy": policy} if policy else {})
    # In the order of their keys: two transactions that update the same groups in different orders deadlock.
    for group_id in sorted(ids):
        connection.execute(update(table).where(table.c.id == group_id).values(values))
