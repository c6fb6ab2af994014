"""Runs without siblings, over a real engine and a real store: asked again, judged, learned from, erased."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from art_patch._lib.ids import new_id
from art_patch.errors import ConfigError, EngineError
from art_patch.grouping import ResampleConfig
from art_patch.pipeline.resample_turns import is_open
from art_patch.rewards import Judge
from art_patch.types import TrajectoryInfo
from tests.support.cycles import QUESTIONS, RESAMPLING, Place, upstream_traffic


def test_what_was_asked_once_is_learned_from(place: Place, judge: Judge):
    place.traffic(siblings=1)
    report = place.cycle(judge, RESAMPLING)
    assert report.outcome == "promoted", report
    metrics = report.metrics["resample"]
    assert metrics["groups"] == metrics["turns"] == report.metrics["score"]["groups"] > 3
    assert metrics["samples"] == 5 * metrics["turns"]
    assert report.metrics["train"]["logprob_gap_nats"] < 1e-4
    groups = place.store.read.groups(state="trained")
    assert {(group.how, len(group.trajectories)) for group in groups} == {("resampled", 6)}
    for group in groups:
        assert len({str(run.calls[0].messages) for run in group.trajectories}) == 1
        assert {run.calls[0].policy for run in group.trajectories} == {"agent@0"}
        assert {run.calls[0].untrainable for run in group.trajectories} == {None}
    assert place.store.read.counts()["calls"] == len(QUESTIONS)  # copies are none of the app's
    held_out = {group.scenario_key for group in place.store.read.groups(state="formed", held_out=True)}
    assert held_out
    assert not held_out & {group.scenario_key for group in groups}

    again = place.cycle(judge, RESAMPLING)
    assert again.metrics["resample"]["runs"] == 0  # nobody is asked twice


def test_a_task_that_recurs_slowly_is_compared_as_a_whole(place: Place, judge: Judge):
    config = replace(RESAMPLING, holdout_share=0.0, min_group_size=3, min_groups=99)
    question = QUESTIONS[:1]
    place.traffic(siblings=2, questions=question)
    for more in ("3 more cycles", "2 more cycles"):
        metrics = place.cycle(judge, config).metrics["resample"]
        assert (metrics["turns"], metrics["left"]) == (0, {f"waits up to {more} for siblings": 2})
    place.traffic(siblings=1, questions=question, seed=1)
    metrics = place.cycle(judge, config).metrics
    assert (metrics["group"]["groups"], metrics["resample"]["runs"]) == (1, 0)
    assert [(g.how, len(g.trajectories)) for g in place.store.read.groups(state="scored")] == [("same_task", 3)]


def test_a_task_that_does_not_recur_in_time_is_asked_again(place: Place, judge: Judge):
    config = replace(RESAMPLING, holdout_share=0.0, min_group_size=3, min_groups=99)
    place.traffic(siblings=2, questions=QUESTIONS[:1])
    turns = [place.cycle(judge, config).metrics["resample"]["turns"] for _ in range(4)]
    assert turns == [0, 0, 0, 2]


def test_what_upstream_answered_is_learned_from_without_its_answer(place: Place, judge: Judge):
    upstream_traffic(place)
    report = place.cycle(judge, RESAMPLING)
    assert report.outcome == "promoted", report
    groups = place.store.read.groups(state="trained")
    for group in groups:
        by_policy = {None: 0, "agent@0": 0}
        for run in group.trajectories:
            by_policy[run.calls[0].policy] += 1
        assert by_policy == {None: 1, "agent@0": 5}
    assert report.metrics["train"]["trajectories"] <= 5 * len(groups)


def test_what_followed_is_read_back_and_copies_go_with_their_originals(place: Place, judge: Judge):
    upstream_traffic(place)
    (run,) = [t for t in place.store.read.recent(limit=50) if t.calls[0].messages[0]["content"] == QUESTIONS[0]]
    told = ({"role": "user", "content": "are you sure?"},)
    more = replace(
        run.calls[0],
        id=new_id(),
        started_at=2.0,
        messages=(*run.calls[0].messages, run.calls[0].choices[0].message, *told),
    )
    place.store.write([more])
    place.cycle(judge, replace(RESAMPLING, holdout_share=0.0, resample=ResampleConfig(samples=3, turns=2)))
    (group,) = [
        group
        for group in place.store.read.groups(state="scored")
        if group.trajectories[0].calls[0].shadow_of == run.calls[0].id
    ]
    assert group.followed == (*told, {"role": "assistant", "content": "four"})
    before = len(place.store.read.groups(state="scored"))
    gone = place.store.rights.erase(trajectory=run.id, who="test")
    assert gone.trajectories == 1 + 2 * 4
    assert len(place.store.read.groups(state="scored")) == before - 2


def test_copies_are_not_kept_longer_than_what_they_copy(place: Place, judge: Judge):
    upstream_traffic(place)
    place.cycle(judge, replace(RESAMPLING, holdout_share=0.0))
    assert len(place.store.read.recent(limit=100)) == 7 * len(QUESTIONS)
    place.store.rights.prune(older_than_s=50.0, who="test", now=100.0)  # traffic is of second 1, copies of second 100
    assert place.store.read.recent(limit=10) == ()


def test_the_engines_failures_end_it_and_not_the_cycle(place: Place, judge: Judge, monkeypatch: pytest.MonkeyPatch):
    place.traffic(siblings=1)
    asked: list[dict[str, Any]] = []

    def refuse(**body: Any) -> Any:
        asked.append(body)
        raise EngineError("it is down")

    monkeypatch.setattr(place.client, "chat", refuse)
    report = place.cycle(judge, RESAMPLING)
    assert report.outcome == "nothing to do"
    metrics = report.metrics["resample"]
    assert (metrics["groups"], metrics["failed"] >= 3) == (0, True)
    assert any("it is down" in reason for reason in metrics["left"])
    assert {body["priority"] for body in asked} == {100}
    monkeypatch.undo()
    assert place.cycle(judge, RESAMPLING).outcome == "promoted"  # nothing was lost


def test_the_window_and_the_pace(place: Place, judge: Judge):
    assert is_open(None, datetime(2026, 1, 1, 12))
    for window, hour, expected in [("22:00-06:00", 23, True), ("22:00-06:00", 5, True), ("22:00-06:00", 6, False),
                                   ("09:00-17:00", 9, True), ("09:00-17:00", 17, False)]:  # fmt: skip
        assert is_open(window, datetime(2026, 1, 1, hour)) is expected
    with pytest.raises(ConfigError, match="is no window of the day; write it like 22:00-06:00"):
        is_open("at night", datetime(2026, 1, 1))
    with pytest.raises(ConfigError, match="begins when it ends; leave it out for the whole day"):
        is_open("08:00-08:00", datetime(2026, 1, 1))
    place.traffic(siblings=1)
    now = datetime.now().hour
    closed = f"{(now + 2) % 24:02}:00-{(now + 3) % 24:02}:00"
    report = place.cycle(judge, replace(RESAMPLING, resample=ResampleConfig(window=closed)))
    assert report.metrics["resample"]["left"] == {f"outside of {closed}": report.metrics["resample"]["runs"]}


def test_another_chat_template_is_noticed(place: Place, judge: Judge):
    place.traffic(siblings=1)
    runs = place.store.read.recent(limit=50)
    asked: Any = ({"role": "user", "content": "who are you?"},)
    odd = [replace(runs[0].calls[0], id=new_id(), trajectory_id="odd", messages=asked, prompt_token_ids=(1, 2))]
    place.store.write([TrajectoryInfo("odd", 1.0), *odd])
    report = place.cycle(judge, replace(RESAMPLING, holdout_share=0.0))
    assert report.metrics["resample"]["other_prompt"] == 1


def test_a_prompt_that_is_no_text_is_left_out(place: Place, judge: Judge):
    """Half of a surrogate pair, which a caller of the proxy may send; it is no failure of the engine."""
    place.traffic(siblings=1)
    runs = place.store.read.recent(limit=50)
    odd: list[Any] = []
    for number in range(4):  # the engine is given up after three failures in a row
        asked: Any = ({"role": "user", "content": f"\ud800 {number}"},)
        run_id = f"odd{number}"
        call = replace(runs[0].calls[0], id=new_id(), trajectory_id=run_id, messages=asked, prompt_token_ids=None)
        odd += [TrajectoryInfo(run_id, 1.0), call]
    place.store.write(odd)
    metrics = place.cycle(judge, replace(RESAMPLING, holdout_share=0.0)).metrics["resample"]
    assert metrics["left"]["the prompt holds half of a surrogate pair, which no engine reads"] == 4
    assert "failed" not in metrics and metrics["turns"] > 3
