"""The process that sends one message, so that a service that never answers, or answers without end, holds up nobody.

In, on stdin: `{"url", "title", "body", "kind"}` as JSON. Out, on stdout: `null` if the message was sent, else the cause
as a JSON text, in which the address may stand. It ends by itself after `MOST_S` seconds, also if nobody waits for it.
"""

import json
import logging
import re
import signal
import sys
from contextlib import suppress
from typing import Any

MOST_S = 20
_MOST_BYTES = 2 << 30  # of memory: a service may answer without end

_STAMP = re.compile(r"^[\d-]+ [\d:,]+ - \w+ - ")


def main() -> None:
    """Send the message."""
    if hasattr(signal, "alarm"):
        signal.alarm(MOST_S)
    with suppress(ImportError, OSError, ValueError):  # Windows, or a lower limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    json.dump(_sent(**json.load(sys.stdin)), sys.stdout)


def _sent(url: str, title: str, body: str, kind: str) -> str | None:
    import apprise

    # By name: they are texts in old releases of apprise, and an enumeration in new ones.
    type_of: Any = getattr(apprise.NotifyType, kind)
    captured: Any = apprise.LogCapture(level=logging.WARNING)
    logging.getLogger("apprise").propagate = False
    with captured as log:
        try:
            target: Any = apprise.Apprise.instantiate(url)
            was_sent = target.notify(title=title, body=body, notify_type=type_of)
        except (Exception, MemoryError) as error:  # of a service's module, which may quote the address
            return f"{type(error).__name__} in apprise"
        lines = [_STAMP.sub("", line) for line in log.getvalue().splitlines()]
    return None if was_sent else " ".join(filter(None, lines)) or "it was refused"


if __name__ == "__main__":
    main()
