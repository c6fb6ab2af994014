"""What an update was made of, in the metrics of cycle and policy."""

from __future__ import annotations

import math
import shutil
import sqlite3
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from art_patch.errors import ConfigError
from art_patch.pipeline import Run
from art_patch.pipeline.train_given import base_text, round_trip_metrics
from art_patch.pipeline.train_policy import make_job
from art_patch.rewards import Judge
from art_patch.serving.embedded.text import PromptEncoder
from art_patch.training import LossConfig, TrainJob
from art_patch.training.data.rows import TRUNCATED
from art_patch.types import Call, Judgement, Score
from tests.pipeline.learning import Learning, answered
from tests.support.cycles import RESAMPLING, TRAINING, Place, die_after, reward, rewarded_traffic, upstream_traffic
from tests.support.factory import make_call, make_trajectory
from tests.support.tiny import make_tokenizer


def scored_calls(place: Place) -> list[Any]:
    groups = place.store.read.groups(state="trained")
    return [call for group in groups for run in group.trajectories for call in run.calls]


def test_rows_of_all_groups_are_counted_and_stay_with_the_policy(place: Place, judge: Judge):
    rewarded_traffic(place)
    report = place.cycle(judge, TRAINING)
    calls = scored_calls(place)
    rows = report.metrics["train"]["rows"]
    assert rows == {
        "rows": len(calls), "forks": 0, "tokens": sum(len(call.choices[0].token_ids) for call in calls),
        "cut_tokens": 0, "truncated_tokens": 0, "other_choices": 0, "left_out": {},
    }  # fmt: skip
    policy = place.store.ledger.policy("agent@1")
    assert policy is not None
    assert policy.metrics["train"]["rows"] == rows


def test_what_is_not_exact_or_too_old_is_counted_by_reason(place: Place, judge: Judge):
    place.traffic()
    first = place.store.read.ungrouped(settled_before=100.0)
    some = [run.calls[0] for run in first[:5]]
    place.store.write([replace(call, id=f"{call.id}-top-p", params={"top_p": 0.9}) for call in some])
    reward(place)
    report = place.cycle(judge, TRAINING)
    held_out = {run.id for g in place.store.read.groups(state="formed", held_out=True) for run in g.trajectories}
    expected = sum(call.trajectory_id not in held_out for call in some)
    left_out = report.metrics["train"]["rows"]["left_out"]
    assert left_out == ({"top_p cuts the distribution": expected} if expected else {})

    rewarded_traffic(place, "agent@0", seed=1)
    rewarded_traffic(place, "agent@1", seed=2)
    fresh = replace(TRAINING, train=replace(TRAINING.train, max_staleness=0))
    left_out = place.cycle(judge, fresh).metrics["train"]["rows"]["left_out"]
    assert left_out["not sampled within 0 steps of the champion"] > 0


def test_an_update_that_is_gone_on_with_has_the_metrics_that_it_began_with(place: Place, judge: Judge):
    rewarded_traffic(place)
    die_after(place, judge, 3)
    rewarded_traffic(place, seed=1)
    train = place.cycle(judge, TRAINING).metrics["train"]
    assert train["resumed"] is True
    assert train["rows"]["rows"] == len(scored_calls(place))
    assert train["groups"] == len(place.store.read.group_ids(state="trained"))


def test_what_cannot_be_imitated_or_told_apart_is_counted_by_reason(place: Place, judge: Judge):
    upstream_traffic(place)
    config = replace(
        RESAMPLING,
        train=replace(TRAINING.train, imitate_from=0.5, imitate_models=("*",), prefer_from=5.0, max_kl_nats=None),
    )
    train = place.cycle(judge, config).metrics["train"]
    groups = place.store.read.groups(state="trained")
    copies = sum(len(group.trajectories) - 1 for group in groups)
    assert sum(train["not_imitated"].values()) == copies
    assert set(train["not_imitated"]) <= {"reward too low", "answered by a policy", "learned from another copy"}
    assert train["not_preferred"] == {"no two siblings with this prompt differ enough": len(groups)}
    assert (train["demonstrations"], train["pairs"]) == (len(groups), 0)


def test_nothing_is_said_of_what_was_not_asked_for(place: Place, judge: Judge):
    rewarded_traffic(place)
    assert not {"not_imitated", "not_preferred"} & place.cycle(judge, TRAINING).metrics["train"].keys()


def test_what_the_chat_template_makes_of_calls_is_counted_and_the_first_difference_shown(place: Place, judge: Judge):
    rewarded_traffic(place)  # a random model's answers are not cut into tokens as an encoder would
    report = place.cycle(judge, TRAINING)
    found = report.metrics["train"]["round_trips"]
    assert found.keys() == {"calls", "unchecked", "exact", "engines", "differences"}
    assert found["calls"] + found["unchecked"] == len(scored_calls(place)) > found["calls"] == 32
    assert found["engines"] == {"embedded": 32, "vllm": 32}
    assert found["differences"] == {"the text encodes otherwise": 32 - found["exact"]}
    first = report.metrics["round_trips"]["first"].splitlines()
    assert first[0] == f"{found['exact']} of 32 calls are what the chat template makes of them"
    assert first[2].startswith("the text encodes otherwise: call ")
    assert len(first) == 6  # one of them
    policy = place.store.ledger.policy("agent@1")
    assert policy is not None
    assert policy.metrics["train"]["round_trips"] == found  # and nobody's words are kept


def a_run() -> Run:
    return Run(cast("Any", None), cast("Any", None), TRAINING, lambda stage, done, total, note="": None, now=1.0)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("chat_template.jinja", "", "the base has no chat template"),
        ("tokenizer.json", "damaged", "the base has no tokenizer that can be read"),
    ],
)
def test_a_base_without_a_template_is_trained_all_the_same(
    base: Path, tmp_path: Path, file: str, content: str, reason: str
):
    bare = tmp_path / "bare"
    shutil.copytree(base, bare)
    (bare / file).write_text(content)
    text, run = base_text(str(bare), []), a_run()
    (said,) = round_trip_metrics(run, text).values()
    assert said.startswith(reason)
    assert run.metrics == {}
    with pytest.raises(ConfigError, match=rf"{reason}.*; put the tokenizer beside"):
        text.renderer()


def test_recorded_calls_that_the_template_gives_back_are_exact(base: Path):
    tokenizer = make_tokenizer(320)
    messages = [{"role": "user", "content": "how many plum?"}]
    prompt = PromptEncoder(tokenizer).encode(messages, None, None)
    call = make_call("a", prompt=prompt, answer=tokenizer.encode("one<|im_end|>"), messages=messages)
    run = a_run()
    found = round_trip_metrics(run, base_text(str(base), [make_trajectory("t", call)]))
    assert (found["calls"], found["exact"], found["differences"]) == (1, 1, {})
    assert run.metrics == {}


@pytest.fixture
def learning(tmp_path: Path, base: Path) -> Iterator[Learning]:
    here = Learning(tmp_path, base)
    yield here
    assert here.store.verify() == []
    here.store.close()


def job_of(learning: Learning, **train: Any) -> tuple[TrainJob | None, dict[str, Any]]:
    cycle = learning.cycle(**train)
    groups = cycle.store.read.groups(state="scored", held_out=False)
    return make_job(cycle, learning.champion, groups, learning.adapters / "agent@1"), cycle.metrics["train"]


def advantages(job: TrainJob) -> list[float]:
    return [sibling.example.advantage for group in job.groups for sibling in group.siblings]


def test_what_was_cut_off_is_not_trained_and_only_what_is_trained_is_compared(learning: Learning):
    turns = answered((1, 2), (3, 4, 5), "length"), answered((1, 2, 3, 4, 5, 6), (7,))
    learning.group("g", (0.1, turns), (0.7, [answered((1, 2), (9, 8))]), (0.2, [answered((1, 2), (6,) * 9, "length")]))
    (whole, all_metrics), (job, metrics) = job_of(learning), job_of(learning, learn_truncated=False)
    assert whole is not None and job is not None
    assert advantages(whole) == pytest.approx([a / 0.3215 for a in (-0.7 / 3, 1.1 / 3, -0.4 / 3)], abs=1e-3)
    assert advantages(job) == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0], abs=1e-3)
    (group,), (before,) = job.groups, whole.groups
    first, second, third = (sibling.example.rows for sibling in group.siblings)
    assert [row.sampled_T for row in first] == [(False,) * 6 + (True,)]
    assert second == before.siblings[1].example.rows
    assert third == ()
    assert (all_metrics["rows"]["tokens"], metrics["rows"]["tokens"]) == (15, 3)
    assert (metrics["rows"]["truncated_tokens"], metrics["rows"]["left_out"]) == (12, {TRUNCATED: 2})
    # what the loss divides by: tokens that are trained, and trajectories that have any
    ((lesson,), (known,)) = job.lessons, whole.lessons
    assert ((lesson.tokens, lesson.trajectories), (known.tokens, known.trajectories)) == ((3, 2), (15, 3))


UPSTREAM = replace(answered((1,), (9,)), policy=None)
TOO_OLD = answered((1,), (9,), policy="other@0")


def groups_put_aside(learning: Learning) -> list[tuple[str, str, str]]:
    with sqlite3.connect(learning.adapters.parent / "store.db") as raw:
        return raw.execute("SELECT id, state, reason FROM groups WHERE state != 'scored' ORDER BY id").fetchall()


@pytest.mark.parametrize("other", [UPSTREAM, TOO_OLD, answered((1,), (9,), params={"top_p": 0.5})])
def test_siblings_are_compared_with_those_that_are_trained(learning: Learning, other: Call):
    ours = [(n / 10, [answered((1,), (n + 2,))]) for n in range(7)]
    learning.group("a", (1.0, [other]), *ours)
    job, _ = job_of(learning)
    assert job is not None
    std = statistics.stdev(n / 10 for n in range(7)) + 1e-4
    assert advantages(job) == pytest.approx([0.0, *((n - 3) / 10 / std for n in range(7))])
    assert math.fsum(advantages(job)) == pytest.approx(0.0)
    # the spread of the batch is of what is trained, too: of 0 and 1 here, and of 0 to .6 above
    learning.group("b", (0.5, [other]), (0.0, [answered((1,), (2,))]), (1.0, [answered((1,), (3,))]))
    batch = statistics.stdev([*(n / 10 for n in range(7)), 0.0, 1.0]) + 1e-4
    both, _ = job_of(learning, advantage_scale="batch")
    assert both is not None
    expected = [0.0, *((n - 3) / 10 / batch for n in range(7)), 0.0, -0.5 / batch, 0.5 / batch]
    assert advantages(both) == pytest.approx(expected)


def test_what_teaches_nothing_but_for_an_answer_that_is_not_trained_is_put_aside(learning: Learning):
    better, worse, alike = answered((1,), (2,)), answered((1,), (3,)), [(0.5, [answered((1,), (4,))])] * 7
    learning.group("alike", (1.0, [UPSTREAM]), *alike)
    learning.group("alone", (1.0, [UPSTREAM]), (0.5, [better]))
    learning.group("fine", (1.0, [UPSTREAM]), (0.5, [better]), (0.0, [worse]), (None, [worse]))
    learning.group("no score", (1.0, [UPSTREAM]), (0.5, [better]), (None, [worse]))
    learning.group("old", (1.0, [TOO_OLD]), (0.5, [better]))
    job, metrics = job_of(learning, advantage_scale="group")
    assert job is not None
    assert (job.group_ids, metrics["groups"], metrics["dead_groups"]) == (("fine",), 5, 1)
    assert advantages(job) == pytest.approx([0.0, 0.5**0.5, -(0.5**0.5), 0.0], abs=1e-3)
    assert groups_put_aside(learning) == [
        ("alike", "dead", "all siblings that are trained were scored alike"),
        ("alone", "stale", "answered by upstream"),
        ("no score", "stale", "answered by upstream"),
        ("old", "stale", "not sampled within 2 steps of the champion"),
    ]


def test_staleness_goes_along_the_line_of_parents(learning: Learning):
    learning.candidate(1)
    for step in (2, 3, 4, 5):  # four rejected ones in a row do not make the runs of their parent old
        learning.candidate(step, parent="agent@1")
    learning.candidate(6, parent="agent@1")
    learning.candidate(9, parent="agent@6")  # served for a time and was rolled back to its parent
    learning.candidate(10, parent="agent@9")
    learning.candidate(11, parent="agent@10")
    learning.champion = replace(learning.champion, name="agent@6", parent="agent@1")
    for sampled in (0, 1, 2, 5, 6, 9, 10, 11, 99):
        its = [(value, [answered((1,), (2,), policy=f"agent@{sampled}")]) for value in (0.0, 1.0)]
        learning.group(f"by {sampled}", *its)
    job, metrics = job_of(learning, max_staleness=2)
    assert job is not None
    assert set(job.group_ids) == {f"by {sampled}" for sampled in (0, 1, 2, 5, 6, 9, 10)}
    assert metrics["rows"]["left_out"] == {"not sampled within 2 steps of the champion": 4}
    near, _ = job_of(learning, max_staleness=1)
    assert near is not None
    assert set(near.group_ids) == {"by 1", "by 6", "by 9"}


def judged(learning: Learning, key: str, *values: float) -> None:
    group = learning.group(key, *((None, [answered((1,), (n + 2,))]) for n in range(len(values))))
    learning.store.write([
        Score(f"{run.id}-s", run.id, "ruler", value, "ruler", 1.0, group_id=key, judge="j", rubric="r")
        for run, value in zip(group.trajectories, values, strict=True)
    ])  # fmt: skip


def test_rewards_that_differ_no_more_than_the_judge_disagrees_with_itself_teach_nothing(learning: Learning):
    judged(learning, "far", 0.1, 0.9, 0.5)
    judged(learning, "near", 0.50, 0.54, 0.52)
    learning.group("near, from users", *((value, [answered((1,), (2,))]) for value in (0.50, 0.54, 0.52)))
    job, metrics = job_of(learning)
    assert job is not None
    assert (len(job.group_ids), metrics["reward_noise"], metrics["within_noise"]) == (3, 0.0, 0)
    told = Judgement("p", "g", 1.0, "j", "r", "second pass", "ok", facts={"noise": 0.015, "siblings": 4})
    learning.store.ledger.add_judgement(told)
    job, metrics = job_of(learning)
    assert job is not None
    assert (job.group_ids, metrics["within_noise"], metrics["dead_groups"]) == (("far", "near, from users"), 1, 1)
    assert metrics["reward_noise"] == pytest.approx(0.015)
    assert groups_put_aside(learning) == [
        ("near", "dead", "the rewards of the siblings differ no more than the judge disagrees with itself")
    ]


def test_single_turns_have_a_batch_and_a_weight_of_their_own(learning: Learning):
    runs = [(0.0, [answered((1,), (2,) * 9)]), (1.0, [answered((1,), (3,) * 9)])]
    turns = [(0.1, [answered((1,), (2,))]), (0.0, [answered((1,), (3,) * 2)])]
    learning.group("run", *runs)
    learning.group("turn", *turns, how="resampled")
    job, _ = job_of(learning)
    assert job is not None
    assert advantages(job) == pytest.approx([a / 2**0.5 for a in (-1, 1, 1, -1)], abs=2e-3)
    assert [lesson.weight for lesson in job.lessons] == pytest.approx([21 / 36, 21 / 6])
    mean, _ = job_of(learning, loss=LossConfig("grpo"))
    assert mean is not None
    assert [lesson.weight for lesson in mean.lessons] == [1.0, 1.0]


def test_upstreams_answer_is_imitated_and_told_apart_though_nothing_is_compared_with_it(learning: Learning):
    learning.group("g", (1.0, [UPSTREAM]), (0.5, [answered((1,), (4,))]), (0.5, [answered((1,), (5,))]))
    job, _ = job_of(learning, imitate_from=0.9, imitate_models=("*",), prefer_from=0.2)
    assert job is not None
    assert (len(job.demonstrations), len(job.pairs), job.group_ids) == (1, 1, ("g",))
    assert (advantages(job), job.lessons) == ([0.0, 0.0, 0.0], ())


def test_a_group_in_which_everything_was_cut_off_is_put_aside_with_that_reason(learning: Learning):
    learning.group("g", (0.0, [answered((1,), (2,), "length")]), (1.0, [answered((1,), (3,), "length")]))
    job, _ = job_of(learning, learn_truncated=False)
    assert job is None
    assert learning.store.read.group_ids(state="stale") == ("g",)
    with sqlite3.connect(learning.adapters.parent / "store.db") as raw:
        assert raw.execute("SELECT reason FROM groups").fetchall() == [(TRUNCATED,)]
