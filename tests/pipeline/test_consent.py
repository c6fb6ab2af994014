"""A whole cycle sends nothing of whoever did not agree to anybody, and learns nothing from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from art_patch._lib.ids import new_id
from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge
from art_patch.grouping import is_held_out, scenario_of
from art_patch.rewards import Judge
from art_patch.types import Correction, Score
from tests.support.cycles import CONFIG, QUESTIONS, RESAMPLING, TRAINING, Place, die_after, eager, is_short

PRIVATE = [f"is my {word} illness private?" for word in ("plum", "pear", "apple", "bread", "lemon", "onion")]
"""What only users ask who did not agree, or who withdraw."""


@contextmanager
def listening(place: Place, monkeypatch: Any) -> Iterator[tuple[Judge, list[str]]]:
    """A judge, and all that it and the engine are sent."""
    heard: list[str] = []

    def rule(messages: list[dict[str, Any]]) -> float:
        heard.append(json.dumps(messages))
        return is_short(messages)

    chat = place.client.chat

    def ask(**body: Any) -> Any:
        heard.append(json.dumps(body))
        return chat(**body)

    monkeypatch.setattr(place.client, "chat", ask)
    with serve_stand_in_judge(rule) as url:
        yield Judge(STAND_IN_MODEL, base_url=url, api_key="none"), heard


def embedded(heard: list[str]) -> Any:
    def embed(texts: Any) -> Any:
        heard.extend(texts)
        return [[float(place == n) for place in range(64)] for n, _ in enumerate(texts)]  # no two mean the same

    return embed


def marked(place: Place) -> None:
    """The app said of the newest runs that nothing may be learned from them."""
    runs = place.store.read.ungrouped(settled_before=100.0)
    private = [run for run in runs if run.calls[0].messages[0]["content"] in PRIVATE]
    assert private
    place.store.write([replace(run.info, learn=False) for run in private])


def both_sides(place: Place) -> None:
    """Private tasks are on both sides: some are held out for the gate."""
    sides = set[bool]()
    for run in place.store.read.ungrouped(settled_before=100.0):
        scenario = scenario_of(run)
        if scenario and run.calls[0].messages[0]["content"] in PRIVATE:
            sides.add(is_held_out(scenario[0], CONFIG.holdout_share))
    assert sides == {True, False}


def test_no_judge_engine_or_embedding_model_hears_of_them(place: Place, monkeypatch: Any):
    with listening(place, monkeypatch) as (judge, heard):
        place.traffic()
        place.traffic(questions=PRIVATE[:3], user="u1", seed=1)
        place.traffic(questions=PRIVATE[3:], siblings=1, seed=2)  # alone, so that they would be asked again
        both_sides(place)
        marked(place)
        # Users reward and correct what they got, whatever may be learned from it.
        for run in place.store.read.trajectories([run.id for run in place.store.read.recent(limit=21)]):
            right = {"role": "assistant", "content": "a private answer"}
            if not run.info.learn:
                place.store.write(
                    [
                        Score(new_id(), run.id, "reward", 5.0, "user", 50.0),
                        Correction(new_id(), run.id, 50.0, "user", right),
                    ]
                )
        heard.clear()
        learns = replace(TRAINING.train, imitate_from=0.9, imitate_models=("*",), prefer_from=5.0, max_kl_nats=None)
        config = replace(eager(RESAMPLING), train=learns, embed=embedded(heard))
        report = place.cycle(judge, config)
    assert report.outcome == "promoted", report
    assert heard and not [said for said in heard if "private" in said or "illness" in said]
    assert (report.metrics["train"]["demonstrations"], report.metrics["train"]["pairs"]) == (0, 0)
    assert sum(report.metrics["group"]["not_learned_from"].values()) == 21
    assert report.metrics["group"]["trajectories"] == 6 * len(QUESTIONS)


def test_who_withdraws_is_in_no_later_step_of_what_had_begun(place: Place, monkeypatch: Any):
    with listening(place, monkeypatch) as (judge, heard):
        place.traffic()
        place.traffic(questions=PRIVATE, user="u1", seed=1)
        die_after(place, judge, 1)
        assert [said for said in heard if "illness" in said]
        place.store.consent.withdraw("u1", who="test")
        heard.clear()
        report = place.cycle(judge, TRAINING)
    assert "resumed" not in report.metrics["train"]  # the killed update had learned from them
    assert not [said for said in heard if "illness" in said]
    taught = place.store.rights.erase(user="u1", dry_run=True).policies
    assert taught == ()
