"""What pages keep of sums over a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from art_patch.settings import load_settings
from art_patch.store import Store, open_store
from art_patch.types import AppReport
from art_patch.web.projects import Project


@pytest.fixture(name="one")
def _one(tmp_path: Path) -> Iterator[Project]:
    with closing(open_store(f"sqlite:///{tmp_path}/traces.db", project="one")) as store:
        yield Project(load_settings(home=tmp_path, project="one"), store)


def change(store: Store) -> None:
    store.write([AppReport("app:1", time.time(), {})])
    time.sleep(0.3)  # for longer than marks are kept


def slow_sum(takes_s: float = 0.06) -> tuple[list[int], Callable[[], int]]:
    """Return how often the sum was made, and the function that makes it."""
    number = [0]

    def make() -> int:
        time.sleep(takes_s)
        number[0] += 1
        return number[0]

    return number, make


def test_a_quick_sum_is_made_for_each_page(one: Project):
    made, told = list[int](), threading.Event()
    one.on_renewed = told.set

    def make() -> int:
        made.append(1)
        return len(made)

    for number in range(1, 4):
        assert one.kept("calls", 60, make) == number
        time.sleep(0.02)  # longer than it took
    assert not told.is_set()


def test_a_slow_sum_is_shown_as_it_was_and_renewed_meanwhile(one: Project):
    may_end, number, told = threading.Event(), [0], list[int]()
    one.on_renewed = lambda: told.append(number[0])

    def make() -> int:
        may_end.wait(10)
        time.sleep(0.06)
        number[0] += 1
        return number[0]

    may_end.set()
    assert one.kept("calls", 0.0, make) == 1
    may_end.clear()
    change(one.store)
    assert [one.kept("calls", 0.0, make) for _ in range(5)] == [1] * 5  # nobody waits
    may_end.set()
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (told, number[0]) == ([2], 2)  # and it was made once for all of them
    one.forget()
    assert one.kept("calls", 60.0, make) == 3


def test_a_sum_that_was_made_before_a_change_is_made_again_though_it_is_fresh(one: Project):
    """Else an open page, which asks once after each change, would show the old one until the next."""
    number, make = slow_sum()
    told = threading.Event()
    one.on_renewed = told.set

    assert [one.kept("calls", 9.0, make) for _ in range(3)] == [1] * 3
    change(one.store)
    one.notice(one.store.changes.marks())
    assert [one.kept("calls", 9.0, make) for _ in range(3)] == [1] * 3
    assert told.wait(10)
    assert (one.kept("calls", 9.0, make), number[0]) == (2, 2)


def test_a_slow_sum_over_a_store_in_which_nothing_changes_is_not_made_again(one: Project, monkeypatch: Any):
    number, make = slow_sum()
    told = threading.Event()
    one.on_renewed = told.set

    assert one.kept("calls", 0.0, make) == 1
    for _ in range(3):
        time.sleep(0.3)
        assert one.kept("calls", 0.0, make) == 1
    assert number == [1]
    # What no mark tells, such as an erasure by another process, is seen some time later.
    monkeypatch.setattr("art_patch.web.projects._SURE_S", 0.5)
    assert one.kept("calls", 0.0, make) == 1
    assert told.wait(10)
    assert one.kept("calls", 0.0, make) == 2


def test_those_who_ask_at_once_wait_for_one_sum(one: Project):
    number, make = slow_sum(0.2)
    found = list[int]()

    threads = [threading.Thread(target=lambda: found.append(one.kept("calls", 60, make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, number) == ([1] * 8, [1])


def test_a_sum_that_cannot_be_made_again_stays(one: Project):
    fails = [False]

    def make() -> int:
        time.sleep(0.06)
        if fails[0]:
            raise OSError("the database is down")
        return 1

    assert one.kept("calls", 0.0, make) == 1
    fails[0] = True
    change(one.store)
    assert one.kept("calls", 0.0, make) == 1
    time.sleep(0.2)
    assert one.kept("calls", 0.0, make) == 1
