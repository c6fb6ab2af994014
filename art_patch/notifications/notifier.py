"""Tells people of decisions: puts them into words, finds with the store what is to be sent, and sends it, each once.

Whoever looks first claims a decision, and sends it, so that two servers and a job send each message once. If that
fails, it is logged and not tried again: a message that may have arrived must not come twice. A decision that nobody
looked at for a day is not sent.

Messages go through apprise, which knows more than a hundred services. Addresses are URLs, and URLs are secrets. Neither
an address nor a part of it is written anywhere: an address is named by its service and its place in the list. apprise
logs addresses that it does not understand, so its log is kept apart, and searched for the cause of a failure.

Each message is sent by a process of its own (`sender`), which is killed after `sender.MOST_S` seconds: a service may
answer slowly, or without end, and neither a job nor a server may wait for that.
"""

import json
import logging
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, Literal
from urllib.parse import unquote

from art_patch._lib.words import one_line
from art_patch.errors import ArtPatchError, ConfigError
from art_patch.notifications.sender import MOST_S
from art_patch.store import Store
from art_patch.types import JSON

EVERY_S = 2.0
_MOST_AGE_S = 86_400.0

log = logging.getLogger(__name__)

Kind = Literal["promotion", "rejection", "rollback", "alarm", "advice", "approval", "test"]


@dataclass(frozen=True, slots=True)
class Message:
    """A message: what happened in a line, and why."""

    kind: Kind
    title: str
    body: str


def of_move(project: str, move: JSON) -> Message | None:
    """Return the message about a change of a policy's state; `None` if it is not worth one."""
    name, before, after = move["policy"], move["from_state"], move["to_state"]
    if after == "champion":
        # One is gone back to without a test.
        goes_back = move["again"] and before in ("retired", "learner")
        kind: Kind = "rollback" if goes_back else "promotion"
        what = f"{name} serves again" if goes_back else f"{name} was promoted and serves"
    elif after == "rejected":
        kind, what = "rejection", f"{name} was rejected"
    elif before == "champion" and not str(move["reason"]).startswith("replaced by "):
        # Proven worse than the control group; else by a person.
        is_alarm = bool(move["metrics"].get("control"))
        kind, what = ("alarm" if is_alarm else "rollback"), f"{name} serves no more, upstream answers"
    else:
        return None
    was = f"It was {before} before.\n" if before not in (None, "champion") else ""
    return Message(kind, _title(project, what), f"{one_line(move['reason'])}\n{was}Decided by {one_line(move['who'])}.")


def of_advice(project: str, reasons: tuple[str, ...]) -> Message:
    """Return the message that the report advises against the champion."""
    what = "do not switch: upstream is the better choice now"
    return Message("advice", _title(project, what), "\n".join([*map(one_line, reasons), "See `art-patch report`."]))


def of_approval(project: str, candidate: str, reason: str) -> Message:
    """Return the message that a candidate waits for a person."""
    return Message("approval", _title(project, f"{candidate} waits for approval"), one_line(reason))


def of_test(project: str) -> Message:
    """Return the message by which a person tries the addresses."""
    body = 'Promotions, rejections, rollbacks, alarms, approvals to give, and "do not switch" come here.'
    return Message("test", _title(project, "this is a test"), body)


def _title(project: str, what: str) -> str:
    return f"art_patch {project}: {what}"


# --- sending ---

SILENT = f"it did not answer within {MOST_S} s"
"""Cause of a message that was not sent, or perhaps was."""

# What separates addresses, from its first character on; an address may have commas in it.
_BETWEEN = re.compile(r"(?<![\s,])[\s,]++(?=[A-Za-z][A-Za-z0-9+.-]{0,30}://)")
# Parts of an address that may be a token, a password or a name.
_PART = re.compile(r"[^/:@?&=#,\s]{4,}")

_LONGEST = 500  # characters of a cause
_KINDS = {"alarm": "FAILURE", "advice": "WARNING", "rejection": "WARNING", "promotion": "SUCCESS"}


class Address:
    """One address, by its service and its place in the setting."""

    def __init__(self, url: str, place: int, target: Any) -> None:
        """`target` is apprise's object for `url`."""
        self._url = url
        self.name = f"{target.service_name} (address {place})"

    def send(self, message: Message) -> str | None:
        """Send a message; return the cause if that failed, else `None`."""
        request = {"url": self._url, "title": message.title, "body": message.body}
        request["kind"] = _KINDS.get(message.kind, "INFO")
        # The address goes through a pipe: all users of a machine may read arguments. `-P`: the working directory may
        # have modules of the same names.
        command = [sys.executable, "-P", "-m", "art_patch.notifications.sender"]
        try:
            # A session of its own, which Ctrl-C does not reach.
            done = subprocess.run(
                command,
                input=json.dumps(request),
                capture_output=True,
                text=True,
                timeout=MOST_S,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return SILENT
        except OSError as error:
            return f"no process for it could be started ({error.strerror})"
        if done.returncode or not done.stdout:
            return SILENT if done.returncode == -signal.SIGALRM else f"its process ended with {done.returncode}"
        cause: str | None = json.loads(done.stdout)
        return cause and self._hidden(cause)[:_LONGEST]

    def _hidden(self, text: str) -> str:
        behind = self._url.partition("://")[2]
        # apprise also shows what was quoted in the address.
        parts = {*_PART.findall(behind), *_PART.findall(unquote(behind)), *map(unquote, _PART.findall(behind))}
        for part in sorted(parts, key=len, reverse=True):
            text = text.replace(part, "***")
        return text


def addresses(setting: str) -> list[Address]:
    """Return the addresses in ART_PATCH_NOTIFY; a `ConfigError` says which one is none, without its text."""
    try:
        import apprise
    except ModuleNotFoundError as error:
        raise ConfigError(f'ART_PATCH_NOTIFY needs {error.name}; run: pip install "art-patch[notify]"') from None
    its_log = logging.getLogger("apprise")
    its_log.propagate = False
    if not its_log.handlers:
        its_log.addHandler(logging.NullHandler())  # without any, Python would write its warnings to stderr
    found: list[Address] = []
    for place, url in enumerate(filter(None, _BETWEEN.split(setting.strip())), 1):
        if (target := apprise.Apprise.instantiate(url)) is None:
            known = "write it as in https://github.com/caronc/apprise/wiki, such as slack://TOKEN_A/TOKEN_B/TOKEN_C"
            raise ConfigError(f"address {place} in ART_PATCH_NOTIFY is none that apprise knows; {known}")
        found.append(Address(url, place, target))
    return found


# --- what is to be sent ---


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
