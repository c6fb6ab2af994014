"""What is still compared with a model of upstream's after another one has taken its name: nothing may be.

A store with sessions of both models, and held-out prompts that each answered. Counted are the calls and prompts of the
earlier model that the control group's test, a canary beside upstream, the gate against upstream and the report use
afterwards, and those of the later one, which all of them must use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from art_patch import insights
from art_patch._lib.ids import new_id
from art_patch.gate import GateConfig
from art_patch.pipeline.cycle_run import Cycle, CycleConfig
from art_patch.pipeline.gate_run import held_out_for
from art_patch.store import Store, open_store
from art_patch.types import UPSTREAM_ARM, Call, Choice, Group, Score, Trajectory, TrajectoryInfo

BEGAN, CHANGED, ENDED = 1_000.0, 200_000.0, 400_000.0
SESSIONS = 400


def _record(store: Store, policy: str, *, began: float) -> None:
    """Sessions of one call, every second one upstream's, and forty held-out prompts."""
    records: list[Any] = []
    for number in range(SESSIONS):
        at, run, kept = began + 10 + number * (ENDED - began - 1_000) / SESSIONS, new_id(), number % 2 == 0
        model = ("gpt-x-2026-01-01" if at < CHANGED else "gpt-x-2026-09-01") if kept else None
        only = Choice(0, {"role": "assistant", "content": f"answer {number}"}, "stop")
        asked = ({"role": "user", "content": f"question {number}"},)
        call = Call(
            new_id(), run, at, "gpt-x", asked, (only,), policy=None if kept else policy, in_control_group=kept,
            answered_by=model, duration_ms=100.0, completion_tokens=4,
            untrainable="answered by upstream" if kept else None,
        )  # fmt: skip
        info = TrajectoryInfo(run, at, "explicit", session_id=run)
        records += [info, call, Score(new_id(), run, "reward", 1.0, "user", at + 5)]
        if number % 10 == 0:
            store.write([info, call])
            group = Group(new_id(), f"task {number}", "single", (Trajectory(info, (call,)),), held_out=True)
            store.ledger.add_groups([group])
    store.write(records)


def alias_drift(directory: Path) -> Mapping[str, float]:
    """Return how many comparisons with the earlier model are used, and how many with the later one."""
    old, later = 0, dict[str, int]()

    def count(name: str, times: list[float]) -> None:
        nonlocal old
        old += sum(at < CHANGED for at in times)
        later[name] = sum(at >= CHANGED for at in times)

    with_champion = open_store(f"sqlite:///{directory}/champion.db")
    with_champion.ledger.add_base("agent@0", "/base", "ff", who="benchmark", now=BEGAN)
    with_champion.ledger.set_control_group(50, who="benchmark", now=BEGAN)
    _record(with_champion, "agent@0", began=BEGAN)
    traffic = with_champion.evidence.control_traffic(champion="agent@0", now=ENDED)
    count("control group", [call.at for call in traffic.calls if call.policy == UPSTREAM_ARM])
    report = insights.make_report(with_champion.reports.usage(since=0.0, until=ENDED), lambda _: None)
    rewarded = next(each for each in report.comparisons if each.kind == "reward")
    later["report"] = rewarded.theirs_scored
    old += max(0, rewarded.theirs_scored - SESSIONS // 4 - 1)
    with_champion.close()

    beside = open_store(f"sqlite:///{directory}/beside.db")
    beside.ledger.add_base("agent@0", "/base", "ff", who="benchmark", upstream_answers=True, now=BEGAN)
    beside.ledger.move("agent@0", "canary", who="benchmark", reason="test", percent=50, now=BEGAN)
    _record(beside, "agent@0", began=BEGAN)
    traffic = beside.evidence.arm_traffic(challenger="agent@0", champion=None, state="canary", since=BEGAN)
    count("canary", [call.at for call in traffic.calls if call.policy == UPSTREAM_ARM])
    nobody = cast("Any", None)
    run = Cycle(beside, nobody, CycleConfig(), lambda *_: None, ENDED, nobody, directory, "benchmark")
    turns = held_out_for(run, GateConfig(), seed=0, of_upstream=True).turns
    count("gate", [turn.call.started_at for turn in turns])
    beside.close()
    return {"alias_drift": old, "alias_drift_later": min(later.values())}
