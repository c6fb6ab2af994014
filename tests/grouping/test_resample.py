"""Which turns are answered again, and what group their answers make."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from art_patch.grouping import ResampleConfig, choose_turns, turn_group
from art_patch.types import Call, Choice, Trajectory, TrajectoryInfo
from tests.support.factory import make_call

QUESTION = {"role": "user", "content": "price of 3 plums?"}
LOOKUP = {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "lookup", "arguments": "{}"}}]}


def agent(key: str, depths: int = 3, *, result: str = "4", **changes: Any) -> Trajectory:
    """A run of several turns: each call sends all that was said before, and a tool answers."""
    messages: list[Any] = [QUESTION]
    calls: list[Call] = []
    for turn in range(depths):
        answer = LOOKUP if turn < depths - 1 else {"role": "assistant", "content": "12"}
        choices = (Choice(0, answer, "stop", (1,), (-0.1,)),)
        calls.append(make_call(f"{key}-{turn}", trajectory_id=key, messages=messages, choices=choices, **changes))
        messages = [*messages, answer, {"role": "tool", "tool_call_id": "x", "content": result if turn else "4"}]
    return Trajectory(TrajectoryInfo(key, 1.0, session_id="s", user_id="u"), tuple(calls))


def choose(runs: Any, config: ResampleConfig, **more: Any) -> Any:
    return choose_turns(runs, config, keys={run.id: f"task:{run.id}" for run in runs}, **more)


def depths_of(turns: Any) -> list[int]:
    return [int(turn.call.id.rpartition("-")[2]) for turn in turns]


def test_the_last_turn_or_all_depths_or_the_one_that_went_wrong():
    runs = [agent(f"run{n}") for n in range(60)]
    assert set(depths_of(choose(runs, ResampleConfig(pick="last"))[0])) == {2}
    spread = depths_of(choose(runs, ResampleConfig(pick="spread"))[0])
    assert min(spread.count(depth) for depth in range(3)) >= 10
    assert spread == depths_of(choose(runs, ResampleConfig(pick="spread"))[0])
    fault = ResampleConfig(pick="fault")
    assert depths_of(choose([agent("a", result="no such item")], fault)[0]) == [1]
    assert depths_of(choose([agent("a")], fault)[0]) == [2]
    assert depths_of(choose([agent("a")], fault, corrected={"a": "a-0"})[0]) == [0]


def test_every_run_has_its_turn_before_any_has_two_and_the_budget_holds():
    runs = [agent(f"run{n}", depths=2) for n in range(4)]
    turns, left = choose(runs, ResampleConfig(turns=2, max_turns=6))
    assert [turn.trajectory.id for turn in turns] == ["run0", "run1", "run2", "run3", "run0", "run1"]
    assert len({turn.call.id for turn in turns}) == 6
    assert left == {}
    turns, left = choose(runs, ResampleConfig(max_turns=3))
    assert len(turns) == 3
    assert left == {"beyond the budget of this cycle": 1}


def test_a_task_of_several_runs_waits_for_more_of_them():
    runs = [agent("a1"), agent("a2"), agent("a3"), agent("b1"), agent("b2"), agent("lone")]
    runs += [agent(key, untrainable="answered by upstream") for key in ("c1", "c2")]  # they become no siblings
    keys = {run.id: f"task:{run.id[0]}" for run in runs}
    turns, left = choose_turns(runs, ResampleConfig(), keys=keys, waited={"task:b": 2})
    assert [turn.trajectory.id for turn in turns] == ["lone", "c1", "c2"]
    assert left == {"waits up to 3 more cycles for siblings": 3, "waits up to 1 more cycle for siblings": 2}
    turns, left = choose_turns(runs, ResampleConfig(), keys=keys, waited={"task:a": 3, "task:b": 4})
    assert (len(turns), left) == (len(runs), {})
    assert len(choose_turns(runs, ResampleConfig(wait_cycles=0), keys=keys)[0]) == len(runs)


def test_prompts_that_are_not_whole_are_left_alone():
    runs = [
        agent("media", untrainable="media was replaced by its hash"),
        agent("redacted", untrainable="texts were redacted"),
        agent("forced", untrainable="tool_choice constrains the answer"),
        agent("plain", api="completions"),
    ]
    assert choose(runs, ResampleConfig()) == ((), {"no turn can be answered again": 4})
    upstream = agent("up", policy=None, prompt=None, untrainable="answered by upstream")
    assert len(choose([upstream], ResampleConfig())[0]) == 1


def alternative(text: str, ids: tuple[int, ...] = (7,)) -> Call:
    choice = Choice(0, {"role": "assistant", "content": text}, "stop", ids, (-0.5,) * len(ids))
    return make_call("", trajectory_id="", choices=(choice,), policy="agent@3")


def test_the_given_answer_joins_its_siblings_cut_off_after_the_turn():
    run = agent("run")
    ((turn, *_), _) = choose([run], ResampleConfig(pick="last", turns=3))
    first = replace(turn, call=run.calls[0])
    numbers = count()
    group = turn_group(first, [alternative("no"), alternative("12")], new_id=lambda: f"new{next(numbers)}", at=9.0)
    assert group is not None
    assert (group.how, group.scenario_key, group.held_out) == ("resampled", turn.scenario_key, False)
    assert group.followed == (*run.calls[2].messages[2:], {"role": "assistant", "content": "12"})
    given, *others = group.trajectories
    assert [t.calls[0].choices[0].message for t in group.trajectories] == [
        LOOKUP, {"role": "assistant", "content": "no"}, {"role": "assistant", "content": "12"},
    ]  # fmt: skip
    assert given.calls == (replace(run.calls[0], id=given.calls[0].id, trajectory_id=given.id, shadow_of="run-0"),)
    for sibling in group.trajectories:
        assert (sibling.info.origin, sibling.info.user_id, sibling.info.session_id) == ("resampled", "u", "s")
        assert sibling.calls[0].shadow_of == "run-0"
        assert sibling.calls[0].trajectory_id == sibling.id
    assert {other.calls[0].policy for other in others} == {"agent@3"}


def test_answers_that_are_all_the_same_make_no_group():
    run = agent("run")
    ((turn,), _) = choose([run], ResampleConfig(pick="last"))
    assert turn_group(turn, [alternative("12"), alternative("12", (8, 9))], new_id=lambda: "x", at=1.0) is None


@given(
    depths=st.lists(st.integers(1, 5), max_size=8),
    pick=st.sampled_from(["last", "fault", "spread"]),
    turns=st.integers(1, 4),
    budget=st.integers(0, 20),
)
def test_no_turn_is_chosen_twice_and_every_run_is_accounted_for(depths: list[int], pick: Any, turns: int, budget: int):
    runs = [agent(f"run{n}", depth) for n, depth in enumerate(depths)]
    config = ResampleConfig(pick=pick, turns=turns, max_turns=budget)
    chosen, left = choose(runs, config)
    assert len({turn.call.id for turn in chosen}) == len(chosen) <= budget
    assert len({turn.trajectory.id for turn in chosen}) + sum(left.values()) == len(runs)
    for run in runs:
        assert sum(turn.trajectory is run for turn in chosen) <= min(turns, len(run.calls))
