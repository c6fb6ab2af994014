"""What a warning in the app's log says of an error: its cause and host, and no word of the app's or of its users."""

from __future__ import annotations

import socket
import sqlite3
from pathlib import Path

import pytest

from art_patch._lib.faults import Faults, cause_of
from art_patch.errors import StoreError
from art_patch.store import read_route


def raised(work: object) -> BaseException:
    assert callable(work)
    with pytest.raises(BaseException) as caught:
        work()
    return caught.value


def a_closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_a_server_that_refuses_is_named_with_its_port(caplog: pytest.LogCaptureFixture):
    port = a_closed_port()
    url = f"postgresql+psycopg://shop:hunter2-of-mine@127.0.0.1:{port}/secretdb"
    Faults().trouble("route.read", raised(lambda: read_route(url, "shop")))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == (
        "art_patch: StoreError in route.read: the app is not affected (1 so far); "
        f"cause: OperationalError, connection refused; host: 127.0.0.1:{port}"
    )


def test_a_host_without_an_address_is_named():
    error = raised(lambda: read_route("postgresql+psycopg://shop@no-such-host.invalid/db", "shop"))
    assert cause_of(error).endswith("; host: no-such-host.invalid")


def test_a_locked_file_is_told_from_a_broken_one(tmp_path: Path):
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as holder:
        holder.execute("CREATE TABLE control (a)")
        holder.execute("BEGIN EXCLUSIVE")
        assert cause_of(raised(lambda: read_route(f"sqlite:///{path}", "shop"))) == "cause: database is locked"
    holder.close()
    path.write_bytes(b"no database " * 1000)
    assert cause_of(raised(lambda: read_route(f"sqlite:///{path}", "shop"))) == "cause: not a database"


class Curious(Exception):
    """An error of the app, whose every method fails."""

    def __str__(self) -> str:
        raise AssertionError("asked for its text")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def host(self) -> str:
        raise AssertionError("asked for its host")


def test_no_text_of_the_app_is_repeated():
    try:
        try:
            raise Curious
        except Curious as first:
            raise ValueError("my card is 4111 1111, connection refused") from first
    except ValueError as error:
        assert cause_of(error) == "cause: Curious"
    assert cause_of(ValueError("my card is 4111 1111, connection refused")) == ""
    assert cause_of(StoreError("no words that are known, my card is 4111 1111")) == ""
    assert cause_of(FileNotFoundError(2, "my own words", "/home/ann/card")) == "cause: No such file or directory"


def test_errors_that_go_round_in_a_circle_end():
    one, two = ValueError(), KeyError()
    one.__cause__, two.__cause__ = two, one
    assert cause_of(one).startswith("cause: ")
