"""Turns the bytes of requests and answers into records in the store, in one background thread.

In: an `Exchange` for each call (from `patching`), and through `emit()` scores, spans and trajectories (from `context`).
Out: batches of records for the store.

The app's threads only append raw bytes to a queue. The spooler's thread writes what may be stored to a file, from which
it gets into the store even if the process is killed. The recorder's thread parses the calls, finds the trajectory of
each and writes to the store. Queue and files are limited in bytes; a call that does not fit is not recorded at all, and
is counted. Only allow-listed fields of a request are recorded, and no headers. Secrets are removed from error texts. If
the store fails, calls wait and are tried again, and the app's calls go on as usual.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.recording.delivery import Sink
    from art_patch.recording.exchange import Ended, Exchange, Purpose, in_share
    from art_patch.recording.messages import as_responses_request, read_messages_request
    from art_patch.recording.process import begin_exchange, emit, knows, note_call, redacts, set_recorder, settings_of
    from art_patch.recording.recorder import Recorder
    from art_patch.recording.redaction import MEDIA_REPLACED, REDACTED, Redactor
    from art_patch.recording.responses import read_responses_request
    from art_patch.recording.scrubbing import described, hide
    from art_patch.recording.spool import spool_directory
    from art_patch.recording.takeover import take_over
else:
    __getattr__ = lazily()
