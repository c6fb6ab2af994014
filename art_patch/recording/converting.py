"""What waits in the queue -> records for the store, each trajectory announced before its first call.

State: which trajectories were announced, and where unnamed conversations ended. Owned by the writer thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from art_patch.recording.exchange import Exchange
from art_patch.recording.reading import read_call
from art_patch.recording.stitching import Stitcher
from art_patch.records import Record, TrajectoryInfo

MAX_ANNOUNCED = 20_000


class Converter:
    """Turns queue items into records."""

    def __init__(self) -> None:
        """Start with nothing announced."""
        self._announced: OrderedDict[str, str] = OrderedDict()
        self._stitcher = Stitcher()

    def convert(self, item: Exchange | Record) -> list[Record]:
        """Return the records of one item; empty if the store knows it already."""
        if isinstance(item, TrajectoryInfo):
            return self._announce(item)
        if not isinstance(item, Exchange):
            return [item]
        call = read_call(item)
        info = item.trajectory or self._stitcher.place(call, item.group_key)
        return [*self._announce(info), replace(call, trajectory_id=info.id)]

    def _announce(self, info: TrajectoryInfo) -> list[Record]:
        known = self._announced.get(info.id)
        # A trajectory is written when it is first seen, when its origin changes to stitched, and when it ends.
        if known is not None and info.ended_at is None and known == info.origin:
            self._announced.move_to_end(info.id)
            return []
        self._announced[info.id] = info.origin
        self._announced.move_to_end(info.id)
        while len(self._announced) > MAX_ANNOUNCED:
            self._announced.popitem(last=False)
        return [info]
