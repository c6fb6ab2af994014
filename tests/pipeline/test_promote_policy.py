"""A challenger on a real engine and a real store; what the apps would have recorded is written as they write it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import art_patch as art
from art_patch._lib.ids import new_id
from art_patch.errors import EngineError
from art_patch.pipeline import WatchReport, watch, watch_once
from art_patch.policies import base_fingerprint
from art_patch.promotion import CanaryConfig
from art_patch.promotion.transitions import give_up
from art_patch.serving import EmbeddedEngine, EngineClient
from art_patch.store import Store, open_store
from art_patch.types import Call, Choice, Policy, Score, TrajectoryInfo
from tests.support.engines import serve
from tests.support.servers import serving
from tests.support.tiny import make_tiny_adapter

NEW, OLD = "agent@1", "agent@0"
BEGAN = 1_000.0
CONFIG = CanaryConfig()
HOUR = 3_600.0


class Place:
    """A project with an engine and a candidate that is tested."""

    def __init__(self, directory: Path, base: Path, client: EngineClient) -> None:
        self.url = f"sqlite:///{directory}/store.db"
        self.store: Store = open_store(self.url)
        self.client = client
        ledger = self.store.ledger
        sha256 = base_fingerprint(base)
        ledger.add_base(OLD, str(base), sha256, who="test")
        path = str(directory / "adapters" / NEW)
        candidate = Policy(NEW, str(base), sha256, "candidate", 1.0, path=path, parent=OLD)
        ledger.add_candidate(candidate, trained_on=[], who="test")
        client.load(NEW)
        ledger.move(NEW, "canary", who="test", reason="try it", percent=20, now=BEGAN)
        self._rng = random.Random(0)

    def sessions(self, count: int, *, share: float = 0.2, at: float = BEGAN, thumbs=None, **of_new: Any) -> None:
        """Sessions of one call each, ten seconds apart; `thumbs` are the chances of a thumb up: new's and old's."""
        records: list[Any] = []
        for number in range(count):
            new = self._rng.random() < share
            run, then = new_id(), at + 10.0 * number
            only = Choice(0, {"role": "assistant", "content": "three plums"}, "stop")
            call = Call(
                id=new_id(), trajectory_id=run, started_at=then, requested_model="m", choices=(only,),
                messages=({"role": "user", "content": "how many?"},), policy=NEW if new else OLD,
                duration_ms=100.0 * self._rng.lognormvariate(0, 0.5), completion_tokens=4,
            )  # fmt: skip
            records += [TrajectoryInfo(run, then, session_id=f"visit {run}"), replace(call, **of_new) if new else call]
            if thumbs is not None:
                value = float(self._rng.random() < thumbs[0 if new else 1])
                records.append(Score(new_id(), run, "thumbs", value, "user", then + 1))
        self.store.write(records)

    def look(self, hours: float = 1.0, config: CanaryConfig = CONFIG, engine: Any = "ours") -> WatchReport:
        client = self.client if engine == "ours" else engine
        return watch_once(self.store, client, config, who="watcher", now=BEGAN + hours * HOUR)

    def states(self) -> dict[str, str]:
        return {policy.name: policy.state for policy in self.store.ledger.policies()}


@pytest.fixture
def place(tmp_path: Path, base: Path) -> Iterator[Place]:
    make_tiny_adapter(tmp_path / "adapters", base)
    with serve(EmbeddedEngine.from_pretrained(base, adapters_root=tmp_path / "adapters")) as running:
        here = Place(tmp_path, base, running.client)
        yield here
        assert here.store.verify() == []
        here.store.close()


BAD: dict[str, dict[str, Any]] = {
    "fails": {"status": "error", "choices": (), "error": "APIError: gone"},
    "leaves its calls to upstream": {"policy": None, "fallback": f"{NEW}: the engine answered HTTP 500"},
    "is slow": {"duration_ms": 900.0},
    "says nothing": {"completion_tokens": 1},
}


@pytest.mark.parametrize("how", BAD)
def test_a_canary_that_is_worse_is_rejected_and_unloaded(place: Place, how: str):
    place.sessions(120, **BAD[how])
    report = place.look()
    assert (report.outcome, report.challenger, report.champion) == ("rejected", NEW, OLD), report.reason
    assert place.states() == {OLD: "champion", NEW: "rejected"}
    route = place.store.ledger.route()
    assert (route.champion, route.challenger) == (OLD, None)
    assert place.client.models() == [OLD]
    move = place.store.ledger.history()[0]
    assert (move["who"], move["reason"], move["at"]) == ("watcher", report.reason, BEGAN + HOUR)
    assert move["metrics"]["watch"] == dict(report.metrics) | {"verdict": "roll back"}
    assert place.look().outcome == "nothing to watch"


def test_a_canary_that_fails_is_given_up_after_its_first_sessions(place: Place):
    place.sessions(25, share=0.0, at=BEGAN + 60)
    place.sessions(6, share=1.0, at=BEGAN + 360, **BAD["fails"])
    report = place.look(hours=0.15)
    assert (report.outcome, report.reason) == (
        "rejected",
        "its share of sessions with a failed call is worse: 1.000 against 0.000 in 6 sessions",
    )


def test_a_canary_that_people_dislike_is_rejected(place: Place):
    place.sessions(200, thumbs=(0.2, 0.8))
    report = place.look()
    assert report.outcome == "rejected"
    assert "its people's feedback is worse: 0." in report.reason


def test_a_canary_that_is_as_good_goes_on_and_ends_as_rejected(place: Place):
    place.sessions(200, thumbs=(0.6, 0.6))
    report = place.look(hours=23.9)
    assert (report.outcome, report.state, report.percent) == ("goes on", "canary", 20)
    assert report.reason.startswith("neither worse nor better is proven yet")
    assert place.states()[NEW] == "canary"
    report = place.look(hours=168.0)
    assert (report.outcome, report.metrics["signals"]["feedback"]["says"]) == ("rejected", "open")
    assert place.store.ledger.history()[0]["metrics"]["watch"]["verdict"] == "inconclusive"
    assert place.states() == {OLD: "champion", NEW: "rejected"}


def test_the_share_grows_while_nothing_speaks_against_the_canary(place: Place):
    shares = lambda: [move["metrics"].get("percent") for move in place.store.ledger.history()][::-1]  # noqa: E731
    place.sessions(400, thumbs=(0.6, 0.6))
    steady = replace(CONFIG, ramp=())
    assert place.look(hours=2.0, config=steady).outcome == "goes on"
    assert shares()[-1] == 20
    assert (place.look(hours=2.0).outcome, shares()[-1]) == ("goes on", 50.0)
    assert (place.look(hours=2.1).outcome, shares()[-2:]) == ("goes on", [20, 50.0])
    assert place.store.ledger.route().challenger_percent == 50.0


def test_a_canary_that_people_prefer_is_promoted(place: Place):
    place.sessions(300, thumbs=(0.95, 0.4))
    assert place.look(hours=0.9).outcome == "goes on"  # who is silent is not known yet
    report = place.look(hours=2.0)
    assert report.outcome == "promoted", report.reason
    assert "its people's feedback is better: 0.9" in report.reason
    assert place.states() == {OLD: "retired", NEW: "champion"}
    route = place.store.ledger.route()
    assert (route.champion, route.challenger) == (NEW, None)


def test_without_an_engine_it_is_given_up_but_not_promoted(place: Place):
    place.sessions(300, thumbs=(0.95, 0.4))
    report = place.look(hours=2.0, engine=None)
    assert (report.outcome, "no engine is up" in report.reason) == ("goes on", True)
    with pytest.raises(EngineError), EngineClient("http://127.0.0.1:9") as down:
        place.look(hours=2.0, engine=down)
    assert place.states()[NEW] == "canary"
    place.sessions(60, at=BEGAN + 2 * HOUR, **BAD["fails"])
    assert place.look(hours=3.0, engine=None).outcome == "rejected"


def test_a_shadow_whose_copies_fail_is_rejected(place: Place):
    ledger = place.store.ledger
    next_one = replace(ledger.policy(NEW), name="agent@2", state="candidate", metrics={})
    ledger.move(NEW, "rejected", who="test", reason="make room")
    ledger.add_candidate(next_one, trained_on=[], who="test")
    ledger.move("agent@2", "shadow", who="test", reason="try it", now=BEGAN)
    place.sessions(30, share=0.0)
    asked = [each for run in place.store.read.recent(limit=30) for each in run.calls]
    failed = {"policy": "agent@2", "status": "error", "choices": ()}
    copies = [replace(each, id=new_id(), trajectory_id=new_id(), shadow_of=each.id, **failed) for each in asked]
    assert place.look().outcome == "goes on"
    place.store.write([*(TrajectoryInfo(each.trajectory_id, BEGAN, "shadow") for each in copies), *copies])
    report = place.look()
    assert (report.outcome, report.state, report.challenger) == ("rejected", "shadow", "agent@2")


def test_without_a_challenger_there_is_nothing_to_watch(place: Place):
    give_up(place.store.ledger, None, who="me", reason="enough")
    report = place.look()
    assert (report.outcome, report.metrics) == ("nothing to watch", {})


def test_what_somebody_else_decided_meanwhile_stands(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.sessions(120, **BAD["fails"])
    seen = place.store.evidence.arm_traffic

    def overtaken(**which: Any) -> Any:
        found = seen(**which)
        place.store.ledger.move(NEW, "rejected", who="somebody", reason="by hand")
        return found

    monkeypatch.setattr(place.store.evidence, "arm_traffic", overtaken)
    report = place.look()
    assert (report.outcome, "decided by somebody else" in report.reason) == ("nothing to watch", True)
    assert place.store.ledger.history()[0]["who"] == "somebody"


def test_looking_again_and_again_ends_a_bad_canary_and_goes_on(place: Place):
    reports: list[WatchReport] = []
    stop, seen = threading.Event(), threading.Event()

    def on_report(report: WatchReport) -> None:
        reports.append(report)
        if report.outcome == "nothing to watch":
            seen.set()

    patient = replace(CONFIG, max_hours=10**9)
    how = {"who": "watcher", "stop": stop, "every_s": 0.01, "on_report": on_report}
    thread = threading.Thread(target=watch, args=(place.store, place.client, patient), kwargs=how)
    thread.start()
    try:
        place.sessions(60, **BAD["fails"])
        assert seen.wait(30)
    finally:
        stop.set()
        thread.join(30)
    assert [each.outcome for each in reports if each.outcome != "goes on"][:2] == ["rejected", "nothing to watch"]
    assert place.states()[NEW] == "rejected"


def test_an_engine_that_is_down_is_told_once_and_asked_again(place: Place, caplog: pytest.LogCaptureFixture):
    place.sessions(300, thumbs=(0.95, 0.4))
    stop, looks = threading.Event(), iter(range(4))
    look = place.store.evidence.arm_traffic

    def counted(**which: Any) -> Any:
        if next(looks) == 3:
            stop.set()
        return look(**which)

    place.store.evidence.arm_traffic = counted
    patient = replace(CONFIG, max_hours=10**9)
    with EngineClient("http://127.0.0.1:9") as down:
        watch(place.store, down, patient, who="watcher", stop=stop, every_s=0.0)
    assert [record.getMessage().split(":")[0] for record in caplog.records if record.name == "art_patch.watch"] == [
        "the challenger was not looked at"
    ]
    assert place.states()[NEW] == "canary"


def test_a_regression_in_live_traffic_is_rolled_back_and_costs_nobody_an_answer(place: Place, record_property):
    """The patched SDK, the engine, a provider: midway the engine no longer answers for the canary."""
    patient = replace(CONFIG, max_hours=10**9)
    place.store.ledger.set_engine(f"{place.client.base_url}/v1", who="test")
    with serving() as upstream, art.patch(store=place.url, flush_interval_s=0.01, poll_interval_s=0.05):
        client = OpenAI(api_key="k", base_url=upstream.url, max_retries=0)

        def session(number: int) -> None:
            with art.trajectory(session_id=f"visit {number}"):
                answer = client.chat.completions.create(
                    model="gpt-x",
                    messages=[{"role": "user", "content": f"how many {number}?"}],
                    max_tokens=4,
                    temperature=0,  # sampled, a model of random weights now and then says nothing, which is a failure
                )
            assert answer.choices

        for number in range(40):
            session(number)
        assert art.flush(10)
        report = watch_once(place.store, place.client, patient, who="watcher")
        assert (report.outcome, report.metrics["challenger"]["failed"]) == ("goes on", 0)
        assert 0 < report.metrics["challenger"]["sessions"] < 20

        place.client.unload(NEW)
        began, number = time.monotonic(), 40
        while report.outcome == "goes on":
            session(number)
            number += 1
            assert art.flush(10)
            report = watch_once(place.store, place.client, patient, who="watcher")
        assert report.outcome == "rejected", report.reason
        record_property("figure", ["rolled back after, s", f"{time.monotonic() - began:.1f}", "<= 60"])
        affected, since = report.metrics["challenger"]["failed"], number - 40
        record_property("figure", ["calls left to upstream until then", f"{affected} of {since}", "its share, 20 %"])
        assert report.metrics["champion"]["failed"] == 0

        time.sleep(1.0)  # twenty looks of the app at the route
        for number in range(1_000, 1_020):
            session(number)
        assert art.flush(10)
        late = [call for run in place.store.read.recent(limit=20) for call in run.calls]
        assert {(call.policy, call.fallback) for call in late} == {(OLD, None)}
        client.close()
