"""Calls that take their identity as the patch does, without an SDK; and the patch over an upstream that answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from art_patch.context import current_trajectory, identify
from art_patch.patching import control, flush
from art_patch.recording import Exchange, Recorder, set_recorder
from art_patch.settings import Settings
from art_patch.types import Record, Route
from tests.support.servers import StubServer


class Recording:
    """A recorder that keeps everything, and calls that take their identity as the patch does."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._recorder = Recorder(Settings(flush_interval_s=0.005), open_sink=lambda: self)
        set_recorder(self._recorder)

    def write(self, records: Sequence[Record]) -> None:
        self.records += records

    def call(self) -> str | None:
        """Make a call; return the id of its trajectory if the context names one."""
        who = identify()
        Exchange(self._recorder, "m", who.trajectory, who.span_id, who.group_key).finish("complete")
        return None if who.trajectory is None else who.trajectory.id

    def of(self, kind: type[Any]) -> list[Any]:
        assert self._recorder.flush(10)
        return [record for record in self.records if isinstance(record, kind)]

    def end(self) -> None:
        """Not named `close`: a recorder that stops closes its sink, which would wait for the recorder."""
        set_recorder(None)
        assert self._recorder.stop(10)


def here() -> str | None:
    """The trajectory that surrounds the caller."""
    found = current_trajectory()
    return None if found is None else found.id


class Patched:
    """The patch over an upstream that answers, and what it records."""

    def __init__(self, upstream: StubServer) -> None:
        self.upstream = upstream
        self.records: list[Record] = []
        self.client = {"api_key": "sk-x", "base_url": upstream.url, "max_retries": 0}
        control.start(Settings(flush_interval_s=0.005), open_sink=lambda: self, read_route=lambda *_: Route())

    def write(self, records: Sequence[Record]) -> None:
        self.records += records

    def of(self, kind: type[Any]) -> list[Any]:
        assert flush(10)
        return [record for record in self.records if isinstance(record, kind)]
