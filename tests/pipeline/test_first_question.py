"""One question to the judge before the engine samples anything for it, and none where nothing is sampled."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from art_patch.errors import JudgeError
from art_patch.pipeline import retrain
from art_patch.rewards import Budget, Judge
from tests.support.cycles import CONFIG, QUESTIONS, RESAMPLING, Place
from tests.support.servers import Answer, StubServer


def refused(status: int, words: str) -> Answer:
    return Answer(status=status, body=json.dumps({"error": {"message": words}}).encode())


@pytest.mark.parametrize(
    ("answer", "calls", "words"),
    [
        (refused(401, "no such key"), 1, "no such key"),
        (refused(404, "no such model"), 1, "no such model"),
        (None, 2, "no valid verdict in two tries"),  # a chat that is no verdict
    ],
)
def test_a_judge_that_cannot_judge_ends_the_cycle_before_the_engine_is_asked(
    place: Place, monkeypatch: pytest.MonkeyPatch, answer: Answer | None, calls: int, words: str
):
    place.traffic(siblings=1)
    asked: list[Any] = []
    monkeypatch.setattr(place.client, "chat", lambda **body: asked.append(body))
    server = StubServer()
    server.always = answer
    try:
        broken = Judge("openai/m", base_url=server.url, api_key="k", max_retries=0)
        with pytest.raises(JudgeError, match=words):
            place.cycle(broken, RESAMPLING)
        assert (len(server.seen), asked) == (calls, [])
    finally:
        server.close()
    assert place.store.read.counts()["judge"]["calls"] == calls


def test_the_question_is_asked_once_and_counts(place: Place, judge: Judge):
    place.traffic(siblings=1)
    metrics = place.cycle(judge, replace(RESAMPLING, min_groups=99)).metrics
    assert metrics["judge"] == {"calls": 1, "cost_usd": None}
    assert place.store.read.counts()["judge"]["calls"] == 1 + metrics["score"]["calls"]


def test_nothing_is_asked_where_nothing_is_sampled_or_paid_for(place: Place, judge: Judge):
    place.traffic(questions=QUESTIONS[:3])
    assert "judge" not in place.cycle(judge, replace(CONFIG, min_groups=99)).metrics
    place.traffic(siblings=1, questions=QUESTIONS[3:4])
    spent = Judge(judge.model, base_url="http://127.0.0.1:1/v1", api_key="none", budget=Budget(max_calls=0))
    report = place.cycle(spent, replace(RESAMPLING, min_groups=99, holdout_share=0.0))
    assert (report.outcome, report.metrics["judge"]["calls"]) == ("nothing to do", 0)


def test_a_gate_judge_that_cannot_judge_is_found_before_the_gate_samples(place: Place, judge: Judge):
    place.traffic()
    server = StubServer()
    server.always = refused(401, "no such key")
    broken = Judge("openai/m", base_url=server.url, api_key="k", max_retries=0)
    try:
        with pytest.raises(JudgeError, match="no such key"):
            retrain(
                place.store, place.client, judge, place.adapters, CONFIG,
                gate_judge=broken, who="test", progress=lambda *_: None, now=100.0,
            )  # fmt: skip
        assert len(server.seen) == 1
    finally:
        server.close()
    assert (place.states()["agent@1"], place.client.models()) == ("candidate", ["agent@0"])
