"""Threads and pools take the surroundings along, for as long as the block is open, and nothing else changes."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.pool import ThreadPool
from queue import SimpleQueue
from typing import Any

import pytest
from opentelemetry import context as otel
from opentelemetry import trace

from art_patch._lib.faults import faults
from art_patch.context import (
    ambient,
    bind,
    carry_threads_off,
    carry_threads_on,
    group,
    identify,
    span,
    suppress,
    threads,
    trajectory,
)
from art_patch.types import Call, SpanInfo
from tests.support.recordings import here

START = threading.Thread.__dict__["start"]
SUBMIT = ThreadPoolExecutor.__dict__["submit"]


@pytest.fixture(autouse=True)
def carried() -> Iterator[None]:
    carry_threads_on()
    yield
    carry_threads_off()
    assert threading.Thread.__dict__["start"] is START
    assert ThreadPoolExecutor.__dict__["submit"] is SUBMIT


def in_thread(make: Callable[..., threading.Thread], job: Callable[[], Any]) -> Any:
    found: SimpleQueue[Any] = SimpleQueue()
    thread = make(lambda: found.put(job()))
    thread.start()
    thread.join()
    assert "run" not in thread.__dict__
    return found.get_nowait()


class OwnRun(threading.Thread):
    """As people write them: `run` without `super().run()`."""

    def __init__(self, job: Callable[[], Any]) -> None:
        super().__init__()
        self.job = job

    def run(self) -> None:
        self.job()


class OwnStart(OwnRun):
    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        assert name != "run"
        super().__setattr__(name, value)

    def start(self) -> None:
        super().start()


def own_attribute(job: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread()
    thread.run = lambda: [thread.__dict__.pop("run"), job()]
    return thread


def in_pool(job: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(job).result()


def in_nested_pools(job: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as outer, ThreadPoolExecutor(1) as inner:
        return outer.submit(lambda: inner.submit(job).result()).result()


def in_map(job: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: job(), range(8)))
    assert all(one == found[0] for one in found)
    return found[0]


def in_own_executor(job: Callable[[], Any]) -> Any:
    async def run() -> Any:
        with ThreadPoolExecutor(1) as pool:
            return await asyncio.get_running_loop().run_in_executor(pool, job)

    return asyncio.run(run())


def in_executor(job: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, job)

    return asyncio.run(run())


def in_to_thread(job: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.to_thread(job))


def in_thread_pool(job: Callable[[], Any]) -> Any:
    with ThreadPool(1) as pool:
        return pool.apply(job)


WAYS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "thread": partial(in_thread, lambda job: threading.Thread(target=job)),
    "daemon": partial(in_thread, lambda job: threading.Thread(target=job, daemon=True)),
    "timer": partial(in_thread, lambda job: threading.Timer(0.001, job)),
    "own run": partial(in_thread, OwnRun),
    "own start": partial(in_thread, OwnStart),
    "own attribute": partial(in_thread, own_attribute),
    "pool": in_pool,
    "nested pools": in_nested_pools,
    "map": in_map,
    "run_in_executor": in_executor,
    "run_in_executor with a pool": in_own_executor,
    "to_thread": in_to_thread,
    "multiprocessing.pool.ThreadPool": in_thread_pool,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_surrounds_goes_along(way):
    run_in = WAYS[way]
    with trajectory() as run, span("part") as part, group("g"):
        found = run_in(identify)
    assert (found.trajectory, found.span_id, found.group_key) == (run, part, "g")
    with suppress():
        assert run_in(lambda: identify(call=True).suppressed)
    assert run_in(here) is None
    with trajectory() as other:
        assert run_in(here) == other.id


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"to_thread"}))
def test_switched_off_nothing_goes_along(way):
    carry_threads_off()
    with trajectory():
        assert WAYS[way](here) is None


def test_only_ours_goes_along():
    key = otel.create_key("theirs")
    before = otel.attach(otel.set_value(key, 1))
    try:
        with trajectory() as run:
            for way in ("thread", "pool"):
                assert WAYS[way](lambda: (otel.get_value(key), here())) == (None, run.id)
    finally:
        otel.detach(before)


def test_a_pools_worker_serves_others_too():
    with ThreadPoolExecutor(1) as pool:
        with trajectory() as first:
            assert pool.submit(here).result() == first.id
            # Another request, in a thread that was started before any trajectory, uses the same worker meanwhile.
            assert in_thread(lambda job: threading.Thread(target=job), lambda: None) is None
            token = otel.attach(otel.Context())
            assert pool.submit(here).result() is None
            otel.detach(token)
        assert pool.submit(here).result() is None
        with trajectory() as second:
            assert pool.submit(here).result() == second.id
        assert pool.submit(otel.get_current).result() == {}


WORKERS: list[Worker] = []
"""To be ended whatever becomes of the test: the interpreter waits for the threads of a pool."""


class Worker:
    """Goes on when the block in which it was started is over. Asked for what it sees, it answers from inside."""

    def __init__(self, start: Callable[[Callable[[], None]], Any]) -> None:
        self._asked: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        WORKERS.append(self)
        start(self._run)

    def _run(self) -> None:
        while (question := self._asked.get()) is not None:
            self._answers.put(question())

    def ask(self, question: Callable[[], Any]) -> Any:
        self._asked.put(question)
        return self._answers.get(timeout=10)

    def end(self) -> None:
        self._asked.put(None)


@pytest.fixture(params=["thread", "pool", "to_thread"])
def start_worker(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], None]], Any]]:
    pool = ThreadPoolExecutor(4)

    def start(job: Callable[[], None]) -> None:
        if request.param == "thread":
            threading.Thread(target=job, daemon=True).start()
        elif request.param == "pool":
            pool.submit(job)
        else:  # what it does, without an event loop around
            pool.submit(bind_raw(job))

    yield start
    for worker in WORKERS:
        worker.end()
    WORKERS.clear()
    pool.shutdown(wait=False)


def bind_raw(job: Callable[[], None]) -> Callable[[], None]:
    import contextvars

    return partial(contextvars.copy_context().run, job)


def test_it_ends_with_the_block(start_worker):
    with group("outer"):
        with trajectory() as run:
            with span("part") as part, suppress():
                worker = Worker(start_worker)
                found = worker.ask(identify)
                assert (found.trajectory, found.span_id) == (run, part)
                assert worker.ask(lambda: identify(call=True).suppressed)
            assert not worker.ask(lambda: identify(call=True).suppressed)
            assert worker.ask(here) == run.id
        assert worker.ask(here) is None
        assert worker.ask(lambda: identify().group_key) == "outer"
    assert worker.ask(identify) == ambient.Identity()
    assert worker.ask(lambda: WAYS["thread"](here)) is None
    with trajectory() as later:
        assert worker.ask(here) is None
    worker.end()
    assert later != run


def test_a_block_of_the_threads_own_is_whole():
    with trajectory() as run:
        worker = Worker(lambda job: threading.Thread(target=job, daemon=True).start())
        inner = span("inner")
        worker.ask(inner.__enter__)
    assert worker.ask(here) == run.id  # it was opened inside, and has not ended
    worker.ask(lambda: inner.__exit__(None, None, None))
    assert worker.ask(here) is None
    with worker_trajectory(worker) as own:
        assert worker.ask(here) == own
    worker.end()


class worker_trajectory:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._scope = trajectory()

    def __enter__(self) -> str:
        return self._worker.ask(self._scope.__enter__).id

    def __exit__(self, *_: object) -> None:
        self._worker.ask(lambda: self._scope.__exit__(None, None, None))


def test_a_task_that_outlives_the_block_belongs_to_it():
    async def run() -> tuple[str, str | None]:
        over = asyncio.Event()

        async def late() -> str | None:
            await over.wait()
            return here()

        with trajectory() as run:
            task = asyncio.create_task(late())
        over.set()
        return run.id, await task

    own, found = asyncio.run(run())
    assert own == found


def test_what_is_bound_outlives_the_block():
    with trajectory() as run:
        bound = bind(here)
    assert WAYS["thread"](bound) == run.id
    assert WAYS["pool"](bound) == run.id


def test_tasks_that_start_each_other_keep_no_past():
    async def run() -> int:
        depth = 0
        for _ in range(50):
            with trajectory():
                here = ambient.surroundings()
                depth = 0
                while here.outer is not None:
                    here, depth = here.outer, depth + 1
                # The next round starts inside this one, as a task that starts its successor does.
                context = otel.get_current()
            otel.attach(context)
        otel.attach(otel.Context())
        return depth

    assert asyncio.run(run()) <= 1


def agents_in_tasks(agent: Callable[[str], None]) -> None:
    async def run() -> None:
        async def one(name: str) -> None:
            await asyncio.sleep(0)
            agent(name)

        await asyncio.gather(one("a"), one("b"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one("c"))
            tasks.create_task(one("d"))

    asyncio.run(run())


def agents_in_threads(agent: Callable[[str], None]) -> None:
    started = [threading.Thread(target=agent, args=(name,)) for name in "ab"]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(agent, "cd"))


@pytest.mark.parametrize("run_agents", [agents_in_tasks, agents_in_threads])
def test_parallel_agents_are_spans_of_one_trajectory(seen, run_agents):
    def agent(name: str) -> None:
        with span(name):
            seen.call()
            with span(f"{name}.tool"):
                seen.call()

    with trajectory() as run, span("team") as team:
        run_agents(agent)
    spans = {info.name: info for info in seen.of(SpanInfo)}
    assert {spans[name].parent_id for name in "abcd"} == {team}
    assert all(spans[f"{name}.tool"].parent_id == spans[name].id for name in "abcd")
    calls = seen.of(Call)
    assert {call.trajectory_id for call in calls} == {run.id}
    assert {call.span_id for call in calls} == {info.id for name, info in spans.items() if name != "team"}


def test_twice_on_is_once():
    carry_threads_on()
    wrapper = threading.Thread.__dict__["start"]
    carry_threads_on()
    assert threading.Thread.__dict__["start"] is wrapper
    carry_threads_off()
    carry_threads_off()
    assert threading.Thread.__dict__["start"] is START


def test_somebody_wrapped_over_us(monkeypatch):
    ours = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: ours(self))
    theirs = threading.Thread.__dict__["start"]
    carry_threads_off()
    assert threading.Thread.__dict__["start"] is theirs
    with trajectory() as run:
        assert WAYS["thread"](here) is None
        carry_threads_on()
        assert threading.Thread.__dict__["start"] is theirs
        assert WAYS["thread"](here) == run.id
    monkeypatch.undo()


def test_a_thread_that_does_not_start_is_as_before():
    thread = threading.Thread(target=here)
    with trajectory():
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="once"):
            thread.start()
        with pytest.raises(TypeError):
            ThreadPoolExecutor(1).submit()  # type: ignore[call-arg]
        with pytest.raises(RuntimeError, match="shutdown"):
            pool = ThreadPoolExecutor(1)
            pool.shutdown()
            pool.submit(here)
    assert "run" not in thread.__dict__


def test_errors_are_the_jobs_own():
    def fails() -> None:
        raise KeyError("own")

    with trajectory(), ThreadPoolExecutor(1) as pool, pytest.raises(KeyError, match="own"):
        pool.submit(fails).result()


@pytest.mark.parametrize("place", ["to_carry", "_hand_over"])
def test_our_bugs_do_not_keep_threads_from_starting(place, monkeypatch):
    def boom(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(threads, place, boom)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with trajectory():
        assert WAYS["thread"](lambda: "ran") == "ran"
        assert WAYS["pool"](lambda: "ran") == "ran"
    assert faults.counts["context.threads"] > 0
    faults.clear()


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_opentelemetrys_own(ours_first, start_worker, caplog):
    instrumentation = pytest.importorskip(
        "opentelemetry.instrumentation.threading", reason="opentelemetry-instrumentation-threading is not installed"
    )
    theirs = instrumentation.ThreadingInstrumentor()
    if not ours_first:
        carry_threads_off()
    theirs.instrument()
    carry_threads_on()
    active = trace.NonRecordingSpan(trace.SpanContext(0x123, 0xABC, is_remote=False))
    try:
        token = otel.attach(trace.set_span_in_context(active))
        with trajectory() as run:
            for run_in in WAYS.values():
                assert run_in(here) == run.id
            for way in ("thread", "own run", "pool"):
                found = WAYS[way](lambda: trace.get_current_span().get_span_context().trace_id)
                assert found == (0x123 if way != "own run" else 0), way  # theirs only reaches `Thread.run`
        otel.detach(token)
        with trajectory() as run:
            worker = Worker(start_worker)
            assert worker.ask(here) == run.id
        assert worker.ask(here) is None
        worker.end()
    finally:
        if ours_first:  # each takes off what it has put on last
            theirs.uninstrument()
            carry_threads_off()
        else:
            carry_threads_off()
            theirs.uninstrument()
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


ALONE = """
import sys
import art_patch
art_patch.patch(mode="record", home=sys.argv[1], otel="off")
assert "concurrent.futures.thread" not in sys.modules
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool, art_patch.trajectory() as run:
    assert pool.submit(art_patch.current_trajectory).result().id == run.id
wrapper = ThreadPoolExecutor.__dict__["submit"]
art_patch.unpatch()
assert ThreadPoolExecutor.__dict__["submit"] is wrapper.__wrapped__
art_patch.patch(carry_threads=False)
assert ThreadPoolExecutor.__dict__["submit"] is wrapper.__wrapped__
"""


def python(script: str, *args: str) -> None:
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_nothing_is_imported_for_it(tmp_path):
    python(ALONE, str(tmp_path))


GEVENT = """
import sys
if sys.argv[2] == "before":
    import gevent.monkey; gevent.monkey.patch_all()
import threading
import art_patch
art_patch.patch(mode="record", home=sys.argv[1], otel="off")
if sys.argv[2] == "after":
    import gevent.monkey; gevent.monkey.patch_all()
from concurrent.futures import ThreadPoolExecutor
seen = []
def look():
    found = art_patch.current_trajectory()
    seen.append(found and found.id)
over = threading.Event()
with ThreadPoolExecutor(2) as pool:
    with art_patch.trajectory() as run:
        thread = threading.Thread(target=look); thread.start(); thread.join()
        timer = threading.Timer(0.001, look); timer.start(); timer.join()
        pool.submit(look).result()
        assert seen == [run.id] * 3, seen
        outlives = threading.Thread(target=lambda: [over.wait(), look()]); outlives.start()
        late = pool.submit(lambda: [over.wait(), look()])
    over.set(); late.result(); outlives.join()
    pool.submit(look).result()
assert seen[3:] == [None] * 3, seen
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_gevent(tmp_path, when):
    pytest.importorskip("gevent", reason="gevent is not installed")
    python(GEVENT, str(tmp_path), when)
