"""Sends messages through apprise, which knows more than a hundred services. Addresses are URLs, and URLs are secrets.

Neither an address nor a part of it is written anywhere: an address is named by its service and its place in the list.
apprise logs addresses that it does not understand, so its log is kept apart, and searched for the cause of a failure.

Each message is sent by a process of its own (`sender`), which is killed after `sender.MOST_S` seconds: a service may
answer slowly, or without end, and neither a job nor a server may wait for that.
"""

import json
import logging
import re
import signal
import subprocess
import sys
from typing import Any
from urllib.parse import unquote

from art_patch.errors import ConfigError
from art_patch.notifications.messages import Message
from art_patch.notifications.sender import MOST_S

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
    log = logging.getLogger("apprise")
    log.propagate = False
    if not log.handlers:
        log.addHandler(logging.NullHandler())  # without any, Python would write its warnings to stderr
    found: list[Address] = []
    for place, url in enumerate(filter(None, _BETWEEN.split(setting.strip())), 1):
        if (target := apprise.Apprise.instantiate(url)) is None:
            known = "write it as in https://github.com/caronc/apprise/wiki, such as slack://TOKEN_A/TOKEN_B/TOKEN_C"
            raise ConfigError(f"address {place} in ART_PATCH_NOTIFY is none that apprise knows; {known}")
        found.append(Address(url, place, target))
    return found
