"""Promotion over a store and an engine in memory: what is loaded, what is let go, and what the route says after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from art_patch.errors import EngineError, StoreError, TransitionError
from art_patch.promotion import challenge, check_promotion, promote, reject, unwanted, wanted
from art_patch.promotion.transitions import change_share, give_up, rollback
from art_patch.store import Store, open_store
from art_patch.types import Policy
from tests.support.memory_engine import Engine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """agent@0 serves, four candidates wait."""
    opened = open_store(f"sqlite:///{tmp_path}/store.db")
    opened.ledger.add_base("agent@0", "/base", "ff", who="test", now=0.0)
    for step in (1, 2, 3, 4):
        name = f"agent@{step}"
        policy = Policy(name, "/base", "ff", "candidate", float(step), path=f"/a/{name}", parent="agent@0")
        opened.ledger.add_candidate(policy, trained_on=[], who="test")
    yield opened
    opened.close()


def test_a_challenger_is_proven_before_the_route_names_it(store: Store):
    engine = Engine(broken="agent@2")
    with pytest.raises(EngineError, match="agent@2 is broken"):
        challenge(store.ledger, engine, "agent@2", state="canary", percent=5, who="me", reason="try")
    assert store.ledger.challenger() is None
    challenge(store.ledger, engine, "agent@1", state="canary", percent=5, who="me", reason="try")
    assert engine.served == ["agent@0", "agent@1"]
    assert store.ledger.route().challenger == "agent@1"
    with pytest.raises(StoreError, match="art-patch policies"):
        challenge(store.ledger, engine, "agent@9", state="shadow", who="me", reason="try")


def test_a_test_that_cannot_begin_is_refused_before_anything_is_loaded(store: Store):
    engine = Engine()
    challenge(store.ledger, engine, "agent@1", state="canary", percent=5, who="me", reason="try")
    for name, percent, words in (("agent@2", 5, "agent@1 is canary already"), ("agent@1", 5, "answers 5 %")):
        with pytest.raises(TransitionError, match=words):
            check_promotion(store.ledger, name, "canary", percent=percent)
        with pytest.raises(TransitionError, match=words):
            challenge(store.ledger, engine, name, state="canary", percent=percent, who="me", reason="try")
    assert engine.served == ["agent@0", "agent@1"]
    store.ledger.move("agent@1", "champion", who="me", reason="won")
    store.ledger.move("agent@1", "learner", who="me", reason="worse than upstream")
    with pytest.raises(TransitionError, match="no champion serves"):
        check_promotion(store.ledger, "agent@2", "shadow")


def test_what_is_retired_serves_by_a_test_or_a_rollback_alone(store: Store):
    engine = Engine()
    promote(store.ledger, engine, "agent@1", who="me", reason="won")
    promote(store.ledger, engine, "agent@2", who="me", reason="won")
    with pytest.raises(TransitionError, match=r"agent@1 --canary 5.*rollback --to agent@1"):
        promote(store.ledger, engine, "agent@1", who="me", reason="by hand")
    challenge(store.ledger, engine, "agent@1", state="canary", percent=5, who="me", reason="again")
    promote(store.ledger, engine, "agent@1", who="me", reason="won again")
    assert rollback(store.ledger, engine, who="me", reason="back").name == "agent@2"
    store.ledger.move("agent@2", "learner", who="me", reason="worse than upstream")
    store.ledger.move("agent@2", "retired", who="me", reason="no more")
    with pytest.raises(TransitionError, match="agent@2 is retired"):
        promote(store.ledger, engine, "agent@2", who="me", reason="by hand")


def test_a_challenger_stays_loaded_until_its_test_ends(store: Store):
    engine = Engine()
    challenge(store.ledger, engine, "agent@1", state="shadow", who="me", reason="try")
    assert wanted(store.ledger) == ["agent@0", "agent@1"]
    assert unwanted(store.ledger, engine.served) == []
    promote(store.ledger, engine, "agent@2", who="me", reason="by hand")
    assert wanted(store.ledger) == ["agent@2", "agent@0"]
    assert engine.served == ["agent@0", "agent@2"]


def test_who_takes_upstreams_place_begins_with_a_control_group(store: Store):
    promote(store.ledger, Engine(), "agent@1", who="me", reason="by hand")
    assert store.ledger.route().control_percent == 0.0  # it has replaced another policy, not upstream
    store.ledger.move("agent@1", "learner", who="me", reason="worse than upstream")
    promote(store.ledger, Engine(), "agent@2", state="learner", who="me", reason="by hand")
    assert store.ledger.route().control_percent == 0.0
    promote(store.ledger, Engine(), "agent@2", who="me", reason="by hand")
    assert store.ledger.route().control_percent == 5.0
    store.ledger.set_control_group(0, who="me")
    store.ledger.move("agent@2", "learner", who="me", reason="worse than upstream")
    promote(store.ledger, Engine(), "agent@3", who="me", reason="by hand")
    assert store.ledger.route().control_percent == 0.0


@pytest.mark.parametrize("method", ["models", "unload"])
def test_a_champion_is_promoted_though_the_engine_fails_while_it_clears_up(
    store: Store, method: str, monkeypatch: pytest.MonkeyPatch
):
    """Nobody may read of a failure where the champion has changed."""
    engine = Engine("agent@1")
    challenge(store.ledger, engine, "agent@1", state="shadow", who="me", reason="try")
    engine.load("agent@2")
    served = engine.models()

    def fail(*_: object) -> list[str]:
        champion = store.ledger.champion()
        if champion is not None and champion.name == "agent@2":
            raise EngineError("the engine is down")
        return served

    monkeypatch.setattr(engine, method, fail)
    assert promote(store.ledger, engine, "agent@2", who="me", reason="by hand").name == "agent@2"
    champion = store.ledger.champion()
    assert champion is not None
    assert champion.name == "agent@2"


def test_the_champion_is_loaded_first(store: Store):
    for step in (1, 2, 3):
        store.ledger.move(f"agent@{step}", "champion", who="me", reason="won")
    store.ledger.move("agent@4", "canary", who="me", reason="try", percent=5)
    assert wanted(store.ledger) == ["agent@3", "agent@0", "agent@1", "agent@2", "agent@4"]


@pytest.mark.parametrize("served", [True, False])
def test_a_challenger_is_given_up_and_unloaded_if_it_is_there(store: Store, served: bool):
    engine = Engine(*["agent@1"] * served)
    assert give_up(store.ledger, engine, who="me", reason="?") is None
    store.ledger.move("agent@1", "canary", who="me", reason="try", percent=5)
    assert give_up(store.ledger, engine, who="me", reason="worse", metrics={"p": 0.01}) == "agent@1"
    assert engine.served == ["agent@0"]
    (last,) = store.ledger.history(limit=1)
    assert (last["policy"], last["to_state"], last["metrics"]) == ("agent@1", "rejected", {"p": 0.01})


def test_a_share_changes_without_an_engine_and_only_a_canary_has_one(store: Store):
    store.ledger.move("agent@1", "canary", who="me", reason="try", percent=5)
    change_share(store.ledger, "agent@1", 20, who="me", reason="more")
    assert (store.ledger.route().challenger, store.ledger.route().challenger_percent) == ("agent@1", 20)
    for name, error, words in (
        ("agent@2", TransitionError, "agent@2 is candidate and has no share"),
        ("agent@9", StoreError, "art-patch policies"),
    ):
        with pytest.raises(error, match=words):
            change_share(store.ledger, name, 20, who="me", reason="more")


def test_what_is_rejected_is_let_go_and_never_gone_back_to(store: Store):
    follow(store, 1, 2)
    store.ledger.move("agent@3", "canary", who="me", reason="try", percent=5)
    engine = Engine("agent@1", "agent@2", "agent@3")
    with pytest.raises(TransitionError, match="art-patch rollback"):
        reject(store.ledger, engine, "agent@2", who="me", reason="leaks")
    assert reject(store.ledger, engine, "agent@3", who="me", reason="rude")
    assert store.ledger.route().challenger is None
    assert reject(store.ledger, engine, "agent@1", who="me", reason="leaks")
    assert engine.served == ["agent@0", "agent@2"]
    assert not reject(store.ledger, engine, "agent@4", who="me", reason="never loaded")
    assert not reject(store.ledger, engine, "agent@0", who="me", reason="too weak")  # all others stand on it
    assert engine.served == ["agent@0", "agent@2"]
    with pytest.raises(StoreError, match="no earlier champion"):
        rollback(store.ledger, engine, who="me", reason="worse")
    with pytest.raises(TransitionError, match="already rejected"):
        reject(store.ledger, None, "agent@1", who="me", reason="again")


def test_who_was_promoted_meanwhile_is_not_given_up(store: Store):
    store.ledger.move("agent@1", "canary", who="me", reason="try", percent=5)

    class Late:
        """The ledger as it looked a moment ago."""

        challenger = staticmethod(lambda: before)
        end_test = store.ledger.end_test

    before = store.ledger.challenger()
    store.ledger.move("agent@1", "champion", who="somebody", reason="won")
    with pytest.raises(TransitionError, match="is champion"):
        give_up(Late(), None, who="me", reason="worse")  # type: ignore[arg-type]
    champion = store.ledger.champion()
    assert champion is not None and champion.name == "agent@1"


class Slow(Engine):
    """While a policy is proven, somebody else does something."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._meanwhile = meanwhile

    def chat(self, **body: Any) -> dict[str, Any]:
        self._meanwhile()
        return super().chat(**body)


def test_a_rollback_while_the_policy_is_proven_is_not_overruled(store: Store):
    def give_it_up() -> None:
        assert give_up(store.ledger, None, who="somebody", reason="rude") is not None

    promote(store.ledger, Engine(), "agent@1", who="me", reason="won")
    promote(store.ledger, Engine(), "agent@2", who="me", reason="won")
    challenge(store.ledger, Engine(), "agent@1", state="canary", percent=5, who="me", reason="again")
    with pytest.raises(TransitionError, match=r"agent@1 is retired and was canary: somebody else"):
        promote(store.ledger, Slow(give_it_up), "agent@1", who="me", reason="won again")
    store.ledger.move("agent@2", "learner", who="me", reason="worse than upstream")
    challenge(store.ledger, Engine(), "agent@2", state="canary", percent=5, who="me", reason="beside upstream")
    with pytest.raises(TransitionError, match=r"agent@2 is learner and was canary: somebody else"):
        promote(store.ledger, Slow(give_it_up), "agent@2", who="me", reason="won")
    with pytest.raises(TransitionError, match=r"agent@3 is canary and was candidate: somebody else"):
        challenge(
            store.ledger,
            Slow(lambda: store.ledger.move("agent@3", "canary", who="somebody", reason="all", percent=50)),
            "agent@3", state="canary", percent=5, who="me", reason="try",
        )  # fmt: skip
    assert store.ledger.route().champion is None
    assert store.ledger.route().challenger_percent == 50


def test_a_champion_who_was_retired_once_is_not_retired_by_the_end_of_its_test(store: Store):
    follow(store, 1, 2)
    challenge(store.ledger, Engine(), "agent@1", state="canary", percent=5, who="me", reason="again")
    promote(store.ledger, Engine(), "agent@1", who="somebody", reason="won")
    with pytest.raises(TransitionError, match="agent@1 is champion, and no test of it is running"):
        store.ledger.end_test("agent@1", who="me", reason="worse")
    assert store.ledger.route().champion == "agent@1"


def test_a_share_does_not_begin_a_test_that_somebody_else_has_ended(store: Store):
    store.ledger.move("agent@0", "learner", who="me", reason="upstream answers")
    store.ledger.move("agent@0", "canary", who="me", reason="try", percent=5)
    canary = store.ledger.policy("agent@0")
    give_up(store.ledger, None, who="somebody", reason="worse")

    class Late:
        """The ledger as it looked a moment ago."""

        policy = staticmethod(lambda _: canary)
        move = store.ledger.move

    with pytest.raises(TransitionError, match="agent@0 is learner and was canary"):
        change_share(Late(), "agent@0", 20, who="me", reason="more")  # type: ignore[arg-type]
    assert store.ledger.route().challenger is None


def follow(store: Store, *steps: int | str) -> list[str]:
    """Promote these steps, or go back at `back`; return who serves after each."""
    served: list[str] = []
    for step in steps:
        if step == "back":
            served.append(rollback(store.ledger, None, who="me", reason="worse").name)
        elif (policy := store.ledger.policy(f"agent@{step}")) is not None and policy.state == "retired":
            served.append(rollback(store.ledger, None, to=policy.name, who="me", reason="better").name)
        else:
            served.append(promote(store.ledger, Engine(), f"agent@{step}", who="me", reason="better").name)
    return served


@pytest.mark.parametrize(
    ("moves", "served"),
    [
        ((1, "back", 2, "back"), (1, 0, 2, 0)),  # not to 1, which was gone back from
        ((1, 2, "back", "back"), (1, 2, 1, 0)),
        ((1, 2, 0, "back", "back", "back"), (1, 2, 0, 2, 1, 0)),  # the base, which was gone back to by name
        ((1, 2, "back", 3, "back", "back"), (1, 2, 1, 3, 1, 0)),
    ],
)
def test_one_goes_back_to_whom_the_champion_replaced(store: Store, moves: Any, served: Any):
    assert follow(store, *moves) == [f"agent@{step}" for step in served]


def test_who_was_retired_alone_and_serves_again_is_not_its_own_predecessor(store: Store):
    follow(store, 1)
    store.ledger.move("agent@1", "retired", who="me", reason="worse than upstream")
    assert follow(store, 1, "back") == ["agent@1", "agent@0"]


def test_nobody_goes_back_to_what_was_rejected_since(store: Store):
    follow(store, 1, 2, 3)
    store.ledger.move("agent@2", "rejected", who="me", reason="never again")
    assert follow(store, "back", "back") == ["agent@1", "agent@0"]
    with pytest.raises(StoreError, match="no earlier champion"):
        follow(store, "back")


def test_an_engine_keeps_whom_one_would_go_back_to(store: Store):
    follow(store, 1, "back", 2, "back", 3, "back", 4)
    assert wanted(store.ledger)[:2] == ["agent@4", "agent@0"]
    follow(store, "back", 1, 2)
    assert "agent@1" in wanted(store.ledger)


def test_going_back_to_a_policy_that_is_served_asks_nothing_of_it(store: Store):
    class Busy(Engine):
        def chat(self, **body: Any) -> dict[str, Any]:
            raise EngineError("it took too long")

    follow(store, 1, 2)
    with pytest.raises(EngineError, match="too long"):
        rollback(store.ledger, Busy(), who="me", reason="worse")  # agent@1 has to be loaded, and proven
    assert rollback(store.ledger, Busy("agent@1"), who="me", reason="worse").name == "agent@1"
