"""Cycles that learn from a teacher: no judge, no siblings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from art_patch.errors import ConfigError, JudgeError
from art_patch.pipeline import TeacherJudge
from art_patch.pipeline.taught import nearness_nats
from art_patch.policies import DATA, MANIFEST, read_json
from art_patch.rewards import Budget, Teacher
from art_patch.store import Filter
from art_patch.training import Row
from tests.benchmarks.families_teacher import measure
from tests.support.command_line import art_patch
from tests.support.cycles import CONFIG, QUESTIONS, WORDS, Place, die_after, upstream_traffic
from tests.support.teachers import TeacherServer, make_teacher, serve_teacher
from tests.support.tiny import make_tiny_model

TAUGHT = replace(
    CONFIG,
    min_group_size=1,
    train=replace(CONFIG.train, learning_rate=2e-2, epochs=8, minibatches=4, lora_rank=16, checkpoint_every_s=0.0),
)
MORE = [f"{how} {word}?" for word in WORDS for how in ("how many", "how much is a", "where is the")]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return make_teacher(tmp_path_factory.mktemp("other"), base, seed=0)


@pytest.fixture
def server(other: Path) -> Iterator[TeacherServer]:
    with serve_teacher(other) as running:
        yield running


def judge(server: TeacherServer, **budget) -> TeacherJudge:
    return TeacherJudge(Teacher("big", server.url, budget=Budget(**budget)), max_tokens=32_768)


def test_a_cycle_without_siblings_or_judge_trains_gates_and_promotes(place: Place, server: TeacherServer):
    place.traffic(siblings=1, questions=MORE)
    # Eight samples a turn would reject a run in ten.
    report = place.cycle(judge(server), replace(TAUGHT, gate=replace(TAUGHT.gate, samples=32)))
    assert (report.outcome, report.champion) == ("promoted", "agent@1"), report
    score, train, gate = (report.metrics[name] for name in ("score", "train", "gate"))
    groups = place.store.read.groups(state="trained", held_out=False)
    held_out = place.store.read.groups(state="formed", held_out=True)
    assert score == {"groups": len(groups), "unscored": 0, "teacher": "big", "calls": score["calls"]} | {
        "prompt_tokens": score["prompt_tokens"]
    }
    assert train["teacher"] == "big" and train["trajectories"] == len(groups)
    assert 0 < train["reference_kl_nats"] < 1
    assert gate["judge"] == "big" and gate["lower_bound"] > 0
    assert "the teacher scored" in gate["checks"][0]["words"] and gate["gains"][0]["name"] == "the teacher"
    # The policy's own tokens are sent, and of what is held out nothing but the gate's new answers.
    recorded = {
        (*call.prompt_token_ids, *call.choices[0].token_ids)
        for group in groups
        for run in group.trajectories
        for call in run.calls
    }
    assert recorded <= set(server.asked) and len(server.asked) == len(set(server.asked))
    kept = {(*c.prompt_token_ids, *c.choices[0].token_ids) for g in held_out for r in g.trajectories for c in r.calls}
    assert not (kept - recorded) & set(server.asked[: len(recorded) + 1])
    (run, *_) = groups[0].trajectories
    (given,) = run.scores
    assert (given.judge, given.rubric, given.group_id) == ("big", "reverse KL", groups[0].id) and 0 < given.value < 1
    policy = place.store.ledger.policy("agent@1")
    manifest = read_json(Path(policy.path), MANIFEST)
    assert manifest["judges"] == [{"judge": "big", "rubric": "reverse KL"}]
    assert manifest[DATA]["update"]["taught"] == len(groups)


def test_recorded_prompts_of_upstream_are_answered_again_and_then_taught(place: Place, server: TeacherServer):
    from art_patch.grouping import ResampleConfig

    upstream_traffic(place)
    report = place.cycle(judge(server), replace(TAUGHT, resample=ResampleConfig(samples=2)))
    assert report.outcome in ("promoted", "rejected"), report
    assert report.metrics["train"]["trajectories"] == 2 * report.metrics["train"]["groups"] > 0
    assert report.metrics["gate"]["unscored"] == 0


def test_another_tokenizer_ends_the_cycle_before_anything_is_sent(place: Place, tmp_path: Path):
    place.traffic(siblings=1)
    with serve_teacher(make_tiny_model(tmp_path / "t", hidden=32, vocab_size=310)) as server:
        with pytest.raises(ConfigError, match=r"it needs the same tokenizer|has another tokenizer"):
            place.cycle(judge(server), TAUGHT)
        assert len(server.asked) == 1  # the probe
    assert place.states() == {"agent@0": "champion"}


def test_runs_that_may_not_be_learned_from_are_not_sent(place: Place, server: TeacherServer):
    place.traffic(siblings=1, user="ann")
    place.traffic(siblings=1, seed=1, user="bob", questions=MORE)
    place.store.consent.withdraw("ann", who="test")
    place.cycle(judge(server), TAUGHT)
    runs = place.store.read.trajectories([key for _, key in place.store.browse.ids(Filter(), limit=1000)])
    of_ann = {
        (*call.prompt_token_ids, *call.choices[0].token_ids)
        for run in runs
        if run.info.user_id == "ann"
        for call in run.calls
    }
    assert of_ann and not of_ann & set(server.asked)


def test_a_teacher_that_is_down_or_out_of_budget_leaves_the_groups_waiting(place: Place, server: TeacherServer):
    place.traffic(siblings=1, questions=MORE)
    dead = TeacherJudge(Teacher("big", "http://127.0.0.1:9/v1", max_retries=0), max_tokens=64)
    with pytest.raises(JudgeError, match=r"the teacher big at 127\.0\.0\.1:9 did not answer"):
        place.cycle(dead, TAUGHT)
    report = place.cycle(judge(server, max_calls=4), replace(TAUGHT, min_groups=100))
    assert (report.outcome, report.metrics["score"]["groups"]) == ("nothing to do", 3)  # one call was the probe
    assert any("budget used up" in reason for reason in report.metrics["score"]["reasons"])
    report = place.cycle(judge(server), TAUGHT)
    assert report.outcome in ("promoted", "rejected"), report


def test_a_killed_update_goes_on_with_the_same_teacher_alone(place: Place, server: TeacherServer):
    place.traffic(siblings=1, questions=MORE)
    die_after(place, judge(server), 3, TAUGHT)
    said = len(server.asked)
    same = place.cycle(judge(server), replace(TAUGHT, max_minutes=None))
    assert same.metrics["train"]["resumed"] is True
    assert not [ids for ids in server.asked[said + 1 :] if ids in server.asked[:said]]  # the job's file has them


def test_a_killed_update_of_another_teacher_is_dropped(place: Place, server: TeacherServer):
    place.traffic(siblings=1, questions=MORE)
    die_after(place, judge(server), 3, TAUGHT)
    other = TeacherJudge(Teacher("other", server.url), max_tokens=64)
    report = place.cycle(other, TAUGHT)
    assert report.metrics["train"]["teacher"] == "other" and "resumed" not in report.metrics["train"]


def test_the_benchmark_runs():
    found = measure(1, 1)
    assert found["reverse_kl_fell"] == 1.0


def test_nearness_is_the_mean_over_tokens_and_greedy_answers_have_no_other():
    row = Row((1, 2, 3), (False, True, True), (0.0, -1.0, -3.0), (1.0, 1.0, 1.0), (0.0, -2.0, -1.0))
    assert nearness_nats([row]) == pytest.approx(0.5)
    assert nearness_nats([replace(row, temperature_T=(1.0, 0.0, 0.0))]) == pytest.approx(-1.5)
    assert nearness_nats([replace(row, teacher_T=(0.0, -9999.0, -9999.0))]) == -20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--teacher", "big"), "give --teacher-base-url"),
        (("--teacher", "big", "--teacher-base-url", "ftp://x"), "is not an http(s) address"),
        (("--teacher", "big", "--teacher-base-url", "http://x/v1", "--kl", "0.1"), "leave out --kl"),
        (("--teacher", "big", "--teacher-base-url", "http://x/v1", "--max-usd", "1"), "give --max-calls"),
    ],
)
def test_what_makes_no_sense_is_told(place: Place, tmp_path: Path, options: tuple[str, ...], said: str):
    place.traffic(siblings=1, questions=QUESTIONS[:1])
    done = art_patch("retrain", *options, "--store", str(tmp_path / "store.db"), home=tmp_path / "home")
    assert done.returncode == 2 and said in " ".join(done.stderr.split()), done.stderr
