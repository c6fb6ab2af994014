"""Numbers by day, by promotion and by scenario: `art-patch days` and `art-patch scenarios`.

Only what the store has is counted. A call of the judge without a price is counted as such, never as free.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

from sqlalchemy import and_, func, or_, select

from art_patch.store.backends.database import Part
from art_patch.store.queries.browse import reward_of
from art_patch.store.queries.costs import judge_cost, updates_in
from art_patch.store.queries.loading import rows_in
from art_patch.store.queries.read import CALL_COUNTS
from art_patch.store.queries.usage import Recent, Reports
from art_patch.store.schema import tables
from art_patch.types import COPIES

_C, _T, _G = tables.calls.c, tables.trajectories.c, tables.groups.c


@dataclass(frozen=True, slots=True)
class Day:
    """A period: who answered how well, fallbacks to upstream, upstream's tokens, and the judge's calls and cost."""

    since: float
    until: float
    answered: tuple[Recent, ...]
    fell_back: int  # calls that upstream answered instead of a policy
    copies: int  # of calls, which a policy answered in the background: nobody saw these answers
    prompt_tokens: int  # of upstream's calls, as far as it said so
    completion_tokens: int
    judge_calls: int
    judge_tokens: int
    judge_usd: float
    judge_unpriced: int  # calls whose price is unknown; `judge_usd` lacks them


@dataclass(frozen=True, slots=True)
class Totals:
    """Numbers of the app's own calls and runs, without copies, and of scenarios."""

    calls: int
    calls_by_policy: int
    calls_fell_back: int
    calls_not_ok: int
    runs: int
    scenarios: int

    def __add__(self, other: "Totals") -> "Totals":
        """Return the totals of both periods."""
        return Totals(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Promotion:
    """A policy that became champion, and what was spent since the promotion before it, on rejected ones, too."""

    policy: str
    at: float
    since: float | None  # the promotion before; `None`: all that was spent before this one
    judge_usd: float
    judge_unpriced: int
    updates: int
    update_s: float
    updates_untimed: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """A task: its runs without copies, their mean reward, and mean rewards by the policy that answered a whole run."""

    key: str
    held_out: bool
    runs: int
    rewarded: int
    reward: float | None
    by_policy: dict[str, float]  # `upstream` stands for the provider
    example: str  # id of one of its runs


class Series(Part):
    """Numbers by day, by promotion and by scenario."""

    def days(self, bounds: Sequence[float]) -> tuple[Day, ...]:
        """Return the periods between these times, seconds since the epoch, in ascending order."""
        reports, found, j = Reports(self._database), list[Day](), tables.judgements.c
        for since, until in pairwise(bounds):
            own = _C.shadow_of.is_(None)
            upstreams = and_(_C.policy.is_(None), own)
            calls = select(
                func.count(_C.fallback).filter(own),
                func.count(_C.shadow_of),
                func.coalesce(func.sum(_C.prompt_tokens).filter(upstreams), 0),
                func.coalesce(func.sum(_C.completion_tokens).filter(upstreams), 0),
            ).where(_C.started_at >= since, _C.started_at < until)
            judged = select(
                func.coalesce(func.sum(j.calls), 0), func.coalesce(func.sum(j.prompt_tokens + j.completion_tokens), 0)
            ).where(j.at >= since, j.at < until)
            answered = reports.recent(since=since, until=until)
            with self._database.read() as connection:
                fell_back, copies, prompt, completion = map(int, connection.execute(calls).one())
                asked, judge_tokens = map(int, connection.execute(judged).one())
                usd, unpriced = judge_cost(connection, since, until)
            answers = (answered, fell_back, copies, prompt, completion)
            found.append(Day(since, until, *answers, asked, judge_tokens, usd, unpriced))
        return tuple(found)

    def totals(self, *, since: float = 0.0, until: float = math.inf) -> Totals:
        """Return how many calls and runs began then, and how many scenarios were seen for the first time."""
        calls = select(*CALL_COUNTS.values()).where(
            _C.shadow_of.is_(None), _C.started_at >= since, _C.started_at < until
        )
        runs = select(func.count()).where(_T.origin.not_in(COPIES), _T.started_at >= since, _T.started_at < until)
        if since:  # the last call, if there was one, came later, and has an index
            runs = runs.where(or_(_T.last_call_at >= since, _T.last_call_at.is_(None)))
        seen = tables.scenarios.c.first_seen_at
        scenarios = select(func.count()).where(seen >= since, seen < until)
        with self._database.read() as connection:
            rest = [connection.scalar(each) or 0 for each in (runs, scenarios)]
            return Totals(*connection.execute(calls).one(), *rest)

    def written(self, bounds: Sequence[float]) -> tuple[int, ...]:
        """Return how many calls, with copies, started within each of the periods between these ascending times."""
        with self._database.read() as connection:
            counts = [
                select(func.count()).select_from(tables.calls).where(_C.started_at >= since, _C.started_at < until)
                for since, until in pairwise(bounds)
            ]
            return tuple(connection.scalar(each) or 0 for each in counts)

    def promotions(self) -> tuple[Promotion, ...]:
        """Return the promotions of policies that were trained, oldest first, with what each of them cost."""
        moves, its = tables.promotions.c, tables.policies.c
        query = (
            select(moves.policy, moves.at)
            .join_from(tables.promotions, tables.policies, its.name == moves.policy)
            .where(moves.to_state == "champion", moves.from_state != "retired", its.path.is_not(None))
            .order_by(moves.id)
        )
        found: list[Promotion] = []
        with self._database.read() as connection:
            for policy, at in connection.execute(query).all():
                since = found[-1].at if found else None
                begin = -math.inf if since is None else since
                spent = updates_in(connection, begin, at)
                usd, unpriced = judge_cost(connection, begin, at)
                counts = (spent["updates"], spent["update_s"], spent["updates_untimed"])
                found.append(Promotion(policy, at, since, usd, unpriced, *counts))
        return tuple(found)

    def scenarios(self, *, limit: int) -> tuple[int, tuple[Scenario, ...]]:
        """Return the number of scenarios, and those with the most runs."""
        table = tables.scenarios
        count = func.count(_T.id).label("runs")
        own = _T.origin.not_in(COPIES)
        most = (
            select(_G.scenario_key, count, func.max(_T.id))
            .join_from(tables.groups, tables.trajectories, _T.group_id == _G.id)
            .where(own)
            .group_by(_G.scenario_key)
            .order_by(count.desc(), _G.scenario_key)
            .limit(limit)
        )
        with self._database.read() as connection:
            total = connection.scalar(select(func.count()).select_from(table)) or 0
            found = {key: (runs, example) for key, runs, example in connection.execute(most)}
            sizes = {key: runs for key, (runs, _) in found.items()}
            held = {
                key: held_out
                for key, held_out in rows_in(
                    connection, select(table.c.key, table.c.held_out), table.c.key, list(sizes)
                )
            }
            rewards = (
                select(_G.scenario_key, _T.id, reward_of())
                .join_from(tables.groups, tables.trajectories, _T.group_id == _G.id)
                .where(own)
            )
            given: dict[str, dict[str, float]] = {key: {} for key in sizes}
            for key, run, reward in rows_in(connection, rewards, _G.scenario_key, list(sizes)):
                if reward is not None:
                    given[key][run] = reward
            runs = [run for its in given.values() for run in its]
            who = select(
                _C.trajectory_id, func.min(_C.policy), func.max(_C.policy), func.count(_C.policy), func.count()
            ).group_by(_C.trajectory_id)
            answered = {
                run: first or "upstream"
                for run, first, last, ours, all_calls in rows_in(connection, who, _C.trajectory_id, runs)
                if first == last and ours in (0, all_calls)
            }
        return total, tuple(_scenario(key, bool(held.get(key)), *found[key], given[key], answered) for key in found)


def _scenario(
    key: str, held_out: bool, runs: int, example: str, rewards: dict[str, float], answered: dict[str, str]
) -> Scenario:
    by: dict[str, list[float]] = {}
    for run, reward in rewards.items():
        if run in answered:
            by.setdefault(answered[run], []).append(reward)
    means = {policy: sum(values) / len(values) for policy, values in sorted(by.items())}
    mean = sum(rewards.values()) / len(rewards) if rewards else None
    return Scenario(key, held_out, runs, len(rewards), mean, means, example)
