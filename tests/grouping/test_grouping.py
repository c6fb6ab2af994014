"""Which trajectories become siblings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from art_patch.grouping import is_held_out, scenario_of
from art_patch.grouping.scenario import normalise
from art_patch.types import Trajectory
from tests.support.factory import make_call, make_trajectory
from tests.support.groupings import asked, form, members


def test_the_same_task_makes_siblings_whatever_is_volatile_in_it():
    grouping = form(
        asked("a", "Refund order 4711 of 2026-11-02, ref 550e8400-e29b-41d4-a716-446655440000"),
        asked("b", "refund  order 4711 of 2025-01-31, ref 123e4567-e89b-12d3-a456-426614174000"),
        asked("c", "Refund order 4712 of 2026-11-02, ref 550e8400-e29b-41d4-a716-446655440000"),
    )
    assert members(grouping) == [["a", "b"]]
    assert grouping.groups[0].how == "same_task"
    assert grouping.left == {"waits for a sibling": 1}


def test_other_system_prompts_and_tools_are_never_siblings():
    grouping = form(asked("a", "x"), asked("b", "x", system="be kind"), asked("c", "x", tool="search"))
    assert grouping.groups == ()


def test_an_explicit_key_wins_over_the_text_and_a_group_key_over_a_scenario_key():
    grouping = form(
        asked("a", "x", scenario_key="s"), asked("b", "y", scenario_key="s"),
        asked("c", "z", scenario_key="s", group_key="g"), asked("d", "w", group_key="g"),
    )  # fmt: skip
    assert [(g.scenario_key, g.how, [t.id for t in g.trajectories]) for g in grouping.groups] == [
        ("scenario:s", "scenario_key", ["a", "b"]),
        ("group:g", "group_key", ["c", "d"]),
    ]


def test_later_turns_do_not_change_the_task():
    first = asked("a", "x")
    call = first.calls[0]
    longer = make_trajectory(
        "b", call, make_call("b2", messages=(*call.messages, {"role": "assistant", "content": "?"}), tools=call.tools)
    )
    assert scenario_of(first) == scenario_of(longer)


def test_what_cannot_be_trained_is_not_judged():
    upstream = make_trajectory("a", make_call(policy=None, untrainable="answered by upstream"))
    assert form(upstream, upstream).left == {"answered by upstream": 2}
    assert form(Trajectory(upstream.info, ())).left == {"no calls": 1}


@given(st.integers(1, 60), st.integers(2, 9))
def test_large_groups_are_split_evenly(size: int, largest: int):
    grouping = form(*(asked(f"{n:03}", "x") for n in range(size)), min_size=1, max_size=largest)
    sizes = [len(group.trajectories) for group in grouping.groups]
    assert [t for part in members(grouping) for t in part] == [f"{n:03}" for n in range(size)]
    assert max(sizes) <= largest
    assert max(sizes) - min(sizes) <= 1


def test_held_out_depends_on_the_key_alone_and_hits_its_share():
    keys = [f"task:{n}" for n in range(4_000)]
    held = {key for key in keys if is_held_out(key, 0.2)}
    assert 0.17 < len(held) / len(keys) < 0.23
    assert held <= {key for key in keys if is_held_out(key, 0.5)}
    assert not any(is_held_out(key, 0.0) for key in keys)
    assert all(is_held_out(key, 1.0) for key in keys)


@given(st.text())
def test_normalising_is_idempotent(text: str):
    assert normalise(normalise(text)) == normalise(text)
