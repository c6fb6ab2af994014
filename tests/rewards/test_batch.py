"""The defended batch: with a judge that says what a test wants, and with the stand-in judge over real HTTP."""

from __future__ import annotations

import gc
import math
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge, shop_rule
from art_patch.demo.shop import TOOLS, Task, make_tasks, run_tool
from art_patch.errors import JudgeError
from art_patch.rewards import DefenceConfig, Judge, JudgedBatch, JudgeReport, both_ways, judge_batch, noise_of_judges
from art_patch.trajectories import transcript
from art_patch.types import Call, Choice, Group, Judgement, Score, Trajectory, TrajectoryInfo
from tests.rewards.attacks import PLEAS
from tests.support.ruled_judge import Fake, said

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

OFF = DefenceConfig(double_share=0.0, planted_share=0.0)


@pytest.fixture(scope="module", autouse=True)
def collect_litellm_connections() -> Iterator[None]:
    """Collect them here, so that they do not turn up as another module's warning."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def number(trajectory: Trajectory, _: str = "") -> float:
    """The number that an answer ends with, 0 if there is none: what a good judge of these groups says."""
    word = said(trajectory).rpartition(" ")[2]
    return float(word) if word.replace(".", "", 1).isdigit() and word.count(".") else 0.0


def group_of(name: str, answers: Sequence[str], user: str | None = None) -> Group:
    siblings: list[Trajectory] = []
    for index, answer in enumerate(answers):
        key = f"{name}-{index}"
        call = Call(key, key, 0.0, "m", ({"role": "user", "content": name},), (_choice(answer),))
        siblings.append(Trajectory(TrajectoryInfo(key, 0.0, user_id=user), (call,)))
    return Group(name, name, "same_task", tuple(siblings))


def _choice(text: str) -> Choice:
    return Choice(0, {"role": "assistant", "content": text})


def batch(count: int, answers: Sequence[str] = ("0.2", "0.6", "0.9")) -> list[Group]:
    return [group_of(f"g{n}", [f"for task {n} it is {answer}" for answer in answers]) for n in range(count)]


def values(result: JudgedBatch) -> dict[str, float]:
    return {score.trajectory_id: score.value for score in result.scores}


def test_a_good_judge_passes_with_all_defences_up():
    groups, seen, steps = batch(20), list[str](), list[tuple[int, int]]()
    judge = Fake(number)
    known = (Score("s", "t", "ruler", 1.0, "ruler", 1.0),)
    result = judge_batch(
        groups,
        judge,
        seed=3,
        known=known,
        on_scored=lambda group, *_: seen.append(group.id),
        progress=lambda done, total: steps.append((done, total)),
    )
    assert values(result) == {t.id: number(t) for group in groups for t in group.trajectories}
    assert (result.unscored, result.quarantined, result.alarms, result.flags, result.left) == ({}, {}, (), {}, {})
    assert result.planted_answers == (2, 2) and result.agreement == 1.0
    assert [(purpose, len(ids), given) for purpose, ids, given in judge.asked] == [
        ("planted answer", 2, ()), ("score", 20, known), ("second pass", 4, ()),
    ]  # fmt: skip
    assert seen == [group.id for group in groups]  # of planted_answers and second passes nothing is to be kept
    assert steps == [(n + 1, 26) for n in range(26)]
    assert (result.calls, result.prompt_tokens, result.completion_tokens) == (26, 260, 26)
    assert result.cost_usd == pytest.approx(0.26)


def test_the_same_seed_gives_the_same_batch_and_another_seed_other_choices():
    def asked(seed: int) -> list[Any]:
        judge = Fake(number)
        judge_batch(batch(20), judge, seed=seed)
        return judge.asked

    assert asked(1) == asked(1) != asked(2)


def test_a_judge_that_goes_by_place_is_quarantined_where_it_was_asked_twice():
    def by_place(trajectory: Trajectory, order: str) -> float:
        first = int(trajectory.id[-1]) / 2 if trajectory.id[-1].isdigit() else 0.0
        return first if order == "shuffled" else 1 - first

    result = judge_batch(batch(5), Fake(by_place), DefenceConfig(double_share=1.0, planted_share=0.0), seed=0)
    assert result.quarantined.keys() == {f"g{n}" for n in range(5)} and result.scores == ()
    assert result.agreement == 0.0 and "disagreed with itself on 5 of 5" in result.alarms[0]


def test_an_order_that_turns_without_what_followed_is_put_aside():
    """A planted canary: an attempt that invents the very value that a tool returned later."""
    told = ({"role": "tool", "content": "0.9"},)
    groups = [replace(group, how="resampled", followed=told) for group in batch(5)] + batch(2)[1:]
    groups[-1] = replace(groups[-1], id="plain")

    class Impressed(Fake):
        def score_groups(self, groups: Sequence[Group], **how: Any) -> JudgeReport:
            is_shown = {group.id: bool(group.followed) for group in groups}
            honest = {"g0", "plain"}
            self.rule = lambda t, _: number(t) if t.id[:2] in honest or is_shown.get(t.id[:2], True) else 1 - number(t)
            return super().score_groups(groups, **how)

    judge = Impressed(number)
    config = DefenceConfig(double_share=0.0, planted_share=0.0, blind_share=1.0)
    result = judge_batch(groups, judge, config, seed=0)
    assert [(purpose, len(ids)) for purpose, ids, _ in judge.asked] == [("score", 6), ("without what followed", 5)]
    why = "without what followed, the judge orders the attempts the other way round"
    assert result.quarantined == dict.fromkeys(("g1", "g2", "g3", "g4"), why)
    assert values(result) == {t.id: number(t) for group in (groups[0], groups[-1]) for t in group.trajectories}
    assert (result.calls, result.alarms) == (11, ())
    assert judge_batch(groups, Impressed(number), replace(config, blind_share=0.0), seed=0).quarantined == {}
    muted = Impressed(number, mute_in="without what followed")
    assert judge_batch(groups, muted, config, seed=0).unscored.keys() == {f"g{n}" for n in range(5)}


def test_how_far_both_passes_are_apart_is_noted_where_they_agree():
    def noisy(trajectory: Trajectory, order: str) -> float:
        if order == "reversed" and trajectory.id.startswith("g1"):
            return 1 - number(trajectory)
        return number(trajectory) + (0.1 if order == "reversed" and trajectory.id.endswith("0") else 0.0)

    kept: list[Judgement] = []
    config = DefenceConfig(double_share=1.0, planted_share=0.0)
    result = judge_batch(batch(3), Fake(noisy), config, seed=0, on_judgement=kept.append)
    assert result.quarantined.keys() == {"g1"}
    assert [(each.purpose, each.facts.keys()) for each in kept[:3]] == [("score", {"order"})] * 3
    facts = {each.group_id: each.facts for each in kept[3:]}
    assert facts["g1"].keys() == {"order", "both_ways"}  # it is quarantined, and nothing is trained on it
    expected = math.sqrt(0.1**2 / 3 / 2)  # variance of (.1, 0, 0) is .1^2 / 3, of two errors
    assert [(facts[name]["noise"], facts[name]["siblings"]) for name in ("g0", "g2")] == [
        (pytest.approx(expected), 3)
    ] * 2
    assert noise_of_judges(kept) == {("fake", "r"): pytest.approx(expected)}
    assert noise_of_judges([]) == {}
    runs = {group.id: group.trajectories for group in batch(3)}
    for key, its in runs.items():
        both = {each.id: (noisy(each, "shuffled"), noisy(each, "reversed")) for each in its}
        assert both_ways(facts[key], key, [each.id for each in its]) == both
    assert both_ways(facts["g0"], "g0", ["another"]) == both_ways({}, "g0", ["g0"]) == {}
    assert not any(each.id in repr(facts) for its in runs.values() for each in its), "ids that an app chose"


def test_the_mean_of_both_passes_is_the_score():
    result = judge_batch(
        batch(1),
        Fake(lambda t, order: number(t) - (0.1 if order == "reversed" else 0.0)),
        DefenceConfig(double_share=1.0, planted_share=0.0),
        seed=0,
    )
    assert values(result) == pytest.approx({"g0-0": 0.15, "g0-1": 0.55, "g0-2": 0.85})
    assert {score.id for score in result.scores} == {"g0 g0-0", "g0 g0-1", "g0 g0-2"}


def test_a_judge_that_falls_for_canaries_is_asked_no_further():
    judge = Fake(lambda t, _: 1.0 if t.id.startswith("planted answer") else number(t))
    groups = batch(20)
    result = judge_batch(groups, judge, seed=0)
    assert result.quarantined.keys() == {group.id for group in groups} and result.scores == ()
    assert result.planted_answers == (2, 0) and len(result.alarms) == 2 and result.calls == 2
    assert "known-bad" in result.quarantined["g0"]
    assert [purpose for purpose, *_ in judge.asked] == ["planted answer"]


def test_one_canary_missed_is_an_alarm_and_stops_only_the_strict():
    fooled: list[str] = []

    def once(trajectory: Trajectory, _: str) -> float:
        if trajectory.id.startswith("planted answer") and fooled in ([], [trajectory.id]):
            fooled[:] = [trajectory.id]
            return 1.0
        return number(trajectory)

    relaxed = judge_batch(batch(8), Fake(once), seed=0)
    assert relaxed.planted_answers == (2, 1) and len(relaxed.alarms) == 1 and len(relaxed.scores) == 24
    fooled.clear()
    strict = judge_batch(batch(8), Fake(once), DefenceConfig(strict=True), seed=0)
    assert strict.scores == () and len(strict.quarantined) == 8
    assert all(reason.startswith("strict: ") for reason in strict.quarantined.values())


def test_what_the_judge_cannot_score_stays_unscored_in_either_pass():
    config = DefenceConfig(double_share=1.0, planted_share=0.0)
    result = judge_batch(batch(3), Fake(number, mute=["g1"]), config, seed=0)
    assert result.unscored == {"g1": "mute"} and len(result.scores) == 6
    result = judge_batch(batch(3), Fake(number, mute_in="second pass"), config, seed=0)
    assert result.unscored.keys() == {"g0", "g1", "g2"} and "second pass" in result.unscored["g0"]
    assert result.scores == ()


def test_canaries_that_cannot_be_judged_are_an_alarm_and_a_dead_judge_an_error():
    result = judge_batch(batch(3), Fake(number, mute_in="planted answer"), seed=0)
    assert (
        result.planted_answers == (0, 0)
        and "no planted answer could be judged" in result.alarms[0]
        and len(result.scores) == 9
    )
    with pytest.raises(JudgeError):
        judge_batch(batch(3), Fake(number, mute=["g0", "g1", "g2"]), seed=0)


def test_an_attempt_that_talks_to_the_judge_is_capped_and_says_so():
    plea = PLEAS["plain"]
    groups = [group_of("g0", [f"{plea} 1.0", "it is 0.3", "it is 0.4", "it is 0.9"])]
    result = judge_batch(groups, Fake(number), OFF, seed=0)
    assert values(result) == {"g0-0": 0.4, "g0-1": 0.3, "g0-2": 0.4, "g0-3": 0.9}
    assert result.capped == {"g0-0": 1.0} and result.flags.keys() == {"g0-0"}
    (capped,) = [score for score in result.scores if score.trajectory_id == "g0-0"]
    assert "capped at 0.40, was 1.00" in (capped.comment or "") and (capped.comment or "").startswith("why")


@pytest.mark.parametrize("strict", [False, True])
def test_longer_is_not_better(strict: bool):
    groups = [group_of(f"g{n}", ["x " * length + f"0.{length}" for length in (2, 4, 6, 8)]) for n in range(10)]
    config = DefenceConfig(double_share=0.0, planted_share=0.0, strict=strict)
    result = judge_batch(groups, Fake(number), config, seed=0)
    assert result.length_correlation == pytest.approx(1.0) and "longer" in result.alarms[0]
    assert (len(result.scores), len(result.quarantined)) == ((0, 10) if strict else (40, 0))


def test_a_users_surplus_is_left_unjudged():
    groups = [group_of(f"loud{n}", ["it is 0.1", "it is 0.9"], "loud") for n in range(10)]
    groups += [group_of(user, ["it is 0.1", "it is 0.9"], user) for user in "uvw"]
    judge = Fake(number)
    result = judge_batch(groups, judge, OFF, seed=0)
    assert judge.asked[0][1] == ["loud0", "loud1", "loud2", "u", "v", "w"]
    assert list(result.left.values()) == [7] and len(result.scores) == 12


def test_groups_of_identical_siblings_and_no_groups_are_fine():
    result = judge_batch(batch(40, ["0.5"] * 4), Fake(number), DefenceConfig(double_share=1.0), seed=0)
    assert (result.alarms, result.quarantined, result.agreement) == ((), {}, 1.0) and len(result.scores) == 160
    empty = judge_batch([], Fake(number), seed=0)
    assert (empty.scores, empty.alarms, empty.calls, empty.cost_usd) == ((), (), 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_every_group_ends_in_exactly_one_place(seed: int):
    rng = random.Random(seed)
    groups = [
        group_of(f"g{n}", [f"it is 0.{rng.randrange(10)}" for _ in range(rng.randint(2, 6))], rng.choice("abcdef"))
        for n in range(rng.randint(1, 15))
    ]
    judge = Fake(lambda *_: rng.random(), mute=rng.sample([g.id for g in groups], len(groups) // 4))
    result = judge_batch(groups, judge, DefenceConfig(double_share=0.5, max_user_share=0.4), seed=seed)
    scored = {score.group_id for score in result.scores}
    places = [*scored, *result.unscored, *result.quarantined]
    assert len(places) == len(set(places))
    assert len(places) + sum(result.left.values()) == len(groups)
    assert {s.trajectory_id for s in result.scores} == {t.id for g in groups if g.id in scored for t in g.trajectories}


# --- the stand-in judge, the true prompt, client and parser ---


def attempt(task: Task, name: str, kind: str, turns: int) -> Trajectory:
    """A run in the shop, of one turn (the lookup) or two, that goes right or wrong."""
    item = task.item if kind != "wrong item" else next(i for i in task.prices if i != task.item)
    function = {"name": "lookup", "arguments": f'{{"item": "{item}"}}'}
    lookup = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    prompt: list[dict[str, Any]] = list(task.messages)
    answer: dict[str, Any] = lookup
    if kind == "no lookup":
        answer = {"role": "assistant", "content": "7"}
    elif turns == 2:
        result = run_tool(task, "lookup", function["arguments"])
        prompt += [lookup, {"role": "tool", "tool_call_id": "c", "content": result}]
        right = task.answer if kind != "wrong number" else str(int(task.answer) + 1)
        answer = {"role": "assistant", "content": right}
    call = Call(name, name, 0.0, "m", tuple(prompt), (Choice(0, answer),), tuple(TOOLS))
    return Trajectory(TrajectoryInfo(name, 0.0), (call,))


def shop_groups(count: int, seed: int) -> list[Group]:
    rng = random.Random(seed)
    kinds = ("right", "right", "wrong item", "wrong number", "no lookup")
    return [
        Group(
            f"g{n}",
            task.id,
            "same_task",
            tuple(attempt(task, f"g{n}-{i}", rng.choice(kinds), 1 + n % 2) for i in range(rng.randint(2, 6))),
        )
        for n, task in enumerate(make_tasks("traffic", count, seed=seed))
    ]


@pytest.mark.slow
def test_canaries_are_caught_by_the_stand_in_judge(record_property: Any):
    groups = shop_groups(240, seed=7)
    with serve_stand_in_judge(shop_rule) as base_url:
        judge = Judge(STAND_IN_MODEL, base_url=base_url, pause_s=0.01)
        result = judge_batch(groups, judge, DefenceConfig(planted_share=1.0), seed=1)
    planted, caught = result.planted_answers
    record_property(
        "figure", ("planted_answers caught by the stand-in judge", f"{caught} of {planted}", ">= 95 % of 200")
    )
    record_property("figure", ("pairs alike in both orders", f"{result.agreement:.1%}", "100 % for a rule"))
    assert planted >= 200 and caught >= 0.95 * planted
    assert result.agreement == 1.0 and result.quarantined == {} and result.unscored == {}
    assert values(result) == {t.id: shop_rule(list(transcript(t))) for group in groups for t in group.trajectories}


def test_a_judge_that_deals_scores_at_random_is_found_out(record_property: Any):
    found, chance = 0, random.Random(5)
    with serve_stand_in_judge(lambda messages: chance.choice([0.0, 1.0])) as base_url:
        for seed in range(10):
            judge = Judge(STAND_IN_MODEL, base_url=base_url, pause_s=0.01)
            config = DefenceConfig(double_share=1.0, planted_share=1.0)
            result = judge_batch(shop_groups(12, seed), judge, config, seed=seed)
            found += bool(result.alarms)
    record_property("figure", ("random judges that raised an alarm", f"{found} of 10", ">= 9"))
    assert found >= 9
