"""Clusters, what is left, and properties that hold for any traffic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from art_patch.grouping import form_groups, is_held_out, scenario_of
from art_patch.types import Trajectory
from tests.support.factory import make_call, make_trajectory
from tests.support.groupings import asked, form, ids, members

TEXTS = st.sampled_from(
    ["price of 3 plums", "3 plums: price", "What is the price of 3 plums?", "price of 4 plums", "price of 3 pears",
     "refund ORD-12345", "Please refund ORD-99999", "refund", "Hi", ""]
)  # fmt: skip


@st.composite
def traffic(draw: st.DrawFn) -> list[Trajectory]:
    def one(number: int) -> Trajectory:
        about = draw(st.sampled_from([{}, {}, {"scenario_key": "s"}, {"group_key": "g"}]))
        made = asked(
            f"{number:03}", draw(TEXTS), system=draw(st.sampled_from("ab")), tool=draw(st.sampled_from("xy")), **about
        )
        reason = draw(st.sampled_from([None, None, "answered by upstream", "no answer"]))
        return replace(made, calls=tuple(replace(call, untrainable=reason) for call in made.calls))

    return [one(number) for number in range(draw(st.integers(0, 25)))]


def clusters(trajectories: Sequence[Trajectory]) -> set[tuple[str, frozenset[str]]]:
    grouping = form_groups(trajectories, new_id=ids(), max_size=99)
    return {(group.scenario_key, frozenset(t.id for t in group.trajectories)) for group in grouping.groups}


@given(traffic(), st.randoms())
def test_the_order_of_the_runs_does_not_matter(trajectories: list[Trajectory], rng: random.Random):
    shuffled = list(trajectories)
    rng.shuffle(shuffled)
    assert clusters(shuffled) == clusters(trajectories)


@given(traffic(), st.booleans(), st.integers(1, 5))
def test_every_run_has_one_place(trajectories: list[Trajectory], singles: bool, min_size: int):
    grouping = form_groups(
        trajectories, new_id=ids(), singles=singles, min_size=min_size, max_size=5, holdout_share=0.5
    )
    grouped = [key for group in members(grouping) for key in group]
    assert len(grouped) == len(set(grouped))
    assert len(grouped) + sum(grouping.left.values()) == len(trajectories)
    waiting, upstream = {t.id for t in grouping.waiting}, {t.id for t in grouping.others}
    assert len(waiting) == grouping.left.get("waits for a sibling", 0)
    assert not waiting & set(grouped) and not upstream & (waiting | set(grouped))
    assert grouping.keys.keys() == waiting | upstream


@given(traffic())
def test_siblings_share_system_prompt_and_tools_or_a_key(trajectories: list[Trajectory]):
    for group in form_groups(trajectories, new_id=ids()).groups:
        if group.how in ("same_task", "near_duplicate"):
            assert len({(t.calls[0].messages[0]["content"], str(t.calls[0].tools)) for t in group.trajectories}) == 1
        else:
            assert {scenario_of(t) for t in group.trajectories} == {(group.scenario_key, group.how)}


@given(traffic(), st.floats(0, 1))
def test_a_scenario_is_on_one_side(trajectories: list[Trajectory], share: float):
    grouping = form_groups(trajectories, new_id=ids(), holdout_share=share, max_size=2, singles=True)
    sides: dict[str, set[bool]] = {}
    for group in grouping.groups:
        sides.setdefault(group.scenario_key, set()).add(group.held_out)
        assert group.held_out == is_held_out(group.scenario_key, share)
    assert all(len(its) == 1 for its in sides.values())


def test_nearly_the_same_words_are_one_task_and_say_so():
    grouping = form(
        asked("a", "Price of 3 plums"), asked("b", "What's the price?"), asked("c", "3 plums price, please")
    )
    assert [(group.how, [t.id for t in group.trajectories]) for group in grouping.groups] == [
        ("near_duplicate", ["a", "c"])
    ]
    assert grouping.groups[0].scenario_key == (scenario_of(grouping.groups[0].trajectories[1]) or ("",))[0]


def test_hard_negatives_stay_apart():
    texts = ["price of 3 plums", "price of 4 plums", "price of 3 pears", "price of 3 Plumbers", "no price of 3 plums"]
    assert form(*(asked(str(number), text) for number, text in enumerate(texts))).groups == ()


def test_a_typo_finds_its_task_among_others():
    runs = [asked(str(number), "Where are my headphones?") for number in range(5)]
    grouping = form(*runs, asked("typo", "Where are my headphnoes?"), max_size=16)
    assert members(grouping) == [["0", "1", "2", "3", "4", "typo"]]
    alone = form(asked("typo", "Where are my headphnoes?"), min_size=2)
    assert alone.left == {"waits for a sibling": 1}


def test_a_run_that_began_at_a_turn_of_another_is_no_sibling_here():
    about = {"replay_of": "a", "replay_from": "c"}
    runs = [asked(f"{number}", "price of 3 plums") for number in range(2)]
    # An app may have words of its own in a run's metadata, which mean something else.
    named = replace(runs[0], info=replace(runs[0].info, metadata={"replay_from": "a checkpoint"}))
    begun = [replace(runs[1], info=replace(runs[1].info, id=f"b{n}", metadata=about)) for n in range(2)]
    grouping = form(named, runs[1], *begun)
    assert members(grouping) == [["0", "1"]]
    assert grouping.left == {"began at a turn of another run": 2}


def test_across_settings_only_if_asked():
    runs = asked("a", "x"), asked("b", "x", system="be kind"), asked("c", "x", tool="search")
    assert form(*runs).groups == ()
    assert members(form(*runs, across=True)) == [["a", "b", "c"]]


def test_attachments_are_part_of_the_task():
    def shown(key: str, url: str) -> Trajectory:
        parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
        return make_trajectory(key, make_call(key, messages=({"role": "user", "content": parts},)))

    assert members(form(shown("a", "data:1"), shown("b", "data:2"), shown("c", "data:1"))) == [["a", "c"]]


def test_a_held_out_scenario_needs_no_siblings_if_asked():
    runs = [asked(str(number), f"task number {number}") for number in range(30)]
    plain, single = form(*runs, holdout_share=0.3), form(*runs, holdout_share=0.3, singles=True)
    assert (plain.groups, len(plain.waiting)) == ((), 30)
    assert {(group.how, group.held_out, len(group.trajectories)) for group in single.groups} == {("single", True, 1)}
    assert len(single.groups) + len(single.waiting) == 30
    assert not any(is_held_out(single.keys[t.id], 0.3) for t in single.waiting)


def test_what_upstream_answered_waits_apart_unless_it_has_a_sibling():
    def upstream(key: str, text: str) -> Trajectory:
        made = asked(key, text)
        return replace(made, calls=tuple(replace(c, untrainable="answered by upstream") for c in made.calls))

    grouping = form(upstream("a", "x"), asked("b", "x"), upstream("c", "y"), upstream("d", "Y!"))
    assert [t.id for t in grouping.waiting] == ["b"]
    assert [t.id for t in grouping.others] == ["c", "d"]
    assert grouping.keys["c"] == grouping.keys["d"] != grouping.keys["b"]
    assert grouping.left == {"answered by upstream": 3, "waits for a sibling": 1}
