"""Answers that changed in a way that no score shows: each check on answers made to fail it, and only it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.gate import Answered, CollapseConfig, Finding, GateConfig, Given, Turn, collapse_findings, not_worse
from art_patch.gate.collapse import format_error, is_refusal, repetition
from art_patch.types import Choice
from tests.support.factory import make_call

LOOKUP = {
    "type": "function",
    "function": {"name": "lookup", "parameters": {"properties": {"item": {}, "n": {}}, "required": ["item"]}},
}


def say(text: str, *, ids: tuple[int, ...] = (1, 2, 3, 4), logprob: float = -0.5, finish: str = "stop") -> Choice:
    return Choice(0, {"role": "assistant", "content": text}, finish, ids, (logprob,) * len(ids))


def call_tool(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": function}]}


def usual(n: int) -> Given:
    return Given((say(f"answer {n}"), say(f"reply {n}")), 100.0)


def findings(candidate: Callable[[int], Given], count: int = 12, **changes: Any) -> dict[str, Finding]:
    answers = [Answered(Turn(f"s{n}", make_call(tools=(LOOKUP,))), candidate(n), usual(n)) for n in range(count)]
    return {row.name: row for row in collapse_findings(answers, GateConfig(), **changes)}


def failed(rows: dict[str, Finding]) -> set[str]:
    return {name for name, row in rows.items() if not row.passed}


def both(n: int, **how: Any) -> Given:
    return Given((say(f"answer {n}", **how), say(f"reply {n}", **how)), 100.0)


def test_what_has_not_changed_passes_with_every_figure():
    rows = findings(usual, kl_nats=0.1)
    assert failed(rows) == set()
    assert {name: (row.candidate, row.champion) for name, row in rows.items()} == {
        "empty answers": (0, 0),
        "refusals": (0, 0),
        "format errors": (0, 0),
        "cut off": (0, 0),
        "repetition": (0, 0),
        "different answers": (1, 1),
        "same answers": (0, 0),
        "length": (4, 4),
        "latency_ms": (100, 100),
        "entropy_nats": (0.5, 0.5),
        "kl_nats": (0.1, None),
    }


@pytest.mark.parametrize(
    ("candidate", "names"),
    [
        (lambda n: Given((say(""), say(f"reply {n}")), 100.0), {"empty answers"}),
        (lambda n: Given((say(f"I\u2019m sorry, but I can't do {n}"),) * 2, 100.0), {"refusals"}),
        (lambda n: Given((Choice(0, call_tool("look", str(n)), "stop", (1, 2), (-0.1,)),), 1.0), {"format errors"}),
        (lambda n: both(n, finish="length"), {"cut off"}),
        (lambda n: both(n, ids=(7, 7, 7, 7, 7, 7)), {"repetition"}),
        (lambda n: both(0, logprob=-0.1), set()),  # two answers for all: so may a task be that knows yes and no
        (lambda n: Given((say("yes"), say("yes")), 100.0), {"same answers"}),
        (lambda n: both(n, ids=tuple(range(20))), {"length"}),
        (lambda n: both(n, ids=()), {"entropy_nats"}),
        (lambda n: Given(both(n).choices, 201.0), {"latency_ms"}),
        (lambda n: both(n, logprob=-1.6), {"entropy_nats"}),
        (lambda n: both(n, logprob=-math.nan), {"entropy_nats"}),
        (
            lambda n: Given((), 100.0),
            {"empty answers", "refusals", "format errors", "cut off", "repetition", "length", "entropy_nats"},
        ),
    ],
)  # fmt: skip
def test_each_check_fails_on_what_it_is_for(candidate: Callable[[int], Given], names: set[str]):
    assert failed(findings(candidate)) == names


@pytest.mark.parametrize("kl_nats", [2.1, math.nan, math.inf])
def test_training_that_moved_too_far_fails(kl_nats: float):
    assert failed(findings(usual, kl_nats=kl_nats)) == {"kl_nats"}


def test_they_can_be_left_out_or_widened():
    answers = [Answered(Turn(f"s{n}", make_call()), both(0), usual(n)) for n in range(12)]
    assert collapse_findings(answers, GateConfig(collapse=None)) == ()
    wide = GateConfig(collapse=CollapseConfig(max_same=1.0))
    assert all(row.passed for row in collapse_findings(answers, wide))
    assert collapse_findings([], GateConfig()) == ()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (call_tool("lookup", '{"item": 1}'), None),
        (call_tool("lookup", '{"item": 1, "more": 2}'), None),
        (call_tool("look", "{}"), "there is no tool 'look'"),
        (call_tool("lookup", '{"item": '), "the arguments of lookup are no JSON"),
        (call_tool("lookup", "[1]"), "the arguments of lookup are no object"),
        (call_tool("lookup", ""), "lookup was not given 'item'"),
        ({"role": "assistant", "content": "no call"}, None),
    ],
)
def test_errors_of_tool_calls(message: dict[str, Any], error: str | None):
    assert format_error(message, (LOOKUP,)) == error


def test_refusals_and_repetition():
    assert is_refusal({"content": "  As an AI model"})
    assert not is_refusal({"content": "It cannot be refunded, I'm sorry."})
    assert not is_refusal(call_tool("lookup", "{}"))
    assert repetition(say("", ids=(1, 2, 3, 1, 2, 3))) == pytest.approx(0.25)
    assert repetition(Choice(0, {"content": "abab"})) == 0
    assert repetition(Choice(0, {"content": "ababab"})) == pytest.approx(0.5)


metrics = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=5, max_size=9)


@given(metrics, st.floats(0, 0.5))
def test_not_worse_is_sure_of_what_it_lets_pass(pairs: list[tuple[float, float]], allowed: float):
    named = [(f"s{n}", ours, theirs) for n, (ours, theirs) in enumerate(pairs)]
    row = not_worse("x", named, allowed=allowed, level=0.95)
    if row.passed:
        assert row.candidate is not None and row.champion is not None
        assert row.candidate >= row.champion - allowed - 1e-6
    mirrored = [(key, 1 - ours, 1 - theirs) for key, ours, theirs in named]
    assert not_worse("x", mirrored, allowed=allowed + 1e-6, level=0.95, less_is_better=True).passed >= row.passed
    assert not_worse("x", named, allowed=1.0, level=0.95).passed


def test_with_few_scenarios_nothing_may_get_worse_at_all():
    assert not_worse("x", [("a", 0.5, 0.5), ("b", 0.5, 0.5)], allowed=0.1, level=0.95).passed
    row = not_worse("x", [("a", 0.5, 0.5), ("b", 0.49, 0.5)], allowed=0.1, level=0.95)
    assert not row.passed and "too few to allow anything worse" in row.words
    assert not not_worse("x", [], allowed=1.0, level=0.95).passed
    assert not not_worse("x", [("a", math.nan, 0.5)] * 9, allowed=1.0, level=0.95).passed
