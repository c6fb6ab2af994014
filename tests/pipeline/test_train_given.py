"""Corrections, wherever their run is: learned once, and none of a held-out scenario."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch._lib.ids import new_id
from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge
from art_patch.errors import ConfigError
from art_patch.grouping import ResampleConfig, is_held_out, scenario_of
from art_patch.pipeline.train_given import base_text
from art_patch.rewards import Judge
from art_patch.serving import EmbeddedEngine
from art_patch.training import family_of
from art_patch.types import Call, Choice, Correction, Score, Trajectory, TrajectoryInfo
from tests.support.cycles import CONFIG, TRAINING, Place, die_after, eager, rewarded_traffic
from tests.support.engines import serve
from tests.support.real_bases import make_base

GIVEN = replace(
    TRAINING, train=replace(TRAINING.train, imitate_from=5.0, imitate_models=("*",), prefer_from=5.0, max_kl_nats=None)
)
"""No reward is as high, so that only corrections are learned."""

CORRECTED = {"role": "assistant", "content": "seven"}


def upstreams(place: Place, key: str, question: str) -> Trajectory:
    """One run of upstream's that has no sibling."""
    answer = Choice(0, {"role": "assistant", "content": "four"}, "stop")
    asked = ({"role": "user", "content": question},)
    call = Call(f"{key}-c", key, 1.0, "m", asked, (answer,), untrainable="answered by upstream")
    place.store.write([TrajectoryInfo(key, 1.0), call])
    return place.store.read.trajectories([key])[0]


def lone_runs(place: Place) -> tuple[str, str]:
    """One of a scenario that is learned from, and one of a scenario that is held out."""
    found: dict[bool, str] = {}
    for number in range(100):
        run = upstreams(place, f"lone-{number}", f"what does item {chr(97 + number % 26) * (1 + number)} mean?")
        scenario = scenario_of(run)
        assert scenario is not None
        found.setdefault(is_held_out(scenario[0], TRAINING.holdout_share), run.id)
        if len(found) == 2:
            return found[False], found[True]
    raise AssertionError


def correct(place: Place, *keys: str, at: float = 50.0) -> None:
    place.store.write([Correction(new_id(), key, at, "user", CORRECTED) for key in keys])


def reward(place: Place, value: float, *keys: str, at: float = 50.0) -> None:
    place.store.write([Score(new_id(), key, "reward", value, "user", at) for key in keys])


def learned(train: dict[str, Any]) -> tuple[int, int]:
    return train["demonstrations"], train["pairs"]


def test_a_correction_of_a_run_in_no_group_is_learned_once_and_none_that_is_held_out(place: Place, judge: Judge):
    rewarded_traffic(place)
    free, held_out = lone_runs(place)
    correct(place, free, held_out)
    train = place.cycle(judge, GIVEN).metrics["train"]
    assert learned(train) == (1, 1)
    assert train["not_imitated"]["held out for the gate"] == train["not_preferred"]["held out for the gate"] == 1
    assert train["corrections_upto"] == 100.0
    assert [policy.name for policy in place.store.rights.erase(trajectory=free, dry_run=True).policies] == ["agent@1"]
    assert place.store.rights.erase(trajectory=held_out, dry_run=True).policies == ()

    rewarded_traffic(place, "agent@1", seed=1)
    assert learned(place.cycle(judge, GIVEN).metrics["train"]) == (0, 0)  # the champion knows it
    rewarded_traffic(place, "agent@2", seed=2)
    correct(place, free, at=101.0)
    assert learned(place.cycle(judge, GIVEN).metrics["train"]) == (1, 1)


def test_what_a_rejected_candidate_was_given_the_next_one_learns(place: Place, judge: Judge):
    rewarded_traffic(place)
    free, _ = lone_runs(place)
    correct(place, free)
    strict = replace(GIVEN, gate=replace(GIVEN.gate, margin=0.99))
    first, again = place.cycle(judge, strict), place.cycle(judge, GIVEN)
    assert (first.outcome, again.outcome) == ("rejected", "promoted")
    assert learned(first.metrics["train"]) == learned(again.metrics["train"]) == (1, 1)
    assert first.metrics["train"]["groups"] == again.metrics["train"]["groups"] > 0
    taught = place.store.rights.erase(trajectory=free, dry_run=True).policies
    assert [(one.name, one.state) for one in taught] == [("agent@1", "rejected"), ("agent@2", "champion")]
    rewarded_traffic(place, "agent@2", seed=1)
    assert learned(place.cycle(judge, GIVEN).metrics["train"]) == (0, 0)  # the champion knows it


def test_a_new_lora_learns_all_of_them_again(place: Place, judge: Judge):
    rewarded_traffic(place)
    free, _ = lone_runs(place)
    correct(place, free)
    assert learned(place.cycle(judge, GIVEN).metrics["train"]) == (1, 1)
    rewarded_traffic(place, "agent@1", seed=1)
    train = place.cycle(judge, TRAINING).metrics["train"]  # nothing is given; what is known is not forgotten
    assert (learned(train), train["corrections_upto"]) == ((0, 0), 100.0)
    rewarded_traffic(place, "agent@2", seed=2)
    anew = replace(GIVEN, train=replace(GIVEN.train, start="base"))
    assert learned(place.cycle(judge, anew).metrics["train"]) == (1, 1)


def test_a_corrected_run_that_was_erased_meanwhile_is_not_learned_from(place: Place, judge: Judge):
    rewarded_traffic(place)
    free, _ = lone_runs(place)
    correct(place, free)
    die_after(place, judge, 1, GIVEN)
    place.store.rights.erase(trajectory=free)
    train = place.cycle(judge, GIVEN).metrics["train"]
    assert "resumed" not in train
    assert learned(train) == (0, 0)


def test_upstreams_answer_in_a_lone_run_that_the_app_rewarded_is_imitated_once(place: Place, judge: Judge):
    place.traffic()  # it has no rewards of its own, and the judge finds none better than another
    free, held_out = lone_runs(place)
    poor = upstreams(place, "poor", "who asked for that answer, and why so late?").id
    reward(place, 6.0, free, held_out)
    reward(place, 4.0, poor)
    with serve_stand_in_judge(lambda _: 0.5) as url:
        alike = Judge(STAND_IN_MODEL, base_url=url, api_key="none")
        train = place.cycle(alike, replace(GIVEN, min_groups=0)).metrics["train"]
        assert learned(train) == (1, 0)
        assert train["dead_groups"] == train["groups"]
        assert [one.name for one in place.store.rights.erase(trajectory=free, dry_run=True).policies] == ["agent@1"]
        assert place.store.rights.erase(trajectory=poor, dry_run=True).policies == ()

        report = place.cycle(alike, replace(GIVEN, min_groups=0))
        assert report.outcome == "nothing to do"  # the champion knows it


def test_without_permission_nothing_is_read_and_with_none_only_corrections_are_learned(place: Place, judge: Judge):
    rewarded_traffic(place)
    free, _ = lone_runs(place)
    rewarded = upstreams(place, "good", "who asked for that answer, and why so late?").id
    correct(place, free)
    reward(place, 6.0, rewarded)
    bare = replace(GIVEN, train=replace(GIVEN.train, imitate_models=()))
    with pytest.raises(
        ConfigError, match=r"terms of many providers forbid.*--imitate-models.*ART_PATCH_IMITATE_MODELS"
    ):
        place.cycle(judge, bare)
    assert place.stages == []
    train = place.cycle(judge, replace(GIVEN, train=replace(GIVEN.train, imitate_models=("none",)))).metrics["train"]
    assert learned(train) == (1, 0)
    assert train["not_imitated"]["training on answers of m is not allowed"] == 1
    assert train["not_preferred"]["training on answers of m is not allowed"] == 1
    assert [one.name for one in place.store.rights.erase(trajectory=free, dry_run=True).policies] == ["agent@1"]
    assert place.store.rights.erase(trajectory=rewarded, dry_run=True).policies == ()


def test_nothing_but_rewarded_runs_is_enough_to_begin_with(place: Place, judge: Judge):
    free, _ = lone_runs(place)
    reward(place, 6.0, free)
    gate = replace(GIVEN.gate, min_scenarios=1)  # the other lone run
    asks_none = ResampleConfig(max_turns=0)  # held-out runs need no siblings then
    report = place.cycle(judge, replace(GIVEN, min_groups=0, gate=gate, resample=asks_none))
    assert report.candidate == "agent@1"
    assert (learned(report.metrics["train"]), report.metrics["gate"]["scenarios"]) == ((1, 0), 1)


@pytest.mark.parametrize("asked", ["imitate_from", "prefer_from"])
def test_a_base_that_cannot_be_given_anything_is_refused_before_the_judge_is_paid(
    tmp_path: Path, base: Path, judge: Judge, asked: str
):
    bare = tmp_path / "bare"
    shutil.copytree(base, bare)
    (bare / "chat_template.jinja").unlink()
    with serve(EmbeddedEngine.from_pretrained(base, adapters_root=tmp_path / "adapters")) as running:
        place = Place(tmp_path, bare, running.client)
        place.traffic()
        given: Any = {asked: 0.5, "imitate_models": ("none",)}
        with pytest.raises(ConfigError, match=r"has no chat template; .*without imitate_from and prefer_from"):
            place.cycle(judge, replace(CONFIG, train=replace(CONFIG.train, **given)))
        assert place.stages == []
        assert place.store.read.ungrouped(settled_before=100.0)  # all waits for the next cycle
        assert place.cycle(judge, eager()).outcome == "promoted"
        place.store.close()


def test_the_text_of_a_base_that_its_makers_call_otherwise_is_read(tmp_path: Path):
    """transformers knows no `kimi_k2`, which is DeepSeek V3."""
    text = base_text(str(make_base("Kimi K2", tmp_path / "base")), [])
    assert text.why_not is None, text.why_not
    assert text.renderer().family == family_of("deepseek_v3")
