"""f4, f5, f17 to f23, s01 to s04, s12: the engine fails in every way, calls are cut short, hooks raise, clocks jump.

f24 (other patchers beside us) is in `tests/patching/test_peers.py`, every call shape (s01) in
`tests/patching/test_transparency.py`; here s01 is one short comparison of its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import pkgutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import art_patch as art
from art_patch.patching import control
from art_patch.settings import Settings
from art_patch.types import Route
from tests.support.apps import App, Programs, Store
from tests.support.servers import Answer, StubServer, chunks, completion, error

CHAMPION = "shop@3"
BODY = {"model": CHAMPION, "messages": [], "logprobs": True, "return_token_ids": True}
TEXT = "Hello there!"


@pytest.fixture
def routed(app: App, store: Store, local: StubServer) -> Iterator[App]:
    """The app with an engine; the poll is slow, so that nothing here depends on it."""
    set_route(store, local.url)
    yield app


def set_route(store: Store, address: str, **changes: Any) -> Any:
    route = Route(champion=CHAMPION, base_url=address)
    settings = {"store": store.url, "flush_interval_s": 0.01, "timeout_s": 0.5, "first_token_timeout_s": 0.5} | changes
    return control.start(Settings(**settings), read_route=lambda *_: route)


def read(result: Any, stream: bool) -> str:
    if not stream:
        return result.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in result if chunk.choices)


def rows(store: Store) -> list[Any]:
    gc.collect()
    assert art.flush(30)
    with store.opened() as opened:
        calls = [call for one in opened.read.recent(limit=100_000) for call in one.calls]
    return sorted(calls, key=lambda call: call.started_at)


def whole(**changes: Any) -> Answer:
    return Answer(body=json.dumps(completion(BODY, **changes)).encode())


FOURTEEN = {
    "refused": None,
    "hang": Answer(hang=True),
    "slow first token": Answer(hang=True),
    "500": error(500),
    "503 retry-after 60": Answer(503, b'{"error": {"message": "later"}}', headers={"retry-after": "60"}),
    "404": error(404),
    "401": error(401),
    "429": error(429),
    "garbage": Answer(body=b"\x00\xff garbage {"),
    "html": Answer(body=b"<html></html>", headers={"content-type": "text/html"}),
    "{}": Answer(body=b"{}"),
    "no choices": whole(choices=[]),
    "wrong model": whole(model="shop@2"),
    "cut": Answer(body=b'{"choices": [' * 50, cut=True),
}
FOURTEEN_STREAMED = FOURTEEN | {
    "garbage": Answer(events=[b"data: \x00\xff {\n\n"]),
    "{}": Answer(events=[b"data: {}\n\n"]),
    "no choices": Answer(events=[b'data: {"model": "shop@3", "choices": []}\n\n']),
    "wrong model": Answer(events=chunks(BODY | {"model": "shop@2"})),
    "cut": Answer(events=[], cut=True),
}
SLOW = ("hang", "slow first token")
"""Faults that take as long as the time-out of the settings, 500 ms."""


@pytest.mark.parametrize("fault", FOURTEEN)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_f19_s03_engine_faults(
    routed: App, store: Store, local: StubServer, upstream: StubServer, figure, fault, stream
):
    answer = (FOURTEEN_STREAMED if stream else FOURTEEN)[fault]
    if answer is None:
        set_route(store, "http://127.0.0.1:9/v1")
    else:
        local.always = answer
    read(routed.client.embeddings.create(model="e", input="x", encoding_format="float") and
         routed.call(stream=stream), stream)  # fmt: skip
    begun = time.perf_counter()
    assert read(routed.call(stream=stream), stream) == TEXT
    took_ms = (time.perf_counter() - begun) * 1000
    first, second = rows(store)
    for call in (first, second):
        assert (call.status, call.policy, call.untrainable) == ("ok", None, "answered by upstream")
        assert call.fallback
    assert len([seen for seen in upstream.seen if "chat" in seen.path]) == 2
    figure(f"s03 {fault}, {'stream' if stream else 'whole'}: whole call, ms", f"{took_ms:.0f}",
           "<= 600" if fault in SLOW else "<= 300")  # fmt: skip


BROKEN = {
    "cut": Answer(events=chunks(BODY)[:3], cut=True),
    "clean end without a finish reason": Answer(events=chunks(BODY, finish=None, done=False)),
    "done without a finish reason": Answer(events=chunks(BODY, finish=None)),
    "garbage": Answer(events=[*chunks(BODY)[:2], b"data: {oops\n\n"]),
    "an error event": Answer(events=[*chunks(BODY)[:2], b'data: {"error": {"message": "out of memory"}}\n\n']),
}


@pytest.mark.parametrize("how", BROKEN)
def test_f20_s04_a_stream_that_dies_is_an_error_and_never_spliced(
    routed: App, store: Store, local: StubServer, upstream: StubServer, figure, how
):
    gate = threading.Event()
    answer = BROKEN[how]
    local.will(Answer(events=answer.events, cut=answer.cut, gate=gate, gate_after=2))
    got: list[str] = []
    with pytest.raises(openai.APIError):
        for chunk in routed.call(stream=True):
            got.append(chunk.choices[0].delta.content or "")
            gate.set()
    assert TEXT.startswith("".join(got))
    (call,) = rows(store)
    spliced, trainable = len(upstream.seen), int(call.untrainable is None)
    assert (spliced, trainable) == (0, 0)
    assert (call.status, call.policy) == ("error", CHAMPION)
    figure(f"s04 stream dies: {how}: spliced, trainable", f"{spliced}, {trainable}", "0, 0")


def test_f04_cancelled_and_cancelled_again(app: App, store: Store, upstream: StubServer, figure):
    """`CancelledError` comes through, the row says so, and the pool has its connection back, as without us."""

    async def run() -> int:
        pool = openai.DefaultAsyncHttpxClient(limits=__import__("httpx").Limits(max_connections=2))
        async with openai.AsyncOpenAI(api_key="k", base_url=upstream.url, max_retries=0, http_client=pool) as client:

            async def one(number: int) -> None:
                ask: Any = {"model": "m", "messages": [{"role": "user", "content": str(number)}], "stream": True}
                async with await client.chat.completions.create(**ask) as stream:
                    async for _ in stream:
                        begun.set()
                        await asyncio.sleep(60)

            for number in range(10):
                begun = asyncio.Event()
                task = asyncio.create_task(one(number))
                await begun.wait()
                task.cancel()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            last = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "last"}])
            assert last.choices[0].message.content == TEXT
            return len(upstream.seen)

    app.patch()
    assert asyncio.run(run()) == 11
    statuses = [call.status for call in rows(store)]
    assert statuses == ["cancelled"] * 10 + ["ok"]
    found = f"{statuses.count('cancelled')}, {statuses.count('ok')}"
    figure("f04 cancelled twice, 10 of 11: rows cancelled, ok", found, "10, 1")


def test_f05_streams_that_nobody_reads(app: App, store: Store, upstream: StubServer, figure):
    app.patch()
    for _ in range(5):
        app.call("never read", stream=True)
    for _ in range(5):
        for _ in app.call("left early", stream=True):
            break
    # What the stub had sent before anybody looked may be whole already; it is never more than that.
    calls, deadline = rows(store), time.monotonic() + 30
    while len(calls) < 10 and time.monotonic() < deadline:  # another thread may be busy collecting them: ours skips
        calls = rows(store)
    assert len(calls) == 10
    assert {call.status for call in calls} <= {"abandoned", "ok"}
    trainable = sum(not call.untrainable for call in calls)
    assert trainable == 0
    figure("f05 streams not read: rows of 10, trainable", f"{len(calls)}, {trainable}", "10, 0")


JUMPS = {"-5 days": -5 * 86400, "+10 days": 10 * 86400}


@pytest.mark.slow
@pytest.mark.parametrize("jump", JUMPS)
def test_f17_clock_jumps(programs: Programs, store: Store, figure, jump):
    """The clock is set in the middle of calls and of the program.

    A stand-in for the system's clock: `time.time` is replaced in the program. (Under libfaketime, which replaces the
    real one, Python 3.11's own waits with a timeout hang.)
    """
    code = """
real = time.time
with art.trajectory() as run:
    for number in range(10):
        stream = call(str(number), stream=True)
        next(stream)
        if number == 5:
            time.time = lambda: real() + float(sys.argv[1])
        list(stream)
        art.flush(0.05)
assert art.flush(60)
print(time.time())
"""
    ran = programs.run(code, str(JUMPS[jump]), timeout=100)
    assert ran.code == 0, ran.err
    assert abs(float(ran.out) - time.time() - JUMPS[jump]) < 600, "the clock did not jump"
    with store.opened() as opened:
        (run,) = opened.read.recent()
    durations = [call.duration_ms for call in run.calls]
    ttfts = [call.ttft_ms for call in run.calls]
    assert len(durations) == 10
    absurd = sum(not 0 < first <= whole < 100_000 for first, whole in zip(ttfts, durations, strict=True))
    assert absurd == 0
    assert len({call.id for call in run.calls}) == 10
    assert store.problems() == []
    figure(f"f17 clock {jump}: durations negative or absurd", absurd, "0")


HOOKS = [
    "recording.recorder.Recorder.put",
    "recording.recorder.Recorder.ensure_running",
    "recording.recorder.Recorder._sort",
    "recording.recorder.Recorder._deliver",
    "recording.recorder.Recorder._release",
    "recording.recorder.Recorder._open_store",
    "recording.recorder.NativeThread.start",
    "recording.converting.Converter.convert",
    "recording.converting.read_call",
    "recording.converting.Stitcher.place",
    "recording.converting.without_media",
    "recording.delivery.Delivery.add",
    "recording.delivery.Delivery.attempt",
    "recording.exchange.Exchange.finish",
    "recording.exchange.Exchange.saw",
    "recording.exchange.Exchange.__init__",
    "store.write.Writer._write",
    "store.rows.Batch._add_call",
    "store.rows.Batch.insert",
    "store.backends.sqlite.SqliteDatabase.renew",
    "store.backends.sqlite.SqliteDatabase._open",
    "store.backends.files.StoreFiles._take",
    "context.ambient.surroundings",
    "patching.routing.routed_call.identify",
    "patching.runtime.Runtime.poll",
    "patching.runtime.resolve",
    "patching.runtime.Runtime.allows",
    "patching.routing.target.Breaker.allow",
]


class Bug(Exception):
    pass


def boom(*_: Any, **__: Any) -> Any:
    raise Bug("boom")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_f18_s02_an_exception_at_any_hook(
    routed: App, store: Store, local: StubServer, monkeypatch, caplog, figure, hook
):
    """With the engine up and down, whole and streamed: the same answer, one warning at most, works again after."""
    place, _, name = f"art_patch.{hook}".rpartition(".")
    answers: list[str] = []
    with monkeypatch.context() as patched:
        patched.delenv("PYTEST_CURRENT_TEST")
        patched.setattr(pkgutil.resolve_name(place), name, boom)
        for answer in (None, error(500)):
            local.always = answer
            for stream in (False, True):
                answers.append(read(routed.call(stream=stream), stream))
        art.flush(0.05)
    assert answers == [TEXT] * 4
    local.always = None
    warnings = [record for record in caplog.records if record.levelname == "WARNING" and record.name == "art_patch"]
    assert len(warnings) <= 1
    assert read(routed.call("after"), False) == TEXT
    gc.collect()
    assert art.flush(30)
    assert "after" in store.texts()
    figure(f"s02 {hook} raises: valid answers (engine up, down x whole, stream)", answers.count(TEXT), "4")


def test_f21_what_may_not_happen_twice_is_not_routed(routed: App, local: StubServer, upstream: StubServer, figure):
    """Provider-side state goes upstream once; a plain completion is tried at the engine once, and upstream once."""
    local.always = error(500)
    routed.call(store=True)
    stored = f"{len(local.seen)} + {len(upstream.seen)}"
    with_retries = routed.client.with_options(max_retries=2)
    with_retries.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "hi"}])
    assert (stored, len(local.seen), len(upstream.seen)) == ("0 + 1", 1, 2)
    found = f"{stored}; {len(local.seen)} + {len(upstream.seen) - 1}"
    figure("f21 requests to engine and upstream: stored completion; plain one", found, "0 + 1; 1 + 1")


def test_f22_s12_half_open_admits_exactly_one(routed: App, store: Store, local: StubServer, upstream: StubServer,
                                              monkeypatch, figure):  # fmt: skip
    """The breaker's own clock is moved; everything else is real: 30 threads, one engine that hangs."""
    now = [1000.0]
    runtime = set_route(store, local.url, timeout_s=5)
    monkeypatch.setattr(
        "art_patch.patching.runtime.time", type("Clock", (), {"monotonic": lambda: now[0], "time": lambda: 0.0})
    )
    local.always = error(500)
    for _ in range(8):
        routed.call()
    assert len(local.seen) == 5
    assert not runtime.breaker.closed
    now[0] += 29.0
    routed.call()
    assert len(local.seen) == 5
    now[0] += 2.0
    local.always = Answer(hang=True)
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(read(routed.call(), False))) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads[:]:
        thread.join()
    assert answers == [TEXT] * 30
    tried = len(local.seen) - 5
    assert tried == 1
    local.always = None
    now[0] += 31.0
    for _ in range(3):
        routed.call()
    assert len(local.seen) == 9
    assert runtime.breaker.closed
    figure("f22 calls at a half-open breaker; sent to the engine", f"{len(answers)}; {tried}", "exactly 1")


@pytest.mark.slow
def test_f23_s12_a_thousand_calls_on_a_dead_engine(routed: App, local: StubServer, upstream: StubServer, figure):
    local.always = error(500)
    took: list[float] = []

    def work() -> None:
        for _ in range(125):
            begun = time.perf_counter()
            assert read(routed.call(), False) == TEXT
            took.append(time.perf_counter() - begun)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took) == 1000
    assert len(upstream.seen) == 1000
    # Five fail before it opens; those that were on their way by then arrive too.
    assert 5 <= len(local.seen) <= 5 + 8 + 2
    assert art.flush(60)
    figure(
        "f23 1,000 calls on a dead engine: requests upstream, to the engine",
        f"{len(upstream.seen)}, {len(local.seen)}",
        "1000, <= 15",
    )
    figure("s12 call while the breaker is open: p50, ms (8 threads)", round(sorted(took)[500] * 1000, 2))


def test_s01_the_same_bytes_and_types(app: App, upstream: StubServer, figure):
    def shapes() -> list[Any]:
        ask: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        create = app.client.chat.completions.create
        raw = app.client.chat.completions.with_raw_response.create(**ask)
        with app.client.chat.completions.with_streaming_response.create(**ask) as streaming:
            streamed = (type(streaming), streaming.read())
        return [
            (type(create(**ask)), create(**ask).to_json()),
            (type(create(**ask, stream=True)), [chunk.to_json() for chunk in create(**ask, stream=True)]),
            (type(raw), raw.http_response.content, raw.parse().to_json()),
            streamed,
            app.client.post("/chat/completions", cast_to=object, body=ask),
            app.client.embeddings.create(model="e", input="x", encoding_format="float").to_json(),
        ]

    bare = shapes()
    app.patch()
    differ = sum(one != other for one, other in zip(shapes(), bare, strict=True))
    assert differ == 0
    figure("s01 call shapes that differ (all of them: tests/patching)", differ, "0")


def test_s09_overhead(app: App, figure):
    """A first look; `tests/benchmarks/patch_overhead.py` measures it properly."""

    def p50() -> float:
        took = []
        for _ in range(150):
            begun = time.perf_counter()
            app.call()
            took.append(time.perf_counter() - begun)
        return sorted(took)[75] * 1e6

    p50()
    bare = p50()
    app.patch()
    app.call()
    assert art.flush(30)
    patched = p50()
    figure("s09 call p50 bare / added, us (stub and writer in this process)", f"{bare:.0f} / {patched - bare:.0f}",
           "see the benchmark")  # fmt: skip
