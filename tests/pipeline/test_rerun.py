"""Held-out scenarios that two policies run again, in real processes of a real app against a real engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch._lib.ids import new_id
from art_patch.gate import GateConfig, Repeated, Turn
from art_patch.grouping import ReplayConfig
from art_patch.pipeline import forget_unfinished
from art_patch.pipeline.cycle_run import Cycle, CycleConfig
from art_patch.pipeline.gate_run import judge_both, run_gate
from art_patch.rewards.checks import make_check
from art_patch.store import Store
from art_patch.types import Call, Choice, Group, Policy, Score, Trajectory, TrajectoryInfo
from tests.support.cycles import Place
from tests.support.factory import make_call, make_trajectory
from tests.support.ruled_gate import RuledJudge, failed
from tests.support.tiny import make_tiny_adapter

AGENT = """
import os
import art_patch as art
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="sk-x", max_retries=0)


@art.replayable
def answer(question):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}], max_tokens=6)
    of_candidate = art.status().champion == "agent@1"
    if "rewarded" in question:
        art.reward(30.0 if of_candidate else 10.0)
    if "fails" in question and of_candidate:
        raise ValueError("as it does")
    if "exits" in question and not of_candidate:
        os._exit(3)
"""


@pytest.fixture
def config(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CycleConfig]:
    """A gate that may run the functions of `agent.py` again."""
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)]))
    environment = {"project": "agent", "home": str(tmp_path / "home"), "store": place.url}
    environment |= {"base_url": f"{place.client.base_url}/v1"}
    replay = ReplayConfig(timeout_s=60.0, environment=environment)
    yield CycleConfig(replay=replay, gate=GateConfig(run_samples=1, samples=1, collapse=None, min_scenarios=5))


def held_out(store: Store, question: str, **offer: Any) -> None:
    key = new_id()
    metadata = {"replay": {"target": "agent:answer", "args": [question], "kwargs": {}} | offer} if offer else {}
    info = TrajectoryInfo(key, 1.0, "explicit", user_id="u", metadata={"n": 7} | metadata)
    message = {"role": "assistant", "content": "recorded"}
    prompt = ({"role": "user", "content": question},)
    call = Call(new_id(), key, 1.0, "m", prompt, (Choice(0, message, "stop"),), params={"max_tokens": 6})
    store.write([info, replace(call, untrainable="answered by upstream")])
    store.ledger.add_groups([Group(new_id(), question, "single", (Trajectory(info, (call,)),), held_out=True)])


def by_candidate(run: Trajectory) -> float | None:
    """Who ran it; of turns nothing."""
    if "replay_of" not in run.info.metadata:
        return None
    assert (run.info.metadata["n"], run.info.user_id) == (7, "u")
    return float({call.policy for call in run.calls} == {"agent@1"})


def test_both_policies_run_it_again_and_nothing_of_that_stays(place: Place, base: Path, config: CycleConfig):
    make_tiny_adapter(place.adapters, base)
    candidate = Policy("agent@1", str(base), "0" * 64, "candidate", 2.0, path="/none", parent="agent@0")
    champion = place.store.ledger.champion()
    assert champion is not None
    for question in ("it exits", "it fails", "rewarded, two", "rewarded, one"):  # run from the newest to the oldest
        held_out(place.store, question, redacted=False)
    held_out(place.store, "redacted", redacted=True)
    held_out(place.store, "not offered")
    before = place.store.read.counts()
    (place.adapters.parent / "gate").mkdir()
    (place.adapters.parent / "gate" / "candidate.db").write_text("of a gate that was killed")

    judge = RuledJudge(lambda answer, place: 0.5)
    run = Cycle(
        place.store, judge, replace(config, checks=(make_check(by_candidate),)), lambda *_: None, 9.0, place.client,
        place.adapters, "test",
    )  # fmt: skip
    place.store.ledger.add_candidate(candidate, trained_on=[], who="test")
    verdict = run_gate(run, candidate, champion)

    kept = place.store.gate_answers.of("agent@1", champion.name, [each["group"] for each in verdict.metrics["results"]])
    assert len(kept) == 2  # of the turns; the answers of whole runs are gone with them
    metrics = dict(verdict.metrics)
    reruns = metrics["reruns"]
    redacted = next(why for why in reruns["left"] if "redacted" in why)
    assert reruns == {
        "scenarios": 3,
        "runs": 6,
        "lost_scenarios": 1,
        "lost": {"champion: the process ended with exit code 3": 1},
        "left": {"no function to run again": 1, redacted: 1},
        "largest_reward": 30.0,
    }
    assert (metrics["turns"], metrics["scenarios"], metrics["unscored"]) == (6, 5, 1)
    assert len(judge.asked) == 2 * 3  # the runs without a reward, and two turns
    assert metrics["difference"] == pytest.approx(2 * (30 - 10) / 30 / 5)
    assert failed(metrics) == ["unscored", "failed runs"]
    assert "failed runs 0.333 against 0; at most 0.1 is allowed" in verdict.reason
    (who,) = [row for row in metrics["checks"] if row["name"] == "check by_candidate"]
    assert (who["candidate"], who["champion"]) == (1.0, 0.0)
    assert place.store.read.counts() == before
    assert place.store.read.calls_of_apps(since=0.0, until=1e12) == before["calls"]
    assert not (place.adapters.parent / "gate").exists()


def scored(store: Store, *repeated: Repeated, checked: list[Score] | None = None, judge: RuledJudge) -> Any:
    run = Cycle(store, judge, CycleConfig(), lambda *_: None, 9.0, None, Path("/none"), "test")  # type: ignore[arg-type]
    return judge_both(run, [], repeated, checked or (), judge=judge)


def run_of(policy: str, text: str) -> Trajectory:
    key = new_id()
    return make_trajectory(key, make_call(new_id(), trajectory_id=key, text=text, policy=policy))


def test_the_judge_sees_runs_blind_and_a_checks_reward_stands_before_it(store: Store):
    ours, theirs = run_of("agent@1", "good"), run_of("agent@0", "fair")
    one = Repeated(Turn("s", ours.calls[0]), (ours,), (theirs,))
    seen: list[Group] = []

    def look(group: Group, order: str) -> bool:
        seen.append(group)
        return False

    judge = RuledJudge(lambda answer, place: 0.75 if answer == "good" else 0.5, skips=look)
    found = scored(store, one, judge=judge)
    assert (found.judged.pairs, found.largest) == ((("s", 0.75, 0.5),), 1.0)
    assert len(seen) == 2
    assert {call.policy for group in seen for run in group.trajectories for call in run.calls} == {None}
    assert {len(run.calls) for group in seen for run in group.trajectories} == {1}

    rewards = [Score(new_id(), run.id, "reward", value, "code", 1.0) for run, value in ((ours, 2.0), (theirs, 4.0))]
    silent = RuledJudge(lambda answer, place: 1.0)
    found = scored(store, one, checked=rewards, judge=silent)
    assert (found.judged.pairs, found.largest, silent.asked) == ((("s", 0.5, 1.0),), 4.0, [])
    half = scored(store, one, checked=rewards[:1], judge=RuledJudge(lambda *_: 0.0, skips=lambda *_: True))
    assert half.judged.unscored == ("s",)  # nothing that is missing counts as zero


def test_what_a_killed_gate_left_goes_with_an_erasure(tmp_path: Path):
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "candidate.db").touch()
    assert forget_unfinished(tmp_path, [])
    assert not (tmp_path / "gate").exists()
