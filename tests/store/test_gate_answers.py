"""What both policies answered in a gate: kept by pair, replaced by a newer gate, and gone with the run of the turn."""

from __future__ import annotations

from typing import Any

import pytest

from art_patch.store import GateTurn, Store, open_store
from art_patch.store.erasure import collect
from tests.support.postgres import Execute
from tests.support.store_samples import call, info, policy

ODD = "caf\u00e9 \U0001f600 \x00 half \ud800"


def answers(*texts: str, score: float | None = 0.5) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"message": {"role": "assistant", "content": text}, "finish_reason": "stop", "score": score} for text in texts
    )


def turn(run: str, said: str, number: int = 0) -> GateTurn:
    return GateTurn(f"{run}-{number}", run, f"group-{run}", answers(said, ODD), answers("theirs", score=None))


@pytest.fixture
def full(store: Store) -> Store:
    """Runs of `u` and `v`, and a candidate that two gates have tested: against the champion and against upstream."""
    for key, user in (("u1", "u"), ("u2", "u"), ("v1", "v")):
        calls = [call(f"{key}-{number}", key, at=10.0 + number) for number in range(2)]
        store.write([info(key, user_id=user, session_id=f"s-{key}"), *calls])
    store.ledger.add_base("agent@0", "/base", "ff", who="test", now=0.0)
    store.ledger.add_candidate(policy(1), trained_on=[], who="test")
    store.gate_answers.keep(
        "agent@1", "agent@0", [turn("u1", "a"), turn("u1", "b", 1), turn("u2", "c"), turn("v1", "d")]
    )
    store.gate_answers.keep("agent@1", "upstream", [turn("u1", "e"), turn("v1", "f")])
    return store


def kept(store: Store, against: str = "agent@0") -> dict[str, list[str]]:
    found = store.gate_answers.of("agent@1", against, ["group-u1", "group-u2", "group-v1", "other"])
    return {group: [one.candidate[0]["message"]["content"] for one in turns] for group, turns in found.items()}


def test_they_come_back_as_they_went_in_and_a_newer_gate_of_both_replaces_them(full: Store, execute: Execute):
    assert full.gate_answers.of("agent@1", "agent@0", ["group-u1"]) == {
        "group-u1": [turn("u1", "a"), turn("u1", "b", 1)]
    }
    assert kept(full) == {"group-u1": ["a", "b"], "group-u2": ["c"], "group-v1": ["d"]}
    assert full.gate_answers.of("agent@0", "agent@1", ["group-u1"]) == {}
    full.gate_answers.keep("agent@1", "agent@0", [turn("u2", "new")])
    assert (kept(full), kept(full, "upstream")) == ({"group-u2": ["new"]}, {"group-u1": ["e"], "group-v1": ["f"]})
    full.gate_answers.keep("agent@1", "agent@0", [])
    assert execute("SELECT DISTINCT policy, against, project_id, agent_id FROM gate_answers") == [
        ("agent@1", "upstream", 1, 1)
    ]
    assert full.verify() == []


@pytest.mark.parametrize(("whose", "count"), [({"user": "u"}, 4), ({"session": "s-u1"}, 3), ({"trajectory": "u2"}, 1)])
def test_an_erasure_counts_them_and_takes_them_along(full: Store, execute: Execute, whose: dict[str, str], count: int):
    assert full.rights.erase(**whose, dry_run=True).gate_answers == count
    assert len(execute("SELECT 1 FROM gate_answers")) == 6
    assert full.rights.erase(**whose, who="me").gate_answers == count
    left = execute("SELECT DISTINCT trajectory_id FROM gate_answers ORDER BY 1")
    assert [key for (key,) in left] == [run.id for run in sorted(full.read.recent(), key=lambda run: run.id)]
    assert kept(full, "upstream")["group-v1"] == ["f"]
    assert full.verify() == []


def test_retention_takes_them_along(full: Store, execute: Execute):
    full.write([info("new"), call("new-0", "new", at=100.0)])
    plan = full.rights.prune(older_than_s=50.0, now=100.0, dry_run=True)
    assert (plan.trajectories, plan.calls) == (3, 6)
    assert full.rights.prune(older_than_s=50.0, now=100.0).trajectories == 3
    assert execute("SELECT 1 FROM gate_answers") == []
    assert full.verify() == []


def test_a_gate_that_ends_after_an_erasure_keeps_nothing_of_it(full: Store, url: str, execute: Execute):
    gate = open_store(url)
    asked = [turn("u1", "a"), turn("u2", "b"), turn("v1", "c")]

    def ends(_done: int, _total: int) -> None:
        gate.gate_answers.keep("agent@1", "agent@0", asked)

    full.rights.erase(user="u", who="me", progress=ends)
    assert kept(full) == {"group-v1": ["c"]}
    gate.gate_answers.keep("agent@1", "agent@0", asked)
    assert kept(full) == {"group-v1": ["c"]}
    gate.gate_answers.keep("agent@9", "agent@0", asked)  # a policy that the ledger does not have
    assert execute("SELECT DISTINCT policy FROM gate_answers") == [("agent@1",)]
    gate.close()


def test_many_of_one_run_go_in_steps(full: Store, execute: Execute, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collect, "BUDGET_S", 0.0)
    full.gate_answers.keep("agent@1", "agent@0", [turn("u1", "a")] * 1_200)
    steps: list[int] = []
    erasure = full.rights.erase(trajectory="u1", progress=lambda done, _: steps.append(len(full.verify())))
    assert (erasure.gate_answers, len(steps) > 2, set(steps)) == (1_201, True, {0})
    assert full.verify() == []


def test_verify_finds_those_of_a_policy_or_a_run_that_is_not_there(full: Store, execute: Execute):
    execute("UPDATE gate_answers SET policy = 'agent@9' WHERE trajectory_id = 'u2'")
    execute("UPDATE gate_answers SET trajectory_id = 'gone' WHERE trajectory_id = 'v1'")
    assert full.verify() == ["1 gate answers whose policy is missing", "2 gate answers whose trajectory is missing"]
