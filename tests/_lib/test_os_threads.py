"""Flags and queues between the app's threads and ours."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from queue import Empty

import pytest

from art_patch._lib.os_threads import Flag, Queue


def test_a_flag_is_taken_down_by_whoever_waits_for_it() -> None:
    flag = Flag()
    assert not flag.wait(0.0)
    flag.set()
    flag.set()
    assert flag.wait(-1.0)
    assert not flag.wait(0.001)
    flag.set()
    flag.clear()
    flag.clear()
    assert not flag.wait(0.0)
    threading.Timer(0.02, flag.set).start()
    assert flag.wait(float("inf"))


def test_a_queue_hands_over_in_order_and_says_when_there_is_nothing() -> None:
    queue: Queue[int] = Queue()
    for item in range(3):
        queue.put(item)
    assert [queue.get(), queue.get(10.0), queue.get()] == [0, 1, 2]
    assert queue.empty()
    for timeout_s in (0.0, 0.001):
        with pytest.raises(Empty):
            queue.get(timeout_s)
    threading.Timer(0.02, queue.put, [3]).start()
    assert queue.get(30.0) == 3


def test_a_queue_loses_nothing_of_many_threads() -> None:
    queue: Queue[tuple[int, int]] = Queue()
    threads = [
        threading.Thread(target=lambda me=me: [queue.put((me, item)) for item in range(5_000)]) for me in range(4)
    ]
    for thread in threads:
        thread.start()
    found = [queue.get(30.0) for _ in range(20_000)]
    for thread in threads:
        thread.join()
    assert queue.empty()
    assert all([item for me, item in found if me == one] == list(range(5_000)) for one in range(4))


def test_a_finaliser_may_put() -> None:
    queue: Queue[str] = Queue()

    class Stream:
        def __init__(self) -> None:
            self.itself = self  # so that the garbage collector ends it, wherever the thread is just then

        def __del__(self) -> None:
            queue.put("finalised")

    before = gc.get_threshold()
    gc.set_threshold(3)
    try:
        for _ in range(2_000):
            Stream()
            queue.put("put")
    finally:
        gc.set_threshold(*before)
    gc.collect()
    found = [queue.get() for _ in range(4_000)]
    assert queue.empty()
    assert (found.count("put"), found.count("finalised")) == (2_000, 2_000)


@pytest.mark.parametrize("order", ["gevent patches before us", "gevent patches after us"])
def test_gevent_leaves_them_alone(order: str) -> None:
    pytest.importorskip("gevent")
    ours, its = (
        "from art_patch._lib.os_threads import Flag, Queue, RLock",
        "from gevent import monkey; monkey.patch_all()",
    )
    lines = [ours, its] if order.endswith("after us") else [its, ours]
    lines.append("print(*(type(made).__module__ for made in (Flag()._lowered, Queue()._filled._lowered, RLock())))")
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("_thread _thread _thread\n", "")
