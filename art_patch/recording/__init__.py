"""Recording: request bytes and answer bytes -> `records.Call` -> the store, all behind one background thread.

In: an `Exchange` for each call (from `patching`), scores, spans and trajectories (from `context`, through `emit`).
Out: batches of records to `Store.write`.

Rules: the app's threads only append raw bytes; parsing, stitching and writing happen in the thread. Bounded by bytes;
what does not fit is dropped whole and counted. Only allow-listed request fields are kept, never a header, and error
texts without secrets. If the store fails, batches wait and are tried again; the app never notices.
"""

from __future__ import annotations

from art_patch.recording.delivery import Sink
from art_patch.recording.exchange import Exchange
from art_patch.recording.faults import faults, is_fault
from art_patch.recording.outlet import begin_exchange, emit, set_recorder
from art_patch.recording.recorder import Recorder
from art_patch.recording.share import in_share

__all__ = ["Exchange", "Recorder", "Sink", "begin_exchange", "emit", "faults", "in_share", "is_fault", "set_recorder"]
