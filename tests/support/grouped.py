"""A project with groups in several states, as the pages on groups and reviews show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from art_patch._lib.ids import derived_id
from art_patch.settings import Settings, load_settings
from art_patch.store import Store, open_store
from art_patch.types import Call, Choice, Group, Judgement, Policy, Score, TrainedRow, Trajectory, TrajectoryInfo

ASKED = {"role": "user", "content": "What do 3 loaves cost?"}


def run(store: Store, key: str, answer: str, *, policy: str | None = "agent@0", lookup: str = "", **about: Any) -> None:
    """A run of two calls: it looks something up, and answers."""
    named = {"name": "price", "arguments": '{"item": "loaf"}'}
    asks = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"of-{key}", "type": "function", "function": named}],
    }
    found = {"role": "tool", "tool_call_id": f"of-{key}", "content": lookup or "4"}
    last = Choice(0, {"role": "assistant", "content": answer}, "stop")
    values: dict[str, Any] = {"policy": policy, "prompt_tokens": 3, "completion_tokens": 4, "duration_ms": 5.0}
    first = Call(f"{key}-1", key, 1.0, "m", (ASKED,), (Choice(0, asks, "tool_calls"),), **values)
    second = Call(f"{key}-2", key, 2.0, "m", (ASKED, asks, found), (last,), **values)
    store.write([TrajectoryInfo(key, 1.0, **about), first, second])


def judged(group: str, run: str, value: float, words: str = "") -> Score:
    """The judge's score of a run in a group."""
    key = derived_id("judged", group, run)
    return Score(key, run, "ruler", value, "ruler", 3.0, comment=words, group_id=group, rubric="r1", judge="judge")


def grouped(home: Path, name: str = "bot", **how: Any) -> Settings:
    """The project: `g1` is scored and was judged twice, `g2` quarantined, `g3` dead, and `g4` is held out."""
    settings = load_settings(home=home, project=name, **how)
    settings.directory.mkdir(parents=True)
    store = open_store(settings.store_url, project=name)
    answers = {
        "g1": {"a": "They cost 12.", "b": "They cost 13.", "c": "I <b>cannot</b> say."},
        "g2": {"d": "Twelve.", "e": "Thirteen."},
        "g3": {"f": "12", "g": "12"},
        "g4": {"h": "yes", "i": "no"},
    }
    for group, its in answers.items():
        for key, answer in its.items():
            run(store, key, answer, policy=None if key == "c" else "agent@0")
        members = tuple(Trajectory(TrajectoryInfo(key, 1.0), ()) for key in its)
        store.ledger.add_groups([Group(group, f"task {group}", "same_task", members, held_out=group == "g4")], now=5.0)
    store.write(
        [judged("g1", "a", 1.0, "right"), judged("g1", "b", 0.5, "off by one"), judged("g1", "c", 0.0, "gave up")]
    )
    store.write([judged("g2", "d", 0.4), judged("g2", "e", 0.6), judged("g3", "f", 0.7), judged("g3", "g", 0.7)])
    store.ledger.set_groups(["g2"], "quarantined", reason="the judge prefers another one in the other order")
    store.ledger.set_groups(["g3"], "dead", reason="all siblings were scored alike")
    ways = {
        derived_id("both ways", "g1", key): pair for key, pair in {"a": [1, 1], "b": [0.6, 0.4], "c": [0, 0]}.items()
    }
    store.ledger.add_judgement(Judgement("j1", "g1", 6.0, "judge", "r1", "score", "ok", facts={"order": "shuffled"}))
    facts = {"order": "reversed", "both_ways": ways, "noise": 0.05, "siblings": 3}
    store.ledger.add_judgement(Judgement("j2", "g1", 7.0, "judge", "r1", "second pass", "ok", facts=facts))
    turned = {derived_id("both ways", "g2", key): pair for key, pair in {"d": [0.2, 0.6], "e": [0.7, 0.5]}.items()}
    facts = {"order": "reversed", "both_ways": turned}
    store.ledger.add_judgement(Judgement("j3", "g2", 8.0, "judge", "r1", "second pass", "ok", facts=facts))
    store.ledger.add_base("agent@0", "/base", "ff", who="test", now=1.0)
    candidate = Policy("agent@1", "/base", "ff", "candidate", 9.0, path="/agent@1", parent="agent@0")
    rows = [
        TrainedRow("a-2", 0, "a", "g1", 1.5),
        TrainedRow("b-2", 0, "b", "g1", -0.5),
        TrainedRow("a-1", 0, "a", "g1", 1.0),
    ]
    store.ledger.add_candidate(candidate, trained_on=["g1"], rows=rows, who="test")
    store.close()
    return settings
