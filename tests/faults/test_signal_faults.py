"""Signals that arrive just as a wait ends, as those of an app's own timers and children do.

Before Python 3.13 a timed `SimpleQueue.get()` waits for ever if a signal interrupts it when its time is just over.
"""

from __future__ import annotations

import pytest

from tests.support.apps import Programs, Store

FLUSHES = """
import faulthandler, signal, sqlite3

faulthandler.dump_traceback_later(40)  # a deadlock says where
signal.signal(signal.SIGALRM, lambda *_: None)
call("first")
assert art.flush(30)
holder = sqlite3.connect(sys.argv[1], isolation_level=None)
holder.execute("BEGIN IMMEDIATE")
call("second")
for number in range(500):
    signal.setitimer(signal.ITIMER_REAL, 0.002 + number % 50 * 5e-6)
    assert not art.flush(0.002)
holder.execute("ROLLBACK")
assert art.flush(30)
"""

FORKS = """
import faulthandler, signal, threading
from art_patch._lib.forking import in_database

faulthandler.dump_traceback_later(40)
signal.signal(signal.SIGALRM, lambda *_: None)
call("first")
assert art.flush(30)

def use():
    while not stop.is_set():
        with in_database():
            time.sleep(0.02)  # as a slow disk
        time.sleep(0.001)

stop = threading.Event()
thread = threading.Thread(target=use)
thread.start()
for number in range(100):
    signal.setitimer(signal.ITIMER_REAL, 0.0010, 0.0010 + number * 1e-6)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
signal.setitimer(signal.ITIMER_REAL, 0)
stop.set()
thread.join()
call("last")
assert art.flush(30)
"""


@pytest.mark.parametrize(("code", "texts"), [(FLUSHES, ["first", "second"]), (FORKS, ["first", "last"])])
def test_a_wait_ends_though_a_signal_comes_with_its_end(
    programs: Programs, store: Store, code: str, texts: list[str]
) -> None:
    ran = programs.run(code, str(store.path), timeout=60)
    assert (ran.code, ran.err) == (0, "")
    assert store.texts() == texts
