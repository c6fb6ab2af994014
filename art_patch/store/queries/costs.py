"""What a period cost: the calls that are paid by tokens, the judge, the engine and updates."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, and_, func, select

from art_patch.store.ledger.decisions import UPDATE_ENDED
from art_patch.store.schema import tables
from art_patch.types import Served

_C = tables.calls.c


def paid(connection: Connection, since: float, until: float) -> tuple[Served, ...]:
    """Return the calls by policy with what they are paid by: tokens by model, and the number of calls without any.

    As `reports.usage` counts them, without latencies: the database sums up here.
    """
    count, failed = func.count(), _C.status == "error"
    unmetered = and_(~failed, _C.prompt_tokens == 0)  # no prompt is empty: the server sent no usage
    metered = and_(~failed, _C.prompt_tokens != 0)
    sums = (func.sum(each).filter(metered) for each in (_C.prompt_tokens, _C.completion_tokens))
    query = (
        select(_C.policy, _C.requested_model, count, count.filter(failed), count.filter(unmetered))
        .add_columns(*(func.coalesce(each, 0) for each in sums))
        .where(_C.started_at >= since, _C.started_at < until, _C.shadow_of.is_(None))
        .group_by(_C.policy, _C.requested_model)
    )
    found: dict[str | None, Served] = {}
    for policy, model, *numbers in connection.execute(query):
        calls, failures, without, prompt, completion = map(int, numbers)
        its = found.get(policy, Served(policy))
        tokens = {**its.tokens, **({model: (prompt, completion)} if calls > failures + without else {})}
        sums_of = (its.calls + calls, its.failed + failures)
        found[policy] = Served(policy, *sums_of, tokens=tokens, unmetered=its.unmetered + without)
    return tuple(sorted(found.values(), key=lambda each: (-each.calls, each.policy or "")))


def others(connection: Connection, since: float, until: float) -> dict[str, Any]:
    """Return the fields of `Usage` that tell what judge, engine and updates cost, and how many runs were erased."""
    usd, unpriced = judge_cost(connection, since, until)
    judged = {"judge_usd": usd, "judge_unpriced": unpriced}
    known = {"engine_s": _engine_s(connection, since, until), "erased": _erased(connection, since)}
    return judged | known | updates_in(connection, since, until)


def _erased(connection: Connection, since: float) -> int:
    """Return how many runs were erased since then; some of them may be older."""
    table = tables.audit.c
    ended = connection.scalars(select(table.detail).where(table.action == "erased", table.at >= since))
    return sum(int(detail.get("trajectories") or 0) for detail in ended)


def judge_cost(connection: Connection, since: float, until: float) -> tuple[float, int]:
    """Return what the judge cost in this period in US dollars, and the number of its calls without a price."""
    table = tables.judgements.c
    cost = func.coalesce(func.sum(table.cost_usd), 0.0)
    unpriced = func.coalesce(func.sum(table.calls).filter(table.cost_usd.is_(None)), 0)
    usd, calls = connection.execute(select(cost, unpriced).where(table.at >= since, table.at < until)).one()
    return float(usd), int(calls)  # PostgreSQL sums whole numbers to decimals


def updates_in(connection: Connection, since: float, until: float) -> dict[str, Any]:
    """Return how many updates this period had, how long they took, and how many of them left no time or no policy."""
    table = tables.policies.c
    trained = select(table.metrics).where(table.created_at >= since, table.created_at < until, table.path.is_not(None))
    attempts = _attempts_s(connection, since, until)
    updates, untimed, update_s = 0, 0, 0.0
    for metrics in connection.scalars(trained):
        train: Mapping[str, Any] = metrics.get("train") or {}
        steps_s, took_s = _steps_s(train), train.get("took_s")
        updates += 1
        untimed += steps_s is None and took_s is None
        # `steps_s` also has the steps that an interrupted attempt made and kept; the sum of attempts also has time that
        # was lost. A killed attempt left no entry. So the larger of the two is the better estimate.
        update_s += max(steps_s or 0.0, attempts.pop(str(train.get("job")), 0.0) + (took_s or 0.0))
    return {
        "updates": updates,
        "update_s": update_s + sum(attempts.values()),
        "updates_untimed": untimed,
        "updates_lost": len(attempts),
    }


def _steps_s(train: Mapping[str, Any]) -> float | None:
    seconds = [step.get("seconds") for step in train.get("history") or ()]
    return None if not seconds or None in seconds else float(sum(seconds))


def _engine_s(connection: Connection, since: float, until: float) -> float | None:
    """Return how long an engine was announced. An engine that was killed counts until the next announcement."""
    table = tables.audit.c
    query = select(table.at, table.detail).where(table.action == "engine", table.at < until).order_by(table.id)
    up_since: float | None = None
    total: float | None = None
    for at, detail in connection.execute(query):
        total = total or 0.0
        if detail.get("base_url") is not None:
            up_since = at if up_since is None else up_since
        elif up_since is not None:
            total += max(0.0, at - max(up_since, since))
            up_since = None
    return total if total is None or up_since is None else total + (until - max(up_since, since))


def _attempts_s(connection: Connection, since: float, until: float) -> Counter[str]:
    """Return, by the job's fingerprint, how many seconds updates ran that ended in this period without a policy."""
    table = tables.audit.c
    query = select(table.detail).where(table.action == UPDATE_ENDED, table.at >= since, table.at < until)
    found: Counter[str] = Counter()
    for detail in connection.scalars(query):
        found[detail["job"]] += detail["took_s"]
    return found
