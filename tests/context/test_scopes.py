"""Identity: who a call belongs to, in every kind of function, and never one moment too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from opentelemetry import context as otel
from opentelemetry import trace

from art_patch.context import bind, group, identify, reward, score, span, trajectory
from art_patch.errors import ConfigError
from art_patch.types import Call, Score, SpanInfo, TrajectoryInfo
from tests.support.recordings import here


def test_trajectory_is_written_whole(seen):
    with trajectory("shop", scenario="s", session_id="x", user_id="u", tags=["a"], metadata={"b": 1}) as run:
        assert here() == run.id
        assert seen.call() == run.id
    first, last = seen.of(TrajectoryInfo)
    assert first == run
    assert (run.origin, run.name, run.scenario_key, run.tags, run.metadata) == (
        "explicit",
        "shop",
        "s",
        ("a",),
        {"b": 1},
    )
    assert last.ended_at >= run.started_at
    assert seen.of(Call)[0].trajectory_id == run.id


def test_a_block_without_a_call_leaves_nothing(seen):
    with trajectory("idle"), span("part"):
        pass
    assert seen.of(object) == []


def test_own_id_and_error(seen):
    with pytest.raises(ValueError, match="no"), trajectory(id="mine"):
        seen.call()
        raise ValueError("no, api_key=abc")
    assert [(info.id, info.error) for info in seen.of(TrajectoryInfo)] == [
        ("mine", None),
        ("mine", "ValueError: no, api_key=***"),
    ]


def test_spans_nest(seen):
    with trajectory() as run, span("outer") as outer:
        seen.call()
        with span("inner") as inner:
            seen.call()
    assert [call.span_id for call in seen.of(Call)] == [outer, inner]
    spans = {info.name: info for info in seen.of(SpanInfo)}
    assert spans["inner"].parent_id == outer
    assert spans["outer"].parent_id is None
    assert {info.trajectory_id for info in spans.values()} == {run.id}


def test_an_outermost_span_is_a_trajectory(seen):
    with span("job"):
        with span("step"):
            first = seen.call()
        assert seen.call() == first
    assert {(info.id, info.name, info.origin) for info in seen.of(TrajectoryInfo)} == {(first, "job", "explicit")}


def test_group_marks_what_starts_inside(seen):
    with group("g"):
        with trajectory() as run:
            seen.call()
        assert run.group_key == "g"
        seen.call()
    assert [info.group_key for info in seen.of(TrajectoryInfo)] == ["g", "g", "g"]


def remote(trace_id: int) -> Any:
    context = trace.SpanContext(trace_id, 0xABC, is_remote=False)
    return otel.attach(trace.set_span_in_context(trace.NonRecordingSpan(context)))


def test_an_otel_trace_is_a_trajectory_and_an_explicit_one_wins(seen):
    token = remote(0x123)
    try:
        assert seen.call() == here() == f"{0x123:032x}"
        with span("part") as part:
            assert seen.call() == f"{0x123:032x}"
        with trajectory() as run:
            assert seen.call() == run.id
    finally:
        otel.detach(token)
    calls = seen.of(Call)
    assert [call.span_id for call in calls] == [f"{0xABC:016x}", part, None]
    assert seen.of(TrajectoryInfo)[0].origin == "otel"


def test_decorators_open_one_for_each_call():
    @trajectory("f")
    def plain(x: int) -> tuple[int, str | None]:
        return x, here()

    @trajectory("f")
    async def coroutine(x: int) -> tuple[int, str | None]:
        await asyncio.sleep(0)
        return x, here()

    async def run() -> list[tuple[int, str | None]]:
        return list(await asyncio.gather(coroutine(1), coroutine(2)))

    found = [plain(1), plain(2), *asyncio.run(run())]
    assert [x for x, _ in found] == [1, 2, 1, 2]
    assert None not in {key for _, key in found}
    assert len({key for _, key in found}) == 4
    assert plain.__name__ == "plain"
    assert asyncio.iscoroutinefunction(coroutine)


def test_generator_keeps_its_context_to_itself():
    @trajectory("g")
    def numbers() -> Generator[Any, Any, str]:
        got = yield here()
        with span("part"):
            try:
                got = yield here(), got, identify().span_id
            except KeyError:
                yield here(), identify().span_id
        yield here(), identify().span_id
        return "end"

    def consume() -> Iterator[Any]:
        return (yield from numbers())

    stream = consume()
    own = next(stream)
    assert own is not None
    assert here() is None
    inside = stream.send("sent")
    assert inside[:2] == (own, "sent")
    assert inside[2] is not None
    assert identify().span_id is None
    assert stream.throw(KeyError("x")) == (own, inside[2])
    with trajectory() as around:
        assert next(stream) == (own, None)
        assert here() == around.id
        with pytest.raises(StopIteration) as stop:
            next(stream)
    assert stop.value.value == "end"


def test_generator_that_is_closed_early(seen):
    closed: list[str | None] = []

    @trajectory("g")
    def numbers() -> Iterator[int]:
        try:
            seen.call()
            yield 1
            yield 2
        finally:
            closed.append(here())

    stream = numbers()
    next(stream)
    del stream
    assert closed == [seen.of(Call)[0].trajectory_id]
    assert seen.of(TrajectoryInfo)[-1].error is None
    assert seen.of(TrajectoryInfo)[-1].ended_at is not None


def test_async_generator_keeps_its_context_to_itself():
    @trajectory("g")
    async def numbers() -> AsyncGenerator[Any, Any]:
        await asyncio.sleep(0)
        got = yield here()
        with span("part"):
            try:
                yield here(), got
            except KeyError:
                yield here(), "caught"

    async def run() -> None:
        stream = numbers()
        own = await anext(stream)
        assert own is not None
        assert here() is None
        assert await stream.asend("sent") == (own, "sent")
        assert here() is None
        assert await stream.athrow(KeyError("x")) == (own, "caught")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        early = numbers()
        assert await anext(early) != own
        await asyncio.create_task(anext_and_close(early))
        assert here() is None

    async def anext_and_close(stream: Any) -> None:
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())


def test_tasks_inherit_and_stay_apart():
    async def one() -> tuple[str, str | None]:
        with trajectory() as run:
            await asyncio.sleep(0)
            return run.id, await asyncio.create_task(asyncio.to_thread(here))

    async def run() -> list[tuple[str, str | None]]:
        return list(await asyncio.gather(*(one() for _ in range(20))))

    pairs = asyncio.run(run())
    assert all(a == b for a, b in pairs)
    assert len({a for a, _ in pairs}) == 20


def test_threads_need_bind():
    with ThreadPoolExecutor(4) as pool, trajectory() as run:
        assert pool.submit(here).result() is None
        bound = bind(here)
        assert {pool.submit(bound).result() for _ in range(20)} == {run.id}
        assert pool.submit(here).result() is None
    assert bound() == run.id

    async def coroutine() -> str | None:
        await asyncio.sleep(0)
        return here()

    with trajectory() as run:
        later = bind(coroutine)
    assert asyncio.run(later()) == run.id


def test_leaving_in_another_context_harms_nobody(caplog):
    """A block that is left by another task, as when a generator is finalised, neither fails nor leaks."""

    async def run() -> None:
        stack = ExitStack()

        async def enter() -> None:
            stack.enter_context(trajectory())

        await asyncio.create_task(enter())
        stack.close()

    asyncio.run(run())
    assert caplog.records == []


def test_a_context_that_someone_forgot_on_top_does_not_keep_ours():
    before = otel.get_current()
    with trajectory():
        otel.attach(otel.set_value("theirs", 1))
    assert otel.get_value("theirs") == 1
    assert here() is None
    otel.attach(before)


def test_scores(seen):
    with trajectory() as run:
        reward(1, comment="good")
        score("thumbs", -0.5, score_id="mine")
    score("late", 2.0, trajectory_id=run.id)
    scores = seen.of(Score)
    assert [(s.name, s.value, s.source, s.comment, s.trajectory_id) for s in scores] == [
        ("reward", 1.0, "user", "good", run.id),
        ("thumbs", -0.5, "user", None, run.id),
        ("late", 2.0, "user", None, run.id),
    ]
    assert scores[1].id == "mine"
    assert seen.of(TrajectoryInfo)[0] == run


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None])
def test_a_score_is_a_finite_number(value):
    with pytest.raises(ConfigError, match="finite"):
        score("x", value, trajectory_id="t")


MISTAKES: list[Callable[[], Any]] = [
    lambda: reward(1),
    lambda: score("", 1.0, trajectory_id="t"),
    lambda: trajectory(id=""),
    lambda: group(""),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_at_once(mistake):
    with pytest.raises(ConfigError):
        mistake()


def test_without_a_patch_nothing_is_recorded():
    with trajectory() as run, span("x"):
        reward(1.0)
        assert here() == run.id
