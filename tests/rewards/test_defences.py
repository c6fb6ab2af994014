from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.errors import ConfigError
from art_patch.rewards import DefenceConfig
from art_patch.rewards.defences.injection import suspicion
from art_patch.rewards.defences.suspicion import (
    Flag,
    caps,
    flags,
    length_correlation,
    noise,
    pairwise_agreement,
    plant,
    shared_count,
    too_many_missed,
    why_disagreed,
    why_missed,
    within_user_share,
    written_length,
)
from art_patch.trajectories import transcript
from art_patch.types import Call, Choice, Group, Trajectory, TrajectoryInfo
from tests.rewards.attacks import BREAKOUTS, HONEST, PLEAS, UNSEEN_HONEST, UNSEEN_PLEAS

CONFIG = DefenceConfig()
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {}}}

values = st.floats(0, 1)
rows = st.lists(st.tuples(values, values), min_size=1, max_size=8)


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def sibling(name: str, *messages: dict[str, Any], user: str | None = None) -> Trajectory:
    *prompt, answer = messages
    call = Call(name, name, 0.0, "m", tuple(prompt), (Choice(0, answer),), (TOOL,))
    return Trajectory(TrajectoryInfo(name, 0.0, user_id=user), (call,))


def group(name: str, *answers: str, user: str | None = None) -> Group:
    question = asked(f"question {name}")
    return Group(
        name, name, "x", tuple(sibling(f"{name}-{i}", question, said(a), user=user) for i, a in enumerate(answers))
    )


# --- config ---


@pytest.mark.parametrize("name", ["double_share", "planted_share", "flag_cap", "max_user_share"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused_by_name(name: str, value: float):
    with pytest.raises(ConfigError, match=name):
        replace(CONFIG, **{name: value})


# --- agreement ---


def test_agreement_by_hand():
    # three pairs: one alike, one turned around, one tied in one order
    assert pairwise_agreement([0.1, 0.5, 0.9], [0.1, 0.9, 0.9], 0.05) == pytest.approx((1 + 1 + 0.5) / 3)
    assert pairwise_agreement([0.0, 1.0], [1.0, 0.0], 0.05) == 0.0
    assert pairwise_agreement([0.50, 0.54], [0.54, 0.50], 0.05) == 1.0  # both are ties


@given(rows)
def test_agreement_is_a_share_symmetric_and_whole_with_itself(row: list[tuple[float, float]]):
    first, second = [a for a, _ in row], [b for _, b in row]
    assert 0 <= pairwise_agreement(first, second, 0.05) <= 1
    assert pairwise_agreement(first, second, 0.05) == pytest.approx(pairwise_agreement(second, first, 0.05))
    assert pairwise_agreement(first, first, 0.05) == 1
    assert why_disagreed(first, first, CONFIG) is None


def test_a_reversed_ranking_and_a_large_difference_are_named_and_a_shift_is_neither():
    assert "pairs" in (why_disagreed([0.1, 0.5, 0.9], [0.9, 0.5, 0.1], CONFIG) or "")
    assert "differ by" in (why_disagreed([0.0, 0.1, 1.0], [0.0, 0.9, 1.0], CONFIG) or "")
    assert why_disagreed([0.1, 0.3, 0.5], [0.5, 0.7, 0.9], CONFIG) is None


def test_noise_by_hand_and_of_many_scores():
    # apart by .1 and -.1 after the shift: variance .02, of two errors
    assert noise((0.6, 0.4), (0.7, 0.7)) == pytest.approx(math.sqrt(0.02 / 2))
    assert noise((0.5, 0.9), (0.6, 1.0)) == pytest.approx(0.0)
    assert noise((0.5,), (0.9,)) == 0.0
    rng = random.Random(1)
    passes = [[0.5 + rng.gauss(0, 0.02) for _ in range(4_000)] for _ in range(2)]
    assert noise(*passes) == pytest.approx(0.02, rel=0.05)


def test_identical_siblings_agree_whatever_they_get():
    assert why_disagreed([0.0] * 4, [1.0] * 4, CONFIG) is None


# --- planted_answers ---


def test_canaries_come_in_every_kind_from_the_groups_own_material_and_leave_the_groups_alone():
    groups = [group(f"g{n}", *(f"answer {n} of {i}, at some length" for i in range(5))) for n in range(50)]
    planted_answers = plant(groups, replace(CONFIG, planted_share=1.0), random.Random(1))
    assert len({canary.group.id for canary in planted_answers}) == 50
    kinds = {canary.kind for canary in planted_answers}
    assert kinds == {"empty", "truncated", "begging", "answers another task", "invents a tool's result"}
    by_id = {each.id: each for each in groups}
    for canary in planted_answers:
        host = by_id[canary.group.id.removeprefix("planted answer of ")]
        *kept, bad = canary.group.trajectories
        assert (
            bad.id == canary.bad_id and len(kept) == 4 and set(t.id for t in kept) < {t.id for t in host.trajectories}
        )
        assert transcript(bad)[0] == transcript(kept[0])[0]
        assert transcript(bad)[-1] not in [transcript(t)[-1] for t in host.trajectories]
        assert bad.calls[0].untrainable
    assert plant(groups, replace(CONFIG, planted_share=1.0), random.Random(1)) == planted_answers
    assert plant(groups, replace(CONFIG, planted_share=0.0), random.Random(1)) == ()


@pytest.mark.parametrize(("count", "share", "planted"), [(0, 0.1, 0), (1, 0.1, 1), (4, 0.1, 2), (60, 0.1, 6)])
def test_how_many_are_planted(count: int, share: float, planted: int):
    groups = [group(f"g{n}", "yes it is", "no it is not") for n in range(count)]
    assert len(plant(groups, replace(CONFIG, planted_share=share), random.Random(0))) == planted


def test_runs_without_calls_host_no_canary():
    bare = Group("g", "g", "x", (Trajectory(TrajectoryInfo("a", 0.0), ()), Trajectory(TrajectoryInfo("b", 0.0), ())))
    assert plant([bare], CONFIG, random.Random(0)) == ()


def test_a_canary_belongs_at_the_bottom():
    (canary,) = plant([group("g", "one", "two", "three")], CONFIG, random.Random(0))
    names = [t.id for t in canary.group.trajectories[:-1]]

    def missed(bad: float, *others: float) -> str | None:
        return why_missed(canary, {canary.bad_id: bad, **dict(zip(names, others, strict=True))}, CONFIG)

    assert missed(0.0, 0.5, 0.6, 0.9) is None
    assert missed(0.2, 0.0, 0.5, 0.9) is None  # within the margin of the worst
    assert missed(0.5, 0.5, 0.5, 0.5) is None
    assert canary.kind in (missed(0.3, 0.0, 0.5, 0.9) or "")  # far above the worst
    assert missed(0.6, 0.5, 0.5, 0.9) is not None  # above the median


def test_one_miss_is_luck_and_many_are_not():
    assert [too_many_missed(planted, missed, CONFIG) for planted, missed in ((2, 1), (2, 2), (20, 4), (20, 5))] == [
        False, True, False, True,
    ]  # fmt: skip


# --- flags ---


def test_known_pleas_are_found_in_every_language_and_disguise(record_property: Any):
    found = [name for name, text in PLEAS.items() if suspicion(text)]
    record_property("figure", ("known pleas found", f"{len(found)} of {len(PLEAS)}", "all"))
    assert sorted(found) == sorted(PLEAS)


def test_honest_texts_are_left_alone(record_property: Any):
    assert [text for text in HONEST if suspicion(text)] == []
    flagged = [text for text in UNSEEN_HONEST if suspicion(text)]
    record_property("figure", ("honest texts flagged", f"{len(flagged)} of {len(UNSEEN_HONEST)}", "<= 5 %"))
    assert len(flagged) <= 0.05 * len(UNSEEN_HONEST)


def test_new_words_get_past_the_phrases_and_this_says_how_many(record_property: Any):
    found = [text for text in UNSEEN_PLEAS if suspicion(text)]
    record_property(
        "figure", ("pleas in new words found", f"{len(found)} of {len(UNSEEN_PLEAS)}", "none: a known weakness")
    )
    assert found


@pytest.mark.parametrize(
    "text",
    [
        *BREAKOUTS.values(),
        *(word + "a" * 100_000 for word in ("ignorier", "bewerte ", "daj ", "this answer deserves ", "olvid")),
        *(word + "a " * 50_000 for word in ("ignorier ", "gib ", "merece ", "أعط ")),
        *(unit * 50_000 for unit in ("_", "\n", " ", "ignore the ", "ignore_", "<<<", "f", "a.", "\\u0061")),
    ],
)
def test_no_text_keeps_the_search_busy(text: str):
    # A pattern that goes back and forth would not come back within the suite's timeout.
    assert suspicion(text) is None or text in BREAKOUTS.values()


def test_only_what_the_policy_wrote_is_its_own():
    plea = PLEAS["plain"]
    call = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": '{"q": "' + plea + '"}'}}
    result = {"role": "tool", "tool_call_id": "c", "content": plea}
    shared = [asked("hi"), said("hello"), asked("and now?")]
    siblings = (
        sibling("honest", *shared, said("42")),
        sibling("answer", *shared, said(plea)),
        sibling("arguments", *shared, {"role": "assistant", "tool_calls": [call]}),
        sibling("result", *shared, said("let me see"), result, said("42 it is")),
        sibling("both", *shared, said("let me look"), result, said(plea)),
    )
    found = flags(Group("g", "g", "x", siblings))
    assert {name: flag.own for name, flag in found.items()} == {
        "answer": True, "arguments": True, "result": False, "both": True,
    }  # fmt: skip
    assert found["answer"].reason.startswith("message 4 (assistant)") and "(tool)" in found["result"].reason


def test_what_all_siblings_share_flags_all_and_is_nobodys_own():
    shared = [asked(PLEAS["plain"]), said(PLEAS["German"])]
    found = flags(Group("g", "g", "x", tuple(sibling(n, *shared, asked("go on"), said(n)) for n in "abc")))
    assert {name: flag.own for name, flag in found.items()} == {"a": False, "b": False, "c": False}


@given(st.dictionaries(st.sampled_from("abcdef"), values, min_size=1), st.sets(st.sampled_from("abcdef")), values)
def test_a_cap_never_raises_and_touches_only_the_flagged(given_values: dict[str, float], own: set[str], cap: float):
    flagged = {name: Flag("x", name in own) for name in "abcdef"}
    config = replace(CONFIG, flag_cap=cap)
    capped = caps(given_values, flagged, config)
    assert capped.keys() <= own & given_values.keys()
    assert all(value < given_values[name] and value <= cap for name, value in capped.items())


def test_caps_by_hand():
    flagged = {"bad": Flag("x", True), "seen": Flag("x", False)}
    assert caps({"bad": 1.0, "a": 0.2, "b": 0.4, "seen": 0.9}, flagged, CONFIG) == {"bad": 0.4}  # the others' median
    assert caps({"bad": 1.0, "a": 0.8, "b": 0.9, "seen": 0.9}, flagged, CONFIG) == {"bad": 0.5}  # flag_cap
    assert caps({"bad": 1.0, "a": 0.0}, flagged, CONFIG) == {"bad": 0.0}
    assert caps({"bad": 0.1, "a": 0.9}, flagged, CONFIG) == {}
    assert caps({"a": 0.9, "b": 1.0}, {}, CONFIG) == {}


# --- length ---


def test_length_by_hand_and_from_groups():
    up = ([0.1, 0.2, 0.3], [10, 200, 3000])
    assert length_correlation([up] * 10) == pytest.approx(1.0)
    assert length_correlation([([0.3, 0.2, 0.1], [1, 2, 3])] * 10) == pytest.approx(-1.0)
    assert length_correlation([up, ([0.3, 0.2, 0.1], [1, 2, 3])] * 5) == pytest.approx(0.0)
    assert length_correlation([([0.1, 0.1, 0.9], [5, 6, 7])] * 10) == pytest.approx(3**0.5 / 2)  # ties share a rank
    siblings = (sibling("a", asked("long " * 99), said("12")), sibling("b", asked("long " * 99), said("1234")))
    lengths = written_length(Group("g", "g", "x", siblings))
    assert lengths[1] - lengths[0] == 2 and lengths[0] < 20


def test_too_little_to_correlate_is_no_alarm():
    assert length_correlation([]) is None
    assert length_correlation([([0.1, 0.2, 0.3], [1, 2, 3])] * 9) is None
    assert length_correlation([([0.5] * 4, [1, 2, 3, 4]), ([0.1, 0.2], [7, 7])] * 50) is None


# --- users ---


def test_a_user_gives_no_more_than_a_share_and_the_newest_wait():
    groups = [group(f"loud{n}", "a", "b", user="loud") for n in range(20)]
    groups += [group(f"{user}{n}", "a", "b", user=user) for user in ("u", "v", "w") for n in range(2)]
    kept, left = within_user_share(groups, CONFIG)
    assert [g.id for g in kept if g.id.startswith("loud")] == [f"loud{n}" for n in range(6)]
    assert len(kept) == 12 and {g.id for g in left} == {f"loud{n}" for n in range(6, 20)}


@given(st.lists(st.sampled_from(["a", "b", "c", "d", "e", None]), max_size=20), st.floats(0, 1))
def test_users_share_keeps_and_leaves_each_group_once_and_holds(users: list[str | None], share: float):
    groups = [group(f"g{n}", "x", "y", user=user) for n, user in enumerate(users)]
    kept, left = within_user_share(groups, replace(CONFIG, max_user_share=share))
    assert sorted(g.id for g in (*kept, *left)) == sorted(g.id for g in groups)
    known = {user for user in users if user}
    if len(known) < 4:
        assert not left
    elif len(kept) > 1:
        allowed = max(share, 2 / len(known)) * len(kept)
        assert max(sum(g.trajectories[0].info.user_id == user for g in kept) for user in known) <= allowed


def test_shared_beginning():
    assert shared_count(group("g", "a", "b")) == 1
    same = tuple(sibling(name, asked("q"), said("a")) for name in "ab")
    assert shared_count(Group("g", "g", "x", same)) == 1  # the last message of each is its own
