"""Two projects in one store, and everything that one of them can try on the other: `mine` on `theirs`.

What `theirs` has is full of the word `okapi`, which no attempt ever says; its ids say `zebra`, or are the same as those
of `mine`. An attempt has crossed if `okapi` comes back, if it returns something else than in a store without
`theirs`, or if a row of `theirs` is another one afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import select

from art_patch._lib.process import Owner
from art_patch.errors import ArtPatchError
from art_patch.store import Filter, GateTurn, GroupFilter, Lease, SentItem, Server, Store
from art_patch.store.schema.tables import whole
from art_patch.types import AppReport, Correction, Group, Judgement, Policy, Score, SpanInfo, TrainedRow, Trajectory
from tests.support.store_samples import call, info

MARK = "okapi"
OWNER = Owner("o", "host", 1)
Attempt = Callable[[Store], Any]


def fill(store: Store, whose: str, mark: str) -> None:
    """The same for both: a run of its own, and one with an id, a user and a message that the other has, too."""
    for key in ("shared", f"{whose}-run"):
        about = info(key, user_id="u", session_id=mark, tags=(mark,), name=mark, scenario_key="task")
        said = ({"role": "user", "content": "the same in both"}, {"role": "user", "content": f"{mark} {key}"})
        call_id = f"{key}-call"
        records = [
            about,
            call(call_id, key, messages=said, policy="agent@0", prompt_token_ids=tuple(range(300))),
            SpanInfo(f"{key}-span", key, mark, 1.0),
            Score(f"{key}-score", key, "reward", 0.5, "user", 2.0, comment=mark),
            Correction(f"{key}-right", key, 3.0, "user", {"role": "assistant", "content": mark}),
        ]
        store.write([*records, AppReport(f"{whose}-app", 4.0, {"calls": 1, "said": mark})])
        group = Group(f"{key}-group", f"{mark} task", "same_task", (Trajectory(about, ()),))
        store.ledger.add_groups([group], now=1.0)
    store.ledger.add_wordings({"shared": (f"{mark} task", whose == "zebra")}, now=1.0)
    store.consent.withdraw(f"{whose}-user", who=mark, now=1.0)
    store.ledger.add_judgement(Judgement(f"{whose}-judged", "shared-group", 1.0, mark, "r", "score", "valid"))
    store.ledger.add_base("agent@0", f"/{mark}", "ff", who=mark, now=1.0)
    store.ledger.set_engine("http://127.0.0.1:9/v1", key_file=f"/{mark}", who=mark, now=1.0)
    theirs = [call(f"{whose}-{n}", f"{whose}-run", n, policy=None, answered_by=f"{mark}-{n}") for n in (1.5, 1.6)]
    store.write(theirs)
    candidate = Policy("agent@1", f"/{mark}", "ff", "candidate", 2.0, path=f"/{mark}/agent@1", parent="agent@0")
    row = TrainedRow("shared-call", 0, "shared", "shared-group", 1.0, 1.0)
    store.ledger.add_candidate(candidate, trained_on=["shared-group"], rows=[row], who=mark)
    store.gate_answers.keep("agent@1", "agent@0", gate_turns(mark))
    if whose == "zebra":
        store.ledger.add_candidate(
            Policy("zebra@1", f"/{mark}", "ff", "candidate", 3.0), trained_on=["zebra-run-group"], who=mark
        )
        store.ledger.move("agent@1", "canary", percent=10.0, who=mark, reason=mark, now=4.0)
    store.leases.take(store.leases.read("cycle"), OWNER, who=mark, now=1.0)
    store.servers.announce(f"http://{mark}/v1", OWNER, now=1.0)
    with store.transfers.note_export(f"/{mark}.jsonl", "chat", who=mark, now=1.0) as note:
        note.add(["shared"])
    store.sent.add("tracker", [SentItem("shared", mark, "shared")], now=1.0)
    if whose == "zebra":
        store.search.extend()


def gate_turns(said: str) -> list[GateTurn]:
    answers = ({"message": {"role": "assistant", "content": said}, "finish_reason": "stop", "score": 0.5},)
    return [GateTurn("shared-call", "shared", "shared-group", answers, answers)]


def rows_of(store: Store, project: str) -> Mapping[str, Any]:
    """Every row of a project."""
    with store._database.read() as connection:
        key = connection.scalar(select(whole.projects.c.id).where(whole.projects.c.name == project))
        return {
            name: sorted(map(repr, connection.execute(select(table).where(table.c.project_id == key))))
            for name, table in whole.metadata.tables.items()
            if "project_id" in table.c
        }


RUNS, GROUPS = ["zebra-run", "shared"], ["zebra-run-group", "shared-group"]
EVERYTHING = Filter(shadows=True)


def arms(store: Store, state: Any) -> Any:
    return store.evidence.arm_traffic(challenger="agent@0", champion="agent@1", state=state, since=0.0)


READS: dict[str, Attempt] = {
    "read.trajectories": lambda s: s.read.trajectories(RUNS),
    "read.recent": lambda s: s.read.recent(limit=100),
    "read.known": lambda s: s.read.known(RUNS),
    "read.ungrouped": lambda s: s.read.ungrouped(settled_before=9e9, ended=RUNS),
    "read.group_ids": lambda s: s.read.group_ids(state="formed"),
    "read.groups": lambda s: s.read.groups(state="trained"),
    "read.groups_of": lambda s: s.read.groups_of(GROUPS),
    "read.members": lambda s: s.read.members(GROUPS),
    "read.arrivals": lambda s: s.read.arrivals(["u"]),
    "read.calls_of_apps": lambda s: s.read.calls_of_apps(since=0.0, until=9e9),
    "read.known_scenarios": lambda s: s.read.known_scenarios(["shared", f"{MARK} task"]),
    "read.apps": lambda s: s.read.apps(since=0.0),
    "read.counts": lambda s: s.read.counts(),
    "changes.first_call_at": lambda s: s.changes.first_call_at(),
    "changes.marks": lambda s: s.changes.marks() | {"moves": s.changes.marks()["moves"][0]},  # not when it was written
    "browse.ids": lambda s: s.browse.ids(EVERYTHING),
    "browse.ids of a user": lambda s: s.browse.ids(Filter(user="u")),
    "browse.ids of a group": lambda s: s.browse.ids(Filter(group="zebra-run-group")),
    "browse.ids of a policy": lambda s: s.browse.ids(Filter(policy="agent@0", status="ok", min_reward=0.1)),
    "browse.ids of a model": lambda s: s.browse.ids(Filter(model=f"{MARK}-1.5", error="x", slower_than_s=0.0)),
    "browse.worst": lambda s: (s.browse.worst(EVERYTHING, "reward"), s.browse.worst(EVERYTHING, "latency", among=RUNS)),
    "browse.moment_of": lambda s: s.browse.moment_of(1),
    "search.find": lambda s: (s.search.find([MARK], EVERYTHING), s.search.find(["the same"], EVERYTHING)),
    "search.lag": lambda s: s.search.lag(),
    "browse.count": lambda s: s.browse.count(EVERYTHING),
    "browse.groups": lambda s: s.browse.groups(EVERYTHING),
    "browse.resolve": lambda s: (s.browse.resolve("zebra"), s.browse.resolve("shared")),
    "browse.sessions_like": lambda s: (s.browse.sessions_like(MARK), s.browse.sessions_like("")),
    "browse.summaries": lambda s: s.browse.summaries(RUNS, openings=True),
    "browse.answered_by_both": lambda s: s.browse.answered_by_both("agent@0", None, limit=10),
    "evidence.arm_traffic canary": lambda s: arms(s, "canary"),
    "evidence.arm_traffic shadow": lambda s: arms(s, "shadow"),
    "evidence.corrections": lambda s: s.evidence.corrections(RUNS),
    "evidence.lessons": lambda s: [s.evidence.lessons(run) for run in RUNS],
    "evidence.corrected": lambda s: s.evidence.corrected(since=0.0, limit=10),
    "evidence.rewarded_alone": lambda s: s.evidence.rewarded_alone(since=0.0, limit=10),
    "evidence.control_traffic": lambda s: s.evidence.control_traffic(champion="agent@0", now=9e9),
    "evidence.upstream_change": lambda s: s.evidence.upstream_change(),
    "evidence.opinions": lambda s: s.evidence.opinions(["reward"]),
    "reports.usage": lambda s: s.reports.usage(since=0.0, until=9e9),
    "reports.spent": lambda s: s.reports.spent(since=0.0, until=9e9),
    "series.written": lambda s: s.series.written((0.0, 1.0, 9e9)),
    "series.totals": lambda s: (s.series.totals(until=2.0), s.series.totals(since=0.5)),
    "series.days": lambda s: s.series.days((0.0, 1.0, 2.0, 9e9)),
    "series.promotions": lambda s: s.series.promotions(),
    "series.scenarios": lambda s: s.series.scenarios(limit=9),
    "reports.groups": lambda s: s.reports.groups(),
    "groups.page": lambda s: s.groups.page(GroupFilter()),
    "groups.page of a state": lambda s: s.groups.page(GroupFilter(state="trained", held_out=False)),
    "groups.page of a scenario": lambda s: s.groups.page(GroupFilter(scenario=f"{MARK} task"), before="z"),
    "groups.page of a policy": lambda s: s.groups.page(GroupFilter(policy="zebra@1")),
    "groups.states": lambda s: s.groups.states(),
    "groups.scores": lambda s: dict(s.groups.scores(RUNS)),
    "groups.taught": lambda s: [s.groups.taught(group, RUNS) for group in GROUPS],
    "groups.to_review": lambda s: (s.groups.to_review(), s.groups.to_review(before="z")),
    "groups.members": lambda s: s.groups.members(GROUPS),
    "groups.second_passes": lambda s: s.groups.second_passes(GROUPS),
    "groups.ends": lambda s: s.groups.ends(RUNS),
    "groups.there": lambda s: s.groups.there(["zebra-run-score", "shared-score"]),
    "audit.entries": lambda s: [(one.id, one.who, one.action) for one in s.audit.entries(actions=["move", "engine"])],
    "ledger.policies": lambda s: s.ledger.policies(),
    "ledger.policy": lambda s: (s.ledger.policy("zebra@1"), s.ledger.policy("agent@1")),
    "ledger.champion": lambda s: s.ledger.champion(),
    "ledger.champions": lambda s: s.ledger.champions(),
    "ledger.challenger": lambda s: s.ledger.challenger(),
    "ledger.history": lambda s: [{k: v for k, v in one.items() if k != "id"} for one in s.ledger.history()],
    "ledger.route": lambda s: s.ledger.route(),
    "gate_answers.of": lambda s: dict(s.gate_answers.of("agent@1", "agent@0", GROUPS)),
    "consent.withdrawn": lambda s: s.consent.withdrawn(),
    "consent.learned_from": lambda s: s.consent.learned_from(RUNS),
    "consent.left_out": lambda s: s.consent.left_out(),
    "servers.all": lambda s: s.servers.all(),
    "leases.read": lambda s: s.leases.read("cycle"),
    "transfers.exports": lambda s: [(one.path, one.who) for one in s.transfers.exports()],
    "transfers.groups_of": lambda s: s.transfers.groups_of(RUNS),
    "transfers.bases": lambda s: s.transfers.bases(),
    "sent.digests": lambda s: s.sent.digests("tracker", RUNS),
    "rights.erase dry": lambda s: s.rights.erase(user="u", who="me", dry_run=True).calls,
    "rights.prune dry": lambda s: s.rights.prune(keep=0, dry_run=True),
}

WRITES: dict[str, Attempt] = {
    "write a run of theirs": lambda s: s.write([info("zebra-run", user_id="me"), call("zebra-run-call", "zebra-run")]),
    "write a call into theirs": lambda s: s.write([call("new", "zebra-run"), call("shared-call", "shared")]),
    "write scores of theirs": lambda s: s.write([Score("zebra-run-score", "zebra-run", "reward", 0.0, "user", 9.0)]),
    "write a correction": lambda s: s.write([Correction("zebra-run-right", "zebra-run", 9.0, "user", {})]),
    "write a model of upstream's": lambda s: s.write(
        [info("zebra-run", user_id="me"), call("own", "zebra-run", 9.0, policy=None, answered_by="mine")]
    ),
    "write a report": lambda s: s.write([AppReport("zebra-app", 9e9, {"calls": 0})]),
    "ledger.set_groups": lambda s: s.ledger.set_groups(GROUPS, "dead"),
    "ledger.note_cycle": lambda s: s.ledger.note_cycle(now=9.0),
    "ledger.add_wordings": lambda s: s.ledger.add_wordings({"shared": ("theirs", True)}, now=9.0),
    "ledger.add_groups": lambda s: s.ledger.add_groups([Group("g2", "t", "x", (Trajectory(info("zebra-run"), ()),))]),
    "ledger.move theirs": lambda s: s.ledger.move("zebra@1", "rejected", who="me", reason="bad"),
    "ledger.move the same name": lambda s: s.ledger.move("agent@1", "rejected", who="me", reason="bad"),
    "ledger.keep_verdict": lambda s: s.ledger.keep_verdict("zebra@1", metrics={}, who="me", reason="good"),
    "ledger.set_engine": lambda s: s.ledger.set_engine(None, who="me"),
    "ledger.set_mode": lambda s: s.ledger.set_mode("off", who="me"),
    "ledger.add_base": lambda s: s.ledger.add_base("zebra@0", "/mine", "ff", who="me", now=5.0),
    "gate_answers.keep": lambda s: s.gate_answers.keep("agent@1", "agent@0", gate_turns("mine")),
    "gate_answers.keep of theirs": lambda s: s.gate_answers.keep("zebra@1", "agent@0", gate_turns("mine")),
    "consent.withdraw": lambda s: s.consent.withdraw("u", who="me", now=5.0),
    "consent.give": lambda s: s.consent.give("zebra-user", who="me", now=5.0),
    "consent.spread": lambda s: (s.write([info("shared", learn=False)]), s.consent.spread()),
    "consent.note_start": lambda s: s.consent.note_start("serve"),
    "servers.announce": lambda s: s.servers.announce("http://mine/v1", OWNER, now=2.0),
    "servers.renew": lambda s: s.servers.renew(Server("http://mine/v1", OWNER, 1.0, 1.0), now=3.0),
    "servers.remove": lambda s: s.servers.remove(Server("http://mine/v1", OWNER, 1.0, 1.0)),
    "leases.take": lambda s: s.leases.take(s.leases.read("cycle"), OWNER, who="me", now=2.0),
    "leases.renew": lambda s: s.leases.renew(Lease("cycle", 1, 0, OWNER), now=3.0),
    "leases.release": lambda s: s.leases.release(Lease("cycle", 1, 0, OWNER)),
    "transfers.add_groups": lambda s: s.transfers.add_groups(
        {"zebra-run": dict(id="shared-group", scenario_key="t", how="x", held_out=True, created_at=1.0, state="dead")}
    ),
    "sent.add": lambda s: s.sent.add("tracker", [SentItem("shared", "mine", "shared")], now=9.0),
    "search.extend": lambda s: (s.search.extend(), s.search.extend(thorough=True)),
    "search.find more": lambda s: [s.search.find([words], EVERYTHING) for words in (f"{MARK[:2]}*", '"the same"')],
    "rights.erase a run of theirs": lambda s: s.rights.erase(trajectory="zebra-run", who="me").calls,
    "rights.erase the same run": lambda s: s.rights.erase(trajectory="shared", who="me").calls,
    "rights.erase the same user": lambda s: s.rights.erase(user="u", who="me").exports and None,
    "rights.prune": lambda s: s.rights.prune(keep=0, who="me").calls,
    "search.drop": lambda s: s.search.drop(),
    "maintain.vacuum": lambda s: s.maintain.vacuum() and None,
}  # fmt: skip


def crossed(mine: Store, alone: Store, theirs: Store, attempt: Attempt) -> str | None:
    """Try it on the store with both and on the one without `theirs`; return how it crossed."""
    before, found = rows_of(theirs, "theirs"), []
    for store in (mine, alone):
        try:
            found.append(repr(attempt(store)))
        except ArtPatchError as error:
            found.append(f"{type(error).__name__}: {error}")
    if MARK in found[0]:
        return f"it says {found[0]}"
    if found[0] != found[1]:
        return f"{found[0]} and not {found[1]}"
    return None if rows_of(theirs, "theirs") == before else "rows of theirs are changed"
