"""kill -9 before and after each step from recorded traffic to a served champion: one more cycle, and all is well.

At every moment the champion answers, and the engine holds nothing that the ledger does not know.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch.demo.judge import serve_stand_in_judge
from art_patch.pipeline import CycleConfig, CycleReport, forget_unfinished, retrain
from art_patch.policies import MANIFEST, read_json
from art_patch.policies.files import read_verified
from art_patch.promotion import ensure_loaded
from art_patch.serving import EmbeddedEngine
from art_patch.store import open_store
from tests.faults import killed
from tests.faults.killed import Death, stand_in
from tests.support.apps import FULL
from tests.support.cycles import CONFIG, Place, eager, is_short, reward
from tests.support.engines import Running, serve

PROMOTING = replace(eager(CONFIG), train=replace(CONFIG.train, checkpoint_every_s=0.0))
REJECTING = replace(PROMOTING, gate=replace(CONFIG.gate, margin=0.99))
NO_MORE = replace(REJECTING, min_groups=1_000)
"""Ends what was begun, and trains nothing anew."""
AFTER_THE_MOVE = [Death("moved", "after"), Death("unloaded", "before"), Death("unloaded", "after")]
EVERY_KILL = [Death(step, when) for step in killed.STEPS for when in ("before", "after")]
KILLS = [
    kill for kill in EVERY_KILL if FULL or kill.when == "before" or kill.step in ("published", "moved", "unloaded")
]
"""After most steps is before the next; with ART_PATCH_FULL each is tried."""


class Saga:
    """One project at one place: its engine goes on while cycles are killed and the project is put back."""

    def __init__(self, directory: Path, base: Path, running: Running, judge: str) -> None:
        self.directory, self.running, self.judge = directory / "project", running, judge
        self._kept = directory / "kept"
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["tests.faults.killed"])
        place = Place(self.directory, base, running.client)
        place.traffic()
        reward(place)
        place.store.close()
        shutil.copytree(self.directory, self._kept)

    def put_back(self) -> None:
        """Begin anew with traffic that nobody has looked at yet."""
        for name in self.running.client.models():
            if name != "agent@0":
                self.running.client.unload(name)
        shutil.rmtree(self.directory)
        shutil.copytree(self._kept, self.directory)

    def killed(self, death: Death, config: CycleConfig) -> None:
        """Run a cycle that dies there."""
        arguments = (self.directory, self.running.url, self.judge, config, death)
        process = self._processes.Process(target=killed.run, args=arguments)
        process.start()
        process.join(120)
        assert process.exitcode == -9, f"exit code {process.exitcode}: {death} was never reached"
        self.is_sound()

    def cycle(self, config: CycleConfig) -> CycleReport:
        store = open_store(f"sqlite:///{self.directory}/store.db")
        report = retrain(
            store, self.running.client, stand_in(self.judge), self.adapters, config, who="test", now=100.0,
            progress=lambda *_: None,
        )  # fmt: skip
        store.close()
        self.is_sound()
        return report

    def is_sound(self) -> None:
        """The champion answers, and what is loaded or known is whole."""
        store = open_store(f"sqlite:///{self.directory}/store.db")
        policies, champion = store.ledger.policies(), store.ledger.champion()
        assert store.verify() == []
        assert champion is not None
        assert store.ledger.route().champion == champion.name
        store.close()
        for policy in policies:
            if policy.path:
                read_verified(Path(policy.path), read_json(Path(policy.path), MANIFEST), 1 << 30)
        ensure_loaded(self.running.client, champion.name)
        assert set(self.running.client.models()) <= {policy.name for policy in policies}

    @property
    def adapters(self) -> Path:
        return self.directory / "adapters"

    def facts(self) -> dict[str, Any]:
        """What must be the same however often a cycle was killed."""
        store = open_store(f"sqlite:///{self.directory}/store.db")
        states = {policy.name: policy.state for policy in store.ledger.policies()}
        trained = len(store.read.group_ids(state="trained"))
        store.close()
        jobs = self.directory / "training"
        return {
            "states": states,
            "trained": trained > 0,
            "loaded": self.running.client.models(),
            "adapters": sorted(path.name for path in self.adapters.iterdir()),
            "jobs": sorted(path.name for path in jobs.iterdir()) if jobs.exists() else [],
        }


@pytest.fixture(scope="module")
def running_saga(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[Saga]:
    directory = tmp_path_factory.mktemp("saga")
    engine = EmbeddedEngine.from_pretrained(base, adapters_root=directory / "project" / "adapters")
    with serve(engine) as running, serve_stand_in_judge(is_short) as url:
        yield Saga(directory, base, running, url)


@pytest.fixture
def saga(running_saga: Saga) -> Saga:
    running_saga.put_back()
    return running_saga


def of(states: dict[str, str], *, loaded: list[str]) -> dict[str, Any]:
    return {"states": states, "trained": True, "loaded": loaded, "adapters": ["agent@1"], "jobs": []}


@pytest.mark.parametrize("death", [kill for kill in KILLS if kill.step != "unloaded"], ids=str)
def test_a_promotion_that_was_killed_ends_with_the_next_cycle(saga: Saga, death: Death):
    saga.killed(death, PROMOTING)
    report = saga.cycle(PROMOTING)
    assert report.outcome == ("nothing to do" if death in AFTER_THE_MOVE else "promoted"), report.reason
    assert saga.facts() == of({"agent@0": "retired", "agent@1": "champion"}, loaded=["agent@0", "agent@1"])


@pytest.mark.parametrize("death", [kill for kill in KILLS if kill.step in ("moved", "unloaded")], ids=str)
def test_a_rejection_that_was_killed_ends_with_the_next_cycle(saga: Saga, death: Death):
    saga.killed(death, REJECTING)
    report = saga.cycle(NO_MORE)
    assert report.outcome == ("nothing to do" if death in AFTER_THE_MOVE else "rejected"), report.reason
    left = of({"agent@0": "champion", "agent@1": "rejected"}, loaded=["agent@0"])
    assert saga.facts() == left | {"trained": False}  # its groups wait for the next candidate


@pytest.mark.slow
def test_a_cycle_that_is_killed_again_and_again_still_ends(saga: Saga):
    for death in EVERY_KILL[::3]:
        if death.step != "unloaded":
            saga.killed(death, PROMOTING)
    assert saga.cycle(PROMOTING).outcome == "promoted"
    assert saga.facts() == of({"agent@0": "retired", "agent@1": "champion"}, loaded=["agent@0", "agent@1"])


def test_what_was_published_and_never_registered_is_swept_when_nobody_goes_on_with_it(saga: Saga):
    saga.killed(Death("in the ledger", "before"), PROMOTING)
    assert saga.facts()["adapters"] == ["agent@1"]
    other = replace(PROMOTING, train=replace(PROMOTING.train, seed=7))
    assert saga.cycle(other).outcome == "promoted"  # trained anew, under a name that nobody has ever asked for
    assert saga.facts() == of({"agent@0": "retired", "agent@1": "champion"}, loaded=["agent@0", "agent@1"])


def test_erasing_deletes_what_was_published_and_never_registered(saga: Saga):
    saga.killed(Death("in the ledger", "before"), PROMOTING)
    assert forget_unfinished(saga.directory, ["agent@0"])
    assert saga.facts()["adapters"] == []
    assert not (saga.directory / "training").exists()


@pytest.mark.slow
def test_a_candidate_of_a_champion_that_has_changed_is_rejected(saga: Saga):
    saga.killed(Death("loaded", "after"), PROMOTING)
    store = open_store(f"sqlite:///{saga.directory}/store.db")
    store.ledger.move("agent@1", "champion", who="a person", reason="I know it")
    store.close()
    place = Place.__new__(Place)
    place.store, place.client = open_store(f"sqlite:///{saga.directory}/store.db"), saga.running.client
    place.traffic("agent@1", seed=1)
    reward(place)
    saga.killed(Death("loaded", "before"), PROMOTING)
    place.store.ledger.move("agent@0", "champion", who="a person", reason="I was wrong")
    place.store.close()
    saga.cycle(NO_MORE)
    assert saga.facts()["states"] == {"agent@0": "champion", "agent@1": "retired", "agent@2": "rejected"}
