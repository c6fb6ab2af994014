"""Turns the bytes of requests and answers into records in the store, in one background thread.

In: an `Exchange` for each call (from `patching`), and through `emit()` scores, spans and trajectories (from `context`).
Out: batches of records for the store.

The app's threads only append raw bytes to a queue. The recorder's thread parses them, finds the trajectory of each call
and writes to the store. The queue is limited in bytes; a call that does not fit is not recorded at all, and is counted.
Only allow-listed fields of a request are recorded, and no headers. Secrets are removed from error texts. If the store
fails, batches wait in memory and are tried again, and the app's calls go on as usual.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.recording.delivery import Sink
    from art_patch.recording.exchange import Ended, Exchange, in_share
    from art_patch.recording.messages import as_responses_request, read_messages_request
    from art_patch.recording.process import begin_exchange, emit, knows, note_call, redacts, set_recorder, settings_of
    from art_patch.recording.recorder import Recorder
    from art_patch.recording.redaction import Redactor
    from art_patch.recording.responses import read_responses_request
    from art_patch.recording.scrubbing import described
else:
    __getattr__ = lazily()
