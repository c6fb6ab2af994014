"""Sends messages through apprise, which knows more than a hundred services. Addresses are URLs, and URLs are secrets.

Neither an address nor a part of it is written anywhere: an address is named by its service and its place in the list.
apprise logs addresses that it does not understand, so its log is kept apart, and searched for the cause of a failure.
"""

import logging
import re
from typing import Any

from art_patch.errors import ConfigError
from art_patch.notifications.messages import Message

# What separates addresses, from its first character on; an address may have commas in it.
_BETWEEN = re.compile(r"(?<![\s,])[\s,]++(?=[A-Za-z][A-Za-z0-9+.-]{0,30}://)")
# Parts of an address that may be a token, a password or a name.
_PART = re.compile(r"[^/:@?&=#,\s]{4,}")
_STAMP = re.compile(r"^[\d-]+ [\d:,]+ - \w+ - ")


_KINDS = {"alarm": "FAILURE", "advice": "WARNING", "rejection": "WARNING", "promotion": "SUCCESS"}


class Address:
    """One address, by its service and its place in the setting."""

    def __init__(self, url: str, place: int, target: Any) -> None:
        """`target` is apprise's object for `url`."""
        self._url, self._target = url, target
        self.name = f"{target.service_name} (address {place})"

    def send(self, message: Message) -> str | None:
        """Send a message; return the cause if that failed, else `None`."""
        import apprise

        # By name: they are texts in old releases of apprise, and an enumeration in new ones.
        kind: Any = getattr(apprise.NotifyType, _KINDS.get(message.kind, "INFO"))
        captured: Any = apprise.LogCapture(level=logging.WARNING)
        with captured as log:
            try:
                was_sent = self._target.notify(title=message.title, body=message.body, notify_type=kind)
            except Exception as error:  # of a service's module, which may quote the address
                return f"{type(error).__name__} in apprise"
            lines = [_STAMP.sub("", line) for line in log.getvalue().splitlines()]
        return None if was_sent else self._hidden(" ".join(filter(None, lines)) or "it was refused")

    def _hidden(self, text: str) -> str:
        for part in sorted(_PART.findall(self._url.partition("://")[2]), key=len, reverse=True):
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
