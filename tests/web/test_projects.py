"""What pages keep of sums over a store."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, cast

from art_patch.settings import load_settings
from art_patch.web.projects import Project


def project(home: Path) -> Project:
    return Project(load_settings(home=home, project="one"), cast("Any", None))


def test_a_quick_sum_is_made_for_each_page(tmp_path: Path):
    one, made, told = project(tmp_path), list[int](), threading.Event()
    one.on_renewed = told.set

    def make() -> int:
        made.append(1)
        return len(made)

    for number in range(1, 4):
        assert one.kept("calls", 60, make) == number
        time.sleep(0.02)  # longer than it took
    assert not told.is_set()


def test_a_slow_sum_is_shown_as_it_was_and_renewed_meanwhile(tmp_path: Path):
    one, may_end, number, told = project(tmp_path), threading.Event(), [0], list[int]()
    one.on_renewed = lambda: told.append(number[0])

    def make() -> int:
        may_end.wait(10)
        time.sleep(0.06)
        number[0] += 1
        return number[0]

    may_end.set()
    assert one.kept("calls", 0.0, make) == 1
    may_end.clear()
    time.sleep(0.1)  # for as long as it took, it is fresh
    assert [one.kept("calls", 0.0, make) for _ in range(5)] == [1] * 5  # nobody waits
    may_end.set()
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (told, number[0]) == ([2], 2)  # and it was made once for all of them
    one.forget()
    assert one.kept("calls", 60.0, make) == 3


def test_a_sum_that_was_made_before_a_change_is_made_again_though_it_is_fresh(tmp_path: Path):
    """Else an open page, which asks once after each change, would show the old one until the next."""
    one, number, told = project(tmp_path), [0], threading.Event()
    one.on_renewed = told.set

    def make() -> int:
        time.sleep(0.06)
        number[0] += 1
        return number[0]

    assert [one.kept("calls", 0.5, make) for _ in range(3)] == [1] * 3
    assert not told.wait(1), "nothing has changed"
    assert one.kept("calls", 0.5, make) == 1
    assert told.wait(10)
    one.notice({"calls": 7})
    assert [one.kept("calls", 0.5, make) for _ in range(3)] == [2] * 3
    told.clear()
    assert told.wait(10)
    assert (one.kept("calls", 0.5, make), number[0]) == (3, 3)


def test_those_who_ask_at_once_wait_for_one_sum(tmp_path: Path):
    one, number, found = project(tmp_path), [0], list[int]()

    def make() -> int:
        time.sleep(0.2)
        number[0] += 1
        return number[0]

    threads = [threading.Thread(target=lambda: found.append(one.kept("calls", 60, make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, number) == ([1] * 8, [1])


def test_a_sum_that_cannot_be_made_again_stays(tmp_path: Path):
    one, fails = project(tmp_path), [False]

    def make() -> int:
        time.sleep(0.06)
        if fails[0]:
            raise OSError("the database is down")
        return 1

    assert one.kept("calls", 0.0, make) == 1
    fails[0] = True
    assert one.kept("calls", 0.0, make) == 1
    time.sleep(0.2)
    assert one.kept("calls", 0.0, make) == 1
