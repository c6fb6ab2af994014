"""Recording: request bytes and answer bytes -> `records.Call` -> the store, all behind one background thread.

In: an `Exchange` for each call (from `patching`), scores, spans and trajectories (from `context`, through `emit`).
Out: batches of records to `Store.write`.

Rules: the app's threads only append raw bytes; parsing, stitching and writing happen in the thread. Bounded by bytes;
what does not fit is dropped whole and counted. Only allow-listed request fields are kept, never a header, and error
texts without secrets. If the store fails, batches wait and are tried again; the app never notices.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.recording.delivery import Sink
    from art_patch.recording.exchange import Ended, Exchange, in_share
    from art_patch.recording.process import begin_exchange, current_settings, emit, redacts, set_recorder
    from art_patch.recording.recorder import Recorder
    from art_patch.recording.redaction import Redactor
    from art_patch.recording.responses import read_responses_request
    from art_patch.recording.scrubbing import described
else:
    __getattr__ = lazily(
        __name__,
        {
            "delivery": "Sink",
            "exchange": "Ended Exchange in_share",
            "process": "begin_exchange current_settings emit redacts set_recorder",
            "recorder": "Recorder",
            "redaction": "Redactor",
            "responses": "read_responses_request",
            "scrubbing": "described",
        },
    )
