"""Callers who ask for much at once and leave: nobody else waits, and nothing of it is an error in the log."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.support.command_line import Serving, warned


@pytest.mark.slow
def test_callers_who_leave_amid_many_answers_are_no_error(tmp_path: Path, base: Path):
    server = Serving(base, tmp_path)
    try:
        host, port = server.ready["base_url"].split("/")[2].split(":")
        requests = f"GET /metrics HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode() * 20
        for _ in range(3):
            callers = [socket.create_connection((host, int(port))) for _ in range(40)]
            for caller in callers:
                caller.sendall(requests)
            time.sleep(0.05)  # amid the answers
            for caller in callers:
                caller.close()
        time.sleep(1.0)
    finally:
        code, said = server.stop()
    assert (code, warned(said)) == (0, "")
