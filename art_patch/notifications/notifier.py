"""Decides what is to be sent, with the store, so that two servers and a job send each message once.

Whoever looks first claims a decision, and sends it. If that fails, it is logged and not tried again: a message that may
have arrived must not come twice. A decision that nobody looked at for a day is not sent.
"""

import sqlite3
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from logging import getLogger
from threading import Event

from art_patch.errors import ArtPatchError, ConfigError
from art_patch.notifications.messages import Message, of_advice, of_approval, of_move
from art_patch.notifications.sending import SILENT, Address, addresses
from art_patch.store import Store

EVERY_S = 2.0
_MOST_AGE_S = 86_400.0

log = getLogger(__name__)


class Notifier:
    """Sends the messages of one project."""

    def __init__(self, setting: str | None, project: str, store: Store) -> None:
        """Read the addresses; if they are wrong, that is logged, and nothing is sent."""
        self._project, self._notices = project, store.notices
        self._addresses: Sequence[Address] = ()
        try:
            self._addresses = addresses(setting) if setting else ()
        except ConfigError as error:
            log.warning("no notification is sent: %s", error)

    def look(self) -> None:
        """Send what was decided and not sent yet; the store's errors are raised."""
        while self._addresses and (moves := self._notices.claim_moves(since=time.time() - _MOST_AGE_S)) is not None:
            found = (of_move(self._project, move) for move in moves)
            self._send(*(message for message in found if message is not None))

    def keep(self, stop: Event) -> None:
        """Look every `EVERY_S` seconds until `stop` is set, and once more then; log an error of the store once."""
        trouble = ""
        while self._addresses:
            ends = stop.wait(EVERY_S)
            try:
                self.look()
                trouble = ""
            except (ArtPatchError, sqlite3.Error) as error:  # any other one ends the thread, which begins again
                if str(error) != trouble and not ends:
                    log.warning("decisions to notify of cannot be read: %s", error)
                trouble = str(error)
            if ends:
                return

    def advise(self, verdict: str, reasons: tuple[str, ...]) -> None:
        """Send `do not switch` when the report's verdict becomes it."""
        if self._addresses and self._notices.claim_words("advice", verdict) and verdict == "do not switch":
            self._send(of_advice(self._project, reasons))

    def waits(self, candidate: str, reason: str) -> None:
        """Send that a candidate waits for approval, once for each."""
        if self._addresses and self._notices.claim_words("approval", candidate):
            self._send(of_approval(self._project, candidate, reason))

    @property
    def is_on(self) -> bool:
        """Whether there is an address."""
        return bool(self._addresses)

    def _send(self, *messages: Message) -> None:
        if messages:
            # At once, because no address shall wait for another one.
            with ThreadPoolExecutor(len(self._addresses)) as pool:
                list(pool.map(partial(_send_to, messages), self._addresses))


def _send_to(messages: Sequence[Message], address: Address) -> None:
    for number, message in enumerate(messages, 1):
        if (cause := address.send(message)) is not None:
            left = len(messages) - number
            # Who waits for each of many messages to a service that hangs holds up the job.
            more = f"; nor were {left} more" if cause == SILENT and left else ""
            log.warning("the notification %r was not sent to %s: %s%s", message.title, address.name, cause, more)
            if more:
                return
