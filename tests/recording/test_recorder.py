"""The queue and its thread: bounded, exact, patient with the store, at peace with fork and exit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from art_patch._lib.faults import faults
from art_patch._lib.ids import new_id
from art_patch._lib.os_threads import Flag
from art_patch.errors import StoreError
from art_patch.recording import Exchange, Recorder
from art_patch.recording.delivery import Delivery
from art_patch.recording.recorder import COLLECT_RECORDS, GIVE_WAY_S, PAUSE_S
from art_patch.settings import Settings
from art_patch.types import Call, Record, Score


class Sink:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.refuse: set[str] = set()
        self.down = False
        self.is_full = False
        self.gate: threading.Event | None = None
        self.entered = threading.Event()

    def write(self, records: Sequence[Record]) -> None:
        self.entered.set()
        if self.gate is not None:
            self.gate.wait(30)
        if self.down or self.refuse & {record.id for record in records}:
            error = StoreError("no")
            error.may_pass = self.is_full
            raise error
        self.records += records


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def recorder(sink: Sink) -> Iterator[Recorder]:
    faults.clear()
    recorder = Recorder(Settings(flush_interval_s=0.005, queue_mib=1), open_sink=lambda: sink)
    yield recorder
    sink.down, sink.refuse = False, set()
    if sink.gate is not None:
        sink.gate.set()
    assert recorder.stop(10)


def score(key: str) -> Score:
    return Score(key, "t", "s", 1.0, "user", 0.0)


def exchange(recorder: Recorder, size: int = 0) -> Exchange:
    made = Exchange(recorder, "m")
    made.request = b" " * size + b'{"messages": []}'
    return made


def test_who_waits_for_a_flush_waits_for_no_pause(tmp_path, monkeypatch):
    """The thread makes way for an app that computes without a pause; but not while the app waits for it."""
    monkeypatch.setattr("art_patch.recording.recorder.GIVE_WAY_S", 60.0)
    recorder, ended = Recorder(Settings(home=tmp_path, flush_interval_s=0.005)), threading.Event()

    def compute() -> None:
        while not ended.is_set():
            sum(range(20_000))

    threads = [threading.Thread(target=compute) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3 * COLLECT_RECORDS):  # several batches
            exchange(recorder).finish("complete")
        assert recorder.flush(40)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert recorder.counts.recorded == 3 * COLLECT_RECORDS
    assert recorder.stop(10)


def test_who_waits_for_a_flush_does_not_wait_until_a_late_retry(recorder, sink, monkeypatch):
    """The pause between two tries grows to half a minute; the store may be back long before."""
    monkeypatch.setattr("art_patch.recording.delivery.FIRST_RETRY_S", 60.0)
    sink.down = True
    exchange(recorder).finish("complete")
    assert sink.entered.wait(10)
    threading.Timer(1.5, setattr, (sink, "down", False)).start()
    assert recorder.flush(30)
    assert recorder.counts.recorded == 1


def test_a_flush_that_cannot_begin_leaves_nothing_behind(recorder, sink, monkeypatch):
    sink.down = True
    exchange(recorder).finish("complete")
    with monkeypatch.context() as patched:
        patched.setattr(recorder, "ensure_running", MagicMock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            recorder.flush(1)
    assert recorder._awaited == []


def test_tries_for_a_caller_who_waits_cut_no_batch_and_lengthen_no_pause():
    sink = Sink()
    sink.down = True
    delivery = Delivery(lambda: sink)
    delivery.add([(score(str(number)), None) for number in range(4)])
    delivery.attempt(100.0)
    due, batches = delivery.retry_at, [len(each) for each in delivery._batches]
    for _ in range(5):
        delivery.attempt(100.1)
    assert (due, batches) == (100.5, [2, 2])
    assert (delivery.retry_at, [len(each) for each in delivery._batches]) == (due, batches)
    sink.down = False
    written, _ = delivery.attempt(100.2)
    assert len(written) == 4
    assert not delivery.pending


@pytest.mark.parametrize("computes", [True, False])
def test_a_busy_machine_is_not_taken_for_a_busy_app(computes: bool, recorder, sink, monkeypatch):
    """The pause lasts long in both cases; only if the app computed meanwhile, the thread makes way for it."""
    pauses: list[float] = []

    class Slow(Flag):
        def wait(self, timeout_s: float) -> bool:
            pauses.append(timeout_s)
            if timeout_s == PAUSE_S:
                until = time.monotonic() + 0.02
                while computes and time.process_time() < began + 0.02:
                    sum(range(1_000))
                time.sleep(max(0.0, until - time.monotonic()))
            return False

    began = time.process_time()
    monkeypatch.setattr(recorder, "_nudge", Slow())
    monkeypatch.setattr(recorder, "_spooler", SimpleNamespace(is_nearly_full=False))
    recorder._breathe()
    assert pauses == ([PAUSE_S, GIVE_WAY_S] if computes else [PAUSE_S])
    monkeypatch.undo()


def test_finish_counts_once(recorder, sink):
    made = exchange(recorder)
    threads = [threading.Thread(target=made.finish, args=("complete",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.flush(5)
    assert [type(record).__name__ for record in sink.records] == ["TrajectoryInfo", "Call"]
    assert recorder.counts.recorded == 1


def test_overflow_is_counted_exactly(recorder, sink):
    sink.gate = threading.Event()
    exchange(recorder).finish("complete")
    sink.entered.wait(10)
    for _ in range(20):
        exchange(recorder, 100_000).finish("complete")
    sink.gate.set()
    assert recorder.flush(10)
    kept = recorder.counts.recorded
    assert kept == 1 + (1 << 20) // (100_000 + 1024 + 16)
    assert recorder.dropped == 21 - kept
    assert recorder.account.bytes == 0
    exchange(recorder, 900_000).finish("complete")
    assert recorder.flush(10)
    assert recorder.counts.recorded == kept + 1


def test_many_threads_lose_nothing(recorder, sink):
    def work() -> None:
        for _ in range(100):
            exchange(recorder).finish("complete")

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.flush(30)
    calls = [record for record in sink.records if isinstance(record, Call)]
    assert len(calls) + recorder.dropped == 1600
    assert len({call.id for call in calls}) == len(calls)


def test_the_store_comes_back(recorder, sink):
    sink.down = True
    recorder.put_record(score("a"))
    assert not recorder.flush(0.05)
    assert recorder.trouble == "StoreError"
    recorder.put_record(score("b"))
    sink.down = False
    assert recorder.flush(10)
    assert [record.id for record in sink.records] == ["a", "b"]
    assert recorder.trouble is None
    assert faults.counts["store.write"] >= 1


def test_poison_does_not_hold_up_the_others():
    sink = Sink()
    sink.refuse = {"bad"}
    delivery = Delivery(lambda: sink)
    delivery.add([(score(key), 1) for key in ("a", "b", "bad", "c", "d")])
    poison: list[Any] = []
    for round_ in range(6):
        poison += delivery.attempt(100.0 * round_)[1]
    assert sorted(record.id for record in sink.records) == ["a", "b", "c", "d"]
    assert [record.id for record, _ in poison] == ["bad"]
    assert not delivery.pending


def test_a_full_disk_that_takes_a_small_record_drops_no_large_one():
    sink = Sink()
    sink.refuse, sink.is_full = {"large"}, True
    delivery = Delivery(lambda: sink)
    delivery.add([(score(key), 1) for key in ("a", "large", "b")])
    dropped = [one for round_ in range(6) for one in delivery.attempt(100.0 * round_)[1]]
    assert (dropped, sorted(record.id for record in sink.records)) == ([], ["a", "b"])
    sink.refuse = set()
    delivery.attempt(900.0)
    assert sorted(record.id for record in sink.records) == ["a", "b", "large"]
    assert not delivery.pending


def test_what_a_full_queue_drops_while_the_store_is_down_is_no_fault_of_the_queue(sink):
    sink.down = True
    recorder = Recorder(Settings(flush_interval_s=0.005, queue_mib=1), open_sink=lambda: sink)
    exchange(recorder).finish("complete")
    assert not recorder.flush(0.2)
    while recorder.trouble is None:
        recorder.flush(0.1)
    exchange(recorder, 2 << 20).finish("complete")
    assert recorder.losses == (
        "1 call not recorded, because the store could not be written (StoreError) until the queue was full; "
        "`art-patch doctor` says why"
    )
    sink.down = False
    assert recorder.stop(10)


def test_back_off_grows_to_thirty_seconds():
    sink = Sink()
    sink.down = True
    delivery = Delivery(lambda: sink)
    delivery.add([(score("a"), 1)])
    waits, now = [], 100.0
    for _ in range(10):
        delivery.attempt(now)
        waits.append(delivery.retry_at - now)
        now = delivery.retry_at
    assert waits[:3] == [0.5, 1.0, 2.0]
    assert waits[-1] == 30.0
    assert delivery.pending


def test_what_was_dropped_is_said_once_with_its_causes(sink, capfd):
    def redact(text: str) -> str:
        raise ValueError(text)

    recorder = Recorder(Settings(flush_interval_s=0.005, redact=redact), open_sink=lambda: sink)
    recorder.end(0.0, 0.0)
    assert capfd.readouterr().err == ""
    made = exchange(recorder)
    made.request = b'{"messages": [{"role": "user", "content": "hi"}]}'
    made.finish("complete")
    assert recorder.flush(10)
    sink.refuse = {"bad"}
    for key in ("a", "bad", "b"):
        recorder.put_record(score(key))
    while recorder.dropped < 2:
        recorder.flush(0.1)
    assert recorder.stop(10)
    faults.clear()
    capfd.readouterr()
    for _ in range(2):
        recorder.end(0.0, 0.0)
    assert capfd.readouterr().err == (
        "art_patch: 1 call not recorded, because redaction failed; mend the function that `redact` names. 1 other "
        "record not recorded, because the store refuses them; the logger art_patch shows why at level DEBUG\n"
    )


def test_an_answer_without_an_end_is_not_kept(recorder, sink, monkeypatch):
    monkeypatch.setattr("art_patch.recording.exchange.MOST_ANSWER_BYTES", 10_000)
    for chunks in (2, 3):
        made = exchange(recorder)
        for _ in range(chunks):
            made.saw(b"x" * 5_000)
        assert sum(map(len, made.answer)) == (10_000 if chunks == 2 else 0)
        made.finish("complete")
    assert recorder.flush(10)
    assert (recorder.counts.recorded, recorder.dropped) == (1, 1)


def test_it_starts_again_after_a_stop(recorder, sink):
    recorder.put_record(score("a"))
    assert recorder.stop(5)
    assert recorder._thread is None
    recorder.put_record(score("b"))
    assert recorder.flush(5)
    assert len(sink.records) == 2


def test_finalisers_may_put_while_putting(recorder, sink):
    """The garbage collector may end a stream at any allocation, also inside `put`."""
    import gc

    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.exchange = exchange(recorder)

        def __del__(self) -> None:
            self.exchange.finish("closed")

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            Cycle()
            exchange(recorder).finish("complete")
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert recorder.flush(10)
    assert recorder.counts.recorded == 400


def test_on_tick_runs(sink):
    ticked = threading.Event()
    recorder = Recorder(Settings(poll_interval_s=0.01), open_sink=lambda: sink, on_tick=ticked.set)
    recorder.ensure_running()
    assert ticked.wait(10)
    assert recorder.stop(5)


def test_ids_are_uuid7_in_order():
    ids = [new_id(1_700_000_000 + i / 1000) for i in range(100)]
    assert ids == sorted(ids)
    assert len({*ids}) == 100
    assert {(key[12], key[16] in "89ab", len(key)) for key in ids} == {("7", True, 32)}


FORK = """
import os, sys, threading
from art_patch.recording import Exchange, Recorder
from art_patch.types import Call
from art_patch.settings import Settings

class Sink:
    def write(self, records):
        for record in records:
            if isinstance(record, Call):
                os.write(1, f"{record.requested_model} {os.getpid() == parent}\\n".encode())

parent = os.getpid()
recorder = Recorder(Settings(flush_interval_s=0.2), open_sink=Sink)
Exchange(recorder, "before").finish("complete")
open_one = Exchange(recorder, "open")
recorder._lock.acquire()
child = os.fork()
if child == 0:
    open_one.finish("closed")
    Exchange(recorder, "child").finish("complete")
    sys.exit(0)
recorder._lock.release()
assert os.waitpid(child, 0)[1] == 0
open_one.finish("complete")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork():
    done = subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60, capture_output=True, text=True)
    assert sorted(done.stdout.split("\n")) == ["", "before True", "child False", "open True"]


HUNG = """
import time, threading
from art_patch.recording import Exchange, Recorder
from art_patch.settings import Settings

class Hung:
    def write(self, records):
        threading.Event().wait()

recorder = Recorder(Settings(flush_interval_s=0.01), open_sink=Hung)
Exchange(recorder, "m").finish("complete")
"""


def test_a_hung_store_does_not_hold_up_the_exit():
    # The timeout is the point: without a deadline this would never end. What it takes is not asserted.
    done = subprocess.run([sys.executable, "-W", "error", "-c", HUNG], check=True, timeout=30, capture_output=True)
    assert done.stderr == (
        b"art_patch: 1 call not recorded, because the store had not taken it all when the exit stopped waiting; "
        b"call art_patch.flush(60) before the program ends\n"
    )


def test_the_exit_writes_what_is_queued():
    code = FORK.partition("recorder._lock.acquire")[0].replace('open_one = Exchange(recorder, "open")', "")
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=30, capture_output=True, text=True)
    assert done.stdout == "before True\n"


LATE = """
import sys
from art_patch.recording import Exchange, Recorder
from art_patch.settings import Settings

class Stream:
    def __init__(self):
        self.exchange = Exchange(recorder, "m")

    def __del__(self):
        self.exchange.finish("closed")

recorder = Recorder(Settings(flush_interval_s=0.01))
sys.last_value = Stream()  # where an exception that ends the app keeps what it saw
"""


def test_a_stream_that_the_interpreter_closes_when_it_goes_down_does_not_hold_it_up():
    # Python 3.11 waits for ever for a thread that is started then.
    done = subprocess.run([sys.executable, "-c", LATE], check=True, timeout=20, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
