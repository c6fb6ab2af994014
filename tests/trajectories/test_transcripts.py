from __future__ import annotations

from typing import Any

from art_patch.trajectories import number_tool_calls, offered_tools, transcript
from art_patch.types import Call, Choice, Trajectory, TrajectoryInfo


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def run(*calls: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> Trajectory:
    """Calls given as (prompt, answers)."""
    return Trajectory(
        TrajectoryInfo("t", 0.0),
        tuple(
            Call(str(i), "t", float(i), "m", tuple(prompt), tuple(Choice(n, m) for n, m in enumerate(answers)))
            for i, (prompt, answers) in enumerate(calls)
        ),
    )


def test_the_last_prompt_and_its_answer_are_the_run() -> None:
    first, second = [user("a")], [user("a"), said("b"), user("c")]
    assert transcript(run((first, [said("b")]), (second, [said("d")]))) == (*second, said("d"))


def test_the_longest_conversation_wins_over_a_later_side_call() -> None:
    main = [user("a"), said("b"), user("c")]
    assert transcript(run((main, [said("d")]), ([user("title?")], [said("T")]))) == (*main, said("d"))


def test_of_equally_long_ones_the_later_counts() -> None:
    assert transcript(run(([user("a")], [said("b")]), ([user("c")], [said("d")]))) == (user("c"), said("d"))


def test_without_a_call_that_went_on_the_first_choice_is_taken() -> None:
    trajectory = run(([user("a")], [said("0"), said("1")]))
    assert transcript(trajectory)[-1] == said("0")
    call = trajectory.calls[0]
    backwards = Call("x", "t", 0.0, "m", call.messages, call.choices[::-1])
    assert transcript(Trajectory(trajectory.info, (backwards,)))[-1] == said("0")


def test_the_next_prompt_shows_which_choice_was_used_even_if_it_failed() -> None:
    went_on = [user("a"), said("1"), user("c")]
    assert transcript(run(([user("a")], [said("0"), said("1")]), (went_on, []))) == tuple(went_on)


def test_no_calls_no_messages() -> None:
    assert transcript(run()) == ()


def test_tools_come_once_in_the_order_they_came_up() -> None:
    def call(*tools: dict[str, Any]) -> Trajectory:
        return Trajectory(TrajectoryInfo("t", 0.0), (Call("c", "t", 0.0, "m", (user("a"),), tools=tools),))

    a, b = {"type": "function", "function": {"name": "a"}}, {"type": "function", "function": {"name": "b"}}
    assert offered_tools([call(b), call(a, dict(reversed(b.items())))]) == (b, a)


def test_tool_call_ids_are_numbered_and_nothing_else_changes() -> None:
    def turn(*ids: str) -> list[dict[str, Any]]:
        calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": i}} for i in ids]
        return [
            {"role": "assistant", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": i} for i in reversed(ids)),
        ]

    given = [user("a"), *turn("x7", "q9"), *turn("x7"), *turn("z0"), {"role": "assistant", "tool_calls": "odd"}]
    numbered = number_tool_calls(given)
    ids = [[c["id"] for c in m["tool_calls"]] if "tool_calls" in m else m.get("tool_call_id") for m in numbered[:-1]]
    assert ids == [None, ["call_1", "call_2"], "call_2", "call_1", ["call_1"], "call_1", ["call_3"], "call_3"]
    assert numbered[1]["tool_calls"][0]["function"]["arguments"] == "x7"
    assert (numbered[0], numbered[-1]) == (given[0], given[-1])
    assert given[1]["tool_calls"][0]["id"] == "x7"
    assert number_tool_calls(numbered) == numbered
