"""Policies: the family tree, one policy's story and tests, and what a decision about one would bring."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

from pydantic import Field

from art_patch import insights, pipeline, promotion, store, types
from art_patch.errors import ArtPatchError, ConfigError, NotFound
from art_patch.settings import Settings
from art_patch.types import JSON
from art_patch.web.gates import gate_facts, prompts, scale_of
from art_patch.web.projects import Asked, Query

_TEST_FRESH_S = 2.0
_FRESH_S = 30.0
_LONG_S = 300.0  # sums over a month, which take seconds on a large store
_SEEN_S = 90.0  # an app process that has reported within this time runs
_MOVES = 20

What = Literal["promote", "canary", "shadow", "reject", "rollback"]
_MOVES_TO: dict[What, types.PolicyState] = {
    "canary": "canary", "shadow": "shadow", "promote": "champion", "reject": "rejected",
}  # fmt: skip


class PoliciesQuery(Query):
    """How many policies are listed."""

    limit: int = Field(60, ge=1, le=1_000, description="Number of policies, the newest first.")


class AnswersQuery(Query):
    """Whose answers are shown beside the policy's."""

    beside: str = Field("", description="Another policy, or `upstream`. Default: the policy's parent.")


class DecideQuery(Query):
    """The decision."""

    what: What = Field(description="What is decided.")
    policy: str = Field("", description="Name of the policy; of a rollback, none.")
    percent: float | None = Field(None, description="Share of the sessions of a canary, in percent.")
    to: str = Field("", description="Who answers after a rollback; default: who answered before.")


def facts(asked: Asked) -> JSON:
    """Return the family's facts."""
    ledger = asked.store.ledger
    found, route = ledger.policies(), ledger.route()
    depth = _depths(found, route.champion or route.learner)
    shown = sorted(found, key=lambda each: (each.created_at, each.step), reverse=True)[: asked.query.limit]
    policies: list[dict[str, Any]] = [
        {
            "name": each.name,
            "state": each.state,
            "parent": each.parent,
            "created_at": each.created_at,
            "depth": depth[each.name],
            "percent": insights.percent_of(each, route),
            "imported": types.IMPORTED in each.metrics,
            "waits": "waits" in each.metrics and each.state == "candidate",
            "gate": gate_facts(each.metrics.get("gate")),
        }
        for each in shown
    ]
    return {
        "champion": route.champion,
        "mode": route.mode or asked.settings.mode,
        "tested": {"policy": route.challenger, "state": route.challenger_state, "percent": route.challenger_percent}
        if route.challenger
        else None,
        "policies": policies,
        "count": len(found),
        "scale": scale_of(each["gate"] for each in policies),
        "control": _control(asked, route),
        "history": shown_moves(ledger.history(limit=_MOVES)),
    }


def one(asked: Asked) -> JSON:
    """Return the facts of one policy."""
    name, opened, kept = asked.ids["id"], asked.store, asked.project.kept
    _known(opened, name)
    learned = kept(f"learned {name}", _FRESH_S, lambda: opened.reports.learned(name))
    story, route = insights.story_of(opened, name, now=asked.now, learned=learned), opened.ledger.route()
    policy, metrics = story.policy, cast("dict[str, Any]", story.policy.metrics)

    def test() -> JSON | None:
        return insights.running_test(asked.settings, opened, now=asked.now)

    gates = {key: found for key in ("gate", "upstream_gate") if (found := gate_facts(metrics.get(key))) is not None}
    return {
        "name": name,
        "state": policy.state,
        "parent": policy.parent,
        "created_at": policy.created_at,
        "percent": insights.percent_of(policy, route),
        "mode": route.mode or asked.settings.mode,
        "rows": [list(row) for row in story.rows(asked.now) if row[0] not in ("gate", "canary")],
        "parents": list(story.parents),
        "children": list(story.children),
        "served_s": story.served_s,
        "why": _why(story),
        "waits": metrics.get("waits") if policy.state == "candidate" else None,
        "gates": gates,
        "scale": scale_of(gates.values()),
        "prompts": {key: prompts(name, its, opened) for key, its in gates.items()},
        "test": kept(f"test {name}", _TEST_FRESH_S, test) if route.challenger == name else None,
        "watched": (watch := metrics.get("watch")),
        "watched_words": insights.canary_in_words(watch) if watch else None,
        "control": _control(asked, route) if route.champion == name else None,
        "canary_percent": asked.settings.canary_percent if route.canary_percent is None else route.canary_percent,
        "may": sorted(_may(policy, route)),
        "history": shown_moves(story.history),
    }


def answers(asked: Asked) -> JSON:
    """Return prompts of the app's traffic that the policy and another one both answered, with both answers."""
    name, opened = asked.ids["id"], asked.store
    policy = _known(opened, name)
    beside = asked.query.beside or policy.parent or types.UPSTREAM_ARM
    if beside != types.UPSTREAM_ARM:
        _known(opened, beside)

    def ids() -> tuple[int, list[tuple[tuple[str, str], tuple[str, str]]]]:
        rival = None if beside == types.UPSTREAM_ARM else beside
        count, pairs = opened.browse.answered_by_both(name, rival, limit=10)
        return count, [((a.trajectory_id, a.id), (b.trajectory_id, b.id)) for a, b in pairs]

    # The ids alone are kept: a run that was erased since must not be shown.
    found = asked.project.kept_later(f"both {name} {beside}", _FRESH_S, ids)
    count, pairs = found or (0, [])
    runs = opened.read.trajectories(sorted({key for pair in pairs for key, _ in pair}))
    calls = {call.id: call for run in runs for call in run.calls}
    shown = [(calls[a], calls[b]) for (_, a), (_, b) in pairs if a in calls and b in calls]
    return {
        "name": name,
        "beside": beside,
        "known": [each.name for each in opened.ledger.policies() if each.name != name] + [types.UPSTREAM_ARM],
        "is_read": found is not None,
        "prompts": count,
        "pairs": [
            {"prompt": insights.words_of(a.messages[-1]), "a": _answer(a), "b": _answer(b)}
            for a, b in shown
            if a.messages
        ],
    }


def _known(opened: store.Store, name: str) -> types.Policy:
    if (policy := opened.ledger.policy(name)) is None:
        raise NotFound(f"there is no policy {name!r}; `art-patch policies` lists them")
    return policy


def _answer(call: types.Call) -> JSON:
    texts = [insights.words_of(choice.message) for choice in call.choices]
    about = {"duration_ms": call.duration_ms, "tokens": call.completion_tokens}
    return {"run": call.trajectory_id, "texts": texts, **about}


def decide(asked: Asked) -> JSON:
    """Return in words what a decision would bring, or why it is refused; nothing is changed."""
    query, ledger = asked.query, asked.store.ledger
    refused, words, careful = None, list[str](), list[str]()
    rewards: JSON | None = {}
    try:
        words, pair, chosen = decided(asked.settings, ledger, query)
        careful, rewards = _careful(asked, pair, chosen)
    except ArtPatchError as error:
        refused = str(error)
    return {
        **query.model_dump(),
        "refused": refused,
        "words": words,
        "careful": careful,
        "rewards": rewards,
        "apps": len(asked.store.read.apps(since=asked.now - _SEEN_S)),
        "state": found.state if query.policy and (found := ledger.policy(query.policy)) is not None else None,
    }


class Decided(NamedTuple):
    """What a decision brings."""

    words: list[str]
    pair: tuple[str, str] | None = None  # who answers before and after it, if another one does
    policy: types.Policy | None = None  # that is promoted, or tested


def decided(
    settings: Settings, ledger: store.Ledger, query: DecideQuery, *, who: str | None = None, reason: str = ""
) -> Decided:
    """Make a decision, as the commands of these names do; without `who`, only return what it would bring.

    Raises what the decision raises.
    """
    asked: dict[str, Any] = {"who": who or "", "dry_run": who is None}
    if query.what == "rollback":
        done = pipeline.roll_back(
            settings, ledger, to=query.to or None, reason=reason or "rolled back by hand", **asked
        )
        pair = (done.before, done.target) if done.before != done.target else None
        return Decided([each for each in insights.rolled_back_in_words(done) if each], pair)
    if not query.policy:
        raise ConfigError("name the policy")
    if query.what == "reject":
        was = pipeline.reject_named(settings, ledger, query.policy, reason=reason, **asked)
        rest = f"{was.champion or types.UPSTREAM_ARM} serves{'; a running engine unloads it' if who is None else ''}"
        return Decided([f"{query.policy} is rejected for good, was {was.was}", rest])
    if query.what == "canary" and query.percent is None:
        raise ConfigError("say on which share of the sessions it is tested, in percent")
    made = pipeline.promote_named(
        settings, ledger, query.policy, percent=query.percent if query.what == "canary" else None,
        shadow=query.what == "shadow", reason=reason or None, **asked,
    )  # fmt: skip
    pair = (made.before or types.UPSTREAM_ARM, query.policy) if made.state == "champion" else None
    return Decided([f"{query.policy} {insights.promoted_in_words(made)}"], pair, made.policy)


def _careful(asked: Asked, pair: tuple[str, str] | None, chosen: types.Policy | None) -> tuple[list[str], JSON | None]:
    """Return the warnings, and the own rewards of both policies; `None` while they are being read."""
    careful: list[str] = []
    if chosen is not None and (by := insights.rejected_there(chosen)) is not None:
        careful.append(f"{chosen.name} was rejected where it comes from, {by}")
    if pair is None:
        return careful, {}
    opened, now = asked.store, asked.now
    rewards = asked.project.kept_later(
        f"own rewards {' '.join(pair)}", _LONG_S, lambda: insights.own_rewards(opened, *pair, now=now)
    )
    if rewards is not None and (words := insights.worse_in_words(rewards, *pair)) is not None:
        careful.append(words)
    return careful, rewards


def _why(story: insights.PolicyStory) -> JSON | None:
    """Return the newest move, which says why the policy is what it is."""
    if not story.history:
        return None
    return {key: story.history[0][key] for key in ("at", "who", "reason", "from_state", "to_state")}


def shown_moves(moves: list[JSON]) -> list[JSON]:
    """Return moves without their metrics, but with the share of the sessions that a canary was given."""
    return [
        {key: value for key, value in move.items() if key != "metrics"}
        | {"percent": move["metrics"].get("percent") if move["to_state"] == "canary" else None}
        for move in moves
    ]


def _control(asked: Asked, route: types.Route) -> JSON | None:
    """Return the control group's share, and what the newest comparison with it found; `None` without one."""
    if not route.control_percent:
        return None
    look = asked.store.ledger.control_look()
    return {"percent": route.control_percent, "look": promotion.look_in_words(look) if look else None}


def _may(policy: types.Policy, route: types.Route) -> set[What]:
    """Return the decisions that a policy's state allows; the page of a decision says if something else is in the way.

    `rollback` is to this policy, or ends its test.
    """
    after = types.MOVES[policy.state]
    may = set[What](what for what, state in _MOVES_TO.items() if state in after)
    if policy.state == "retired":
        may.discard("promote")
    if policy.state in ("retired", "champion") or policy.name == route.challenger:
        may.add("rollback")
    return may


def _depths(found: tuple[types.Policy, ...], leader: str | None) -> dict[str, int]:
    """Return how far each policy stands from the line that leads to the champion, or to the learner.

    A policy goes on with its parent's line, unless another child of the same parent has it.
    """
    children: dict[str | None, list[types.Policy]] = {}
    known = {each.name: each for each in found}
    for each in found:
        children.setdefault(each.parent if each.parent in known else None, []).append(each)
    on_line, at = set[str](), leader
    while at is not None and at in known and at not in on_line:
        on_line.add(at)
        at = known[at].parent
    depths = dict[str, int]()
    for each in sorted(found, key=lambda each: (each.created_at, each.step)):
        siblings = children.get(each.parent if each.parent in known else None, [])
        heir = next((one.name for one in siblings if one.name in on_line), siblings[-1].name if siblings else None)
        above = depths.get(each.parent or "", 0)
        depths[each.name] = above if each.name == heir or each.parent not in known else above + 1
    return depths
