"""What waits in the queue -> records for the store, each trajectory announced before its first call.

Here the share of trajectories that is recorded is chosen, by their id, and texts are redacted. State: which
trajectories were announced, and where unnamed conversations ended. Owned by the writer thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from art_patch._lib.faults import Unstorable, faults
from art_patch.recording.exchange import Exchange
from art_patch.recording.media import without_media
from art_patch.recording.reading import read_call
from art_patch.recording.redaction import Redactor
from art_patch.recording.share import in_share
from art_patch.recording.stitching import Stitcher
from art_patch.settings import Redact
from art_patch.types import AppReport, Call, Record, TrajectoryInfo

MAX_ANNOUNCED = 20_000

OnShadow = Callable[[Call, TrajectoryInfo], None]


class Converter:
    """Turns queue items into records."""

    def __init__(self, *, sample_rate: float = 1.0, redact: Redact = None, on_shadow: OnShadow | None = None) -> None:
        """Start with nothing announced.

        Args:
            sample_rate: share of trajectories to keep.
            redact: see `Settings.redact`.
            on_shadow: given each answered call that a policy is to be asked too, before it is redacted.
        """
        self._sample_rate = sample_rate
        self._redact = Redactor(redact) if redact is not None else None
        self._on_shadow = on_shadow
        self._announced: OrderedDict[str, str] = OrderedDict()
        self._stitcher = Stitcher()

    def convert(self, item: Exchange | Record) -> list[Record]:
        """Return the records of one item; empty if the store knows it already or must not know it.

        Raises:
            Unstorable: if it could not be redacted.
        """
        if isinstance(item, AppReport):
            return [item]
        if isinstance(item, Exchange):
            records = self._read(item)
        else:
            records = self._announce(item) if isinstance(item, TrajectoryInfo) else [item]
        records = [record for record in records if in_share(_owner(record), self._sample_rate, "sample")]
        if self._redact is None:
            return records
        try:
            return [self._redact(record) for record in records]
        except Exception as error:  # the user's function
            for record in records:
                self._announced.pop(_owner(record), None)
            faults.trouble("redact", error)
            raise Unstorable from error

    def _read(self, exchange: Exchange) -> list[Record]:
        call = read_call(exchange)
        info = exchange.trajectory or self._stitcher.place(call, exchange.group_key)
        call = replace(call, trajectory_id=info.id, shadow_of=exchange.shadow_of)
        # The champion cannot be asked about a picture of which only the hash is left.
        whole = exchange.shadow and without_media(exchange.request) is exchange.request
        if whole and call.status == "ok" and self._on_shadow is not None:
            self._on_shadow(call, info)
        return [*self._announce(info), call]

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


def _owner(record: Record) -> str:
    return record.id if isinstance(record, TrajectoryInfo | AppReport) else record.trajectory_id
