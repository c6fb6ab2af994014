"""One policy against another as the gate compares them: a verdict, and everything stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from art_patch.errors import ConfigError, EngineError, StoreError
from art_patch.gate import GateConfig, Verdict
from art_patch.pipeline import evaluate, run_explicit_update, run_file_update, single_steps, train_policy
from art_patch.pipeline.cycle_run import CycleConfig
from art_patch.store import Store
from art_patch.training import TrainConfig
from art_patch.types import Policy
from tests.support.ruled_gate import COUNT, RuledEngine, RuledJudge, Says, rates, says


class LoadingEngine(RuledEngine):
    """Serves what it loaded, and answers by a rule."""

    def __init__(self, says: Says, *, last: Callable[[], None] = lambda: None) -> None:
        super().__init__(says)
        self.served, self.last = ["agent@0"], last

    def models(self) -> list[str]:
        return list(self.served)

    def load(self, name: str) -> None:
        self.served.append(name)

    def unload(self, name: str) -> None:
        if name not in self.served:
            raise EngineError("not served")
        self.served.remove(name)

    def chat(self, **body: Any) -> dict[str, Any]:
        if body["model"] not in self.served:
            raise EngineError("not served")
        self.last()
        return super().chat(**body)


@pytest.fixture
def ledger(store: Store) -> Store:
    """The base serves; two candidates."""
    store.ledger.add_base("agent@0", "base", "0" * 64, who="test")
    for step in (1, 2):
        policy = Policy(f"agent@{step}", "base", "0" * 64, "candidate", 2.0, "/none", "agent@0")
        store.ledger.add_candidate(policy, trained_on=[], who="test")
    return store


def compared(
    store: Store, directory: Path, policy: str, against: str | None = None, *, engine: Any = None
) -> tuple[str, Verdict]:
    config = CycleConfig(gate=GateConfig(min_scenarios=COUNT))
    return evaluate(
        store, engine or LoadingEngine(says), RuledJudge(rates), directory / "adapters", config, policy, against,  # type: ignore[arg-type]
        who="test", progress=lambda *_: None, now=9.0,
    )  # fmt: skip


def test_the_better_one_is_named_and_nothing_changes(ledger: Store, tmp_path: Path):
    before = ledger.ledger.policies(), ledger.ledger.route(), ledger.ledger.history(limit=50)
    engine = LoadingEngine(says)
    other, verdict = compared(ledger, tmp_path, "agent@1", engine=engine)
    assert (other, verdict.promote, verdict.metrics["scenarios"]) == ("agent@0", True, COUNT)
    assert verdict.metrics["difference"] == pytest.approx(0.3)
    other, verdict = compared(ledger, tmp_path, "agent@2", "agent@1", engine=engine)
    assert (other, verdict.promote, verdict.metrics["difference"]) == ("agent@1", False, pytest.approx(-0.3))
    assert engine.served == ["agent@0"]
    assert before == (ledger.ledger.policies(), ledger.ledger.route(), ledger.ledger.history(limit=50))
    held_out = ledger.read.groups(state="formed", held_out=True)
    assert len(held_out) == COUNT
    assert ledger.gate_answers.of("agent@1", "agent@0", [group.id for group in held_out]) == {}
    assert ledger.verify() == []


def test_what_serves_by_then_stays_loaded_and_what_does_not_is_unloaded_after_a_failure(ledger: Store, tmp_path: Path):
    def promote() -> None:
        if ledger.ledger.champion().name == "agent@0":  # type: ignore[union-attr]
            ledger.ledger.move("agent@1", "champion", who="test", reason="meanwhile")

    engine = LoadingEngine(says, last=promote)
    compared(ledger, tmp_path, "agent@1", "agent@2", engine=engine)
    assert engine.served == ["agent@0", "agent@1"]

    def fail() -> None:
        if "agent@2" in broken.served:
            raise EngineError("broken")

    broken = LoadingEngine(says, last=fail)
    with pytest.raises(EngineError, match="broken"):
        compared(ledger, tmp_path, "agent@2", engine=broken)
    assert broken.served == ["agent@0"]


def test_who_is_not_there_or_the_same_is_named(ledger: Store, tmp_path: Path):
    for policy, against, error, words in (
        ("agent@0", None, ConfigError, "compared with itself; name another with --against"),
        ("agent@7", None, StoreError, "no policy 'agent@7'"),
        ("agent@1", "agent@7", StoreError, "no policy 'agent@7'"),
    ):
        with pytest.raises(error, match=words):
            compared(ledger, tmp_path, policy, against)


@pytest.mark.parametrize(("asked", "done"), [("candidate", "champion"), ("champion", "champion"), ("base", "base")])
def test_an_update_by_hand_never_continues_what_a_gate_rejected(
    ledger: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Any, done: str
):
    # It serves without a gate.
    seen: list[str] = []

    def train_groups(run: Any, *_: Any, **__: Any) -> tuple[None, str]:
        run.metrics["train"] = {}
        seen.append(run.config.train.start)
        return None, "nothing"

    monkeypatch.setattr(train_policy, "train_groups", train_groups)
    run_explicit_update(
        ledger, LoadingEngine(says), tmp_path / "adapters", TrainConfig(start=asked), [],  # type: ignore[arg-type]
        who="test", progress=lambda *_: None,
    )  # fmt: skip

    def train_on_files(_store: Any, _adapters: Any, config: CycleConfig, *_: Any, **__: Any) -> None:
        seen.append(config.train.start)
        raise ConfigError("nothing")

    monkeypatch.setattr(single_steps, "train_on_files", train_on_files)
    with pytest.raises(ConfigError, match="nothing"):
        run_file_update(
            ledger, LoadingEngine(says), tmp_path / "adapters", TrainConfig(start=asked), [],  # type: ignore[arg-type]
            who="test", progress=lambda *_: None,
        )  # fmt: skip
    assert seen == [done, done]


def test_an_update_by_hand_takes_no_calls_from_upstream(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While upstream is the champion, what a script trains is the learner."""
    store.ledger.add_base("agent@0", "base", "0" * 64, who="test", upstream_answers=True)
    trained = Policy("agent@1", "base", "0" * 64, "candidate", 2.0, "/none", "agent@0")

    def train_groups(run: Any, *_: Any, **__: Any) -> tuple[Policy, None]:
        run.metrics["train"] = {}
        store.ledger.add_candidate(trained, trained_on=[], who="test")
        return trained, None

    monkeypatch.setattr(train_policy, "train_groups", train_groups)
    made = run_explicit_update(
        store, LoadingEngine(says), tmp_path / "adapters", TrainConfig(), [],  # type: ignore[arg-type]
        who="test", progress=lambda *_: None,
    )  # fmt: skip
    assert made.champion == "agent@1"
    route = store.ledger.route()
    assert (route.champion, route.learner) == (None, "agent@1")
