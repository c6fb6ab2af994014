"""What a call of a replayable function notes, and that the app's call is as it was without it."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from art_patch.context import current_trajectory, replayable, replaying, span, trajectory
from art_patch.context.integration import Run
from art_patch.errors import ConfigError
from art_patch.types import TrajectoryInfo
from tests.support.recordings import Recording


@replayable
def answer(question: Any, *, seen: Recording | None = None, times: int = 1, **more: Any) -> Any:
    """Says what it was asked."""
    for _ in range(times):
        if SEEN:
            SEEN[-1].call()
    return question, current_trajectory(), more


@replayable
async def answer_later(question: str) -> str:
    await asyncio.sleep(0)
    SEEN[-1].call()
    return question


SEEN: list[Recording] = []


@pytest.fixture(autouse=True)
def calls(request: pytest.FixtureRequest):
    if "seen" in request.fixturenames:
        SEEN.append(request.getfixturevalue("seen"))
    yield
    SEEN.clear()


def noted(seen: Recording) -> list[Any]:
    return [info.metadata.get("replay") for info in seen.of(TrajectoryInfo) if info.ended_at is not None]


def test_a_call_is_a_run_that_says_how_to_repeat_it(seen):
    given = {"a": [1, None, 2.5], "b": "ü"}
    said, run, more = answer(given, times=2, deep=True)
    assert (said, more) == (given, {"deep": True})
    assert said is given  # not the copy
    (info,) = [info for info in seen.of(TrajectoryInfo) if info.ended_at is not None]
    target = f"{__name__}:answer"
    expected = {"target": target, "args": [given], "kwargs": {"times": 2, "deep": True}}
    assert (info.id, info.name, info.metadata) == (run.id, "answer", {"replay": expected})
    given["a"].clear()
    assert info.metadata["replay"]["args"] == [{"a": [1, None, 2.5], "b": "ü"}]
    assert replaying.offered(__name__, "answer") is answer


def test_an_async_function_is_one_still(seen):
    assert inspect.iscoroutinefunction(answer_later)
    assert asyncio.run(answer_later("x")) == "x"
    assert noted(seen) == [{"target": f"{__name__}:answer_later", "args": ["x"], "kwargs": {}}]


def test_the_wrapper_looks_like_the_function():
    assert (answer.__name__, answer.__doc__) == ("answer", "Says what it was asked.")
    assert list(inspect.signature(answer).parameters) == ["question", "seen", "times", "more"]


@pytest.mark.parametrize(
    "given",
    [(1, 2), {1: "a"}, {"x"}, object(), float("nan"), b"x", "x" * (64 << 10), [0] * 100_000, [[(1,)]]],
    ids=lambda given: type(given).__name__,
)
def test_arguments_that_do_not_come_back_equal_are_not_noted(seen, given: Any):
    assert answer(given)[0] is given
    assert noted(seen) == [None]


def test_what_cannot_be_looked_at_is_passed_on(seen):
    class Odd(dict):
        def items(self) -> Any:
            raise RuntimeError("no")

    ring: list[Any] = []
    ring.append(ring)
    for given in (ring, Odd(a=1)):
        assert answer(given)[0] is given
    assert noted(seen) == [None, None]


def test_a_run_around_it_is_the_run_and_its_scores_stay_there(seen):
    with trajectory("support", user_id="u", metadata={"lang": "de"}) as run:
        assert answer("q")[1].id == run.id
    (info,) = [info for info in seen.of(TrajectoryInfo) if info.ended_at is None]
    assert (info.id, info.name, info.user_id, info.metadata["lang"]) == (run.id, "support", "u", "de")
    assert info.metadata["replay"]["args"] == ["q"]
    with span("outermost"):
        answer("q")
    assert noted(seen)[-1]["args"] == ["q"]


def test_a_run_that_has_begun_cannot_be_repeated_from_the_middle(seen):
    with trajectory():
        seen.call()
        answer("q")
    assert next(info.metadata for info in seen.of(TrajectoryInfo)) == {}


def test_of_nested_calls_the_outer_one_is_the_run(seen):
    @trajectory("outer")
    def outer() -> None:
        answer("first")
        answer("second")

    outer()
    (first, *_) = seen.of(TrajectoryInfo)
    assert first.metadata["replay"]["args"] == ["first"]


def test_nothing_is_offered_while_a_run_is_repeated(seen, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replaying, "_noting", [True])
    replaying.note_no_more()
    with trajectory(metadata={"replay_of": "x"}):
        answer("q")
    answer("q")
    assert next(info.metadata for info in seen.of(TrajectoryInfo)) == {"replay_of": "x"}
    assert noted(seen)[-1] is None


def test_without_the_patch_it_is_the_function():
    assert answer("q")[0] == "q"
    with pytest.raises(ZeroDivisionError):
        replayable(_divide)(0)
    assert replayable(_divide)(1) == 1


def _divide(by: int) -> float:
    return 1 / by


def _yields(n: int):
    yield n


async def _yields_later(n: int):
    yield n


class Agent:
    def answer(self) -> None: ...


def _inside() -> Any:
    def nested() -> None: ...

    return nested


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_inside(), "nested is defined inside a function, which another process cannot import; offer a function at"),
        (lambda: None, "a lambda"),
        (Agent.answer, "Agent.answer is a method"),
        (Agent, "takes a function"),
        ("answer", "put @replayable above a `def`"),
        (_yields, "_yields yields, .* offer a function that returns the answer"),
        (_yields_later, "yields"),
    ],
)
def test_mistakes_are_told_where_they_are_made(function: Any, says: str):
    if isinstance(function, type(lambda: None)) and function.__name__ == "<lambda>":
        function.__qualname__ = "<lambda>"
    with pytest.raises(ConfigError, match=says):
        replayable(function)


SCRIPT = """
import art_patch.context.replaying as replaying
def answer(): pass
print(replaying._target(answer))
"""


def test_a_script_is_named_by_its_file_and_a_module_by_its_name(tmp_path: Path):
    (tmp_path / "agent.py").write_text(SCRIPT)
    here = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
    here["env"] = {**os.environ, "PYTHONPATH": os.getcwd()}
    ways = {f"{tmp_path}/agent.py:answer": ["agent.py"], "agent:answer": ["-m", "agent"]}
    for target, arguments in ways.items():
        assert subprocess.run([sys.executable, *arguments], **here).stdout.strip() == target


def test_what_was_typed_has_no_file(monkeypatch: pytest.MonkeyPatch):
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.setattr(_divide, "__module__", "__main__")
    with pytest.raises(ConfigError, match="move it into a file and import it from there"):
        replayable(_divide)


def test_metadata_from_elsewhere_names_no_function(seen):
    offer = {"target": "os:system", "args": ["true"], "kwargs": {}}
    with trajectory(metadata={"replay": offer, "ticket": 7}):
        seen.call()
    run = Run("graph", metadata={"replay": offer, "ticket": 8})
    with run.inside():
        seen.call()
    run.end()
    metadata = [info.metadata for info in seen.of(TrajectoryInfo)]
    assert {7, 8} == {each["ticket"] for each in metadata}
    assert all(each.keys() == {"ticket"} for each in metadata)
