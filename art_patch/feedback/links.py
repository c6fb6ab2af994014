"""Feedback links: the app makes them, the feedback server checks them. Both know the secret that signs them.

A link has the form `ADDRESS/feedback?trajectory=...&name=...&expires=...&signature=...`, with an HMAC-SHA256 signature.
An app may append `&value=1`, unsigned, which preselects an answer that the person still confirms.
"""

import base64
import hashlib
import hmac
import json
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlencode

from art_patch._lib.key_files import made_key, write_whole
from art_patch.context import current_trajectory
from art_patch.errors import ConfigError
from art_patch.recording import emit, settings_of
from art_patch.settings import Settings, load_settings

PATH = "/feedback"
DAY_S = 86_400

# Part of the signed text, so that no signature made with this secret for another purpose is a link.
_PURPOSE = "art_patch.feedback/1"
_KEY_FILE = "feedback.key"
_ADDRESS_FILE = "feedback.address"


@dataclass(frozen=True, slots=True)
class Link:
    """The permission to give one score, `name`, to one trajectory until `expires_at` (seconds since the epoch)."""

    trajectory_id: str
    name: str
    expires_at: int


class Forged(Exception):
    """Raised if a link was not made with this secret and project, or was changed."""


class Expired(Exception):
    """Raised if a link has a valid signature but its time is over."""


def feedback_url(
    *, trajectory_id: str | None = None, name: str = "thumbs", expires_s: float = 30 * DAY_S,
    base_url: str | None = None,
) -> str:  # fmt: skip
    """Return a link with which a person or an app scores a run. The server `art-patch feedback serve` answers it.

    Args:
        trajectory_id: the run to score; default: the run that `current_trajectory()` returns.
        name: name of the score. `thumbs` takes 0 or 1, `reward` 0 to 1, any other name -1 to 1.
        expires_s: seconds for which the link is valid.
        base_url: address by which people reach the server. Default: `ART_PATCH_FEEDBACK_BASE_URL`, else the address of
            the feedback server that was started most recently on this machine.

    Raises:
        ConfigError: there is no trajectory, no address is known, the key cannot be read or made, or the run has no call
            yet that tells to which of the process's projects it belongs.
    """
    if not name:
        raise ConfigError("a feedback link needs the name of a score, such as 'thumbs'")
    if not (math.isfinite(expires_s) and expires_s > 0):
        raise ConfigError(f"a feedback link cannot expire after {expires_s!r} s; give a positive number of seconds")
    info = None if trajectory_id is not None else current_trajectory()
    target = trajectory_id or (info.id if info is not None else "")
    if not target:
        raise ConfigError(
            "there is no trajectory to ask about; call feedback_url() inside art_patch.trajectory(), "
            "or pass trajectory_id="
        )
    settings = settings_of(target) or load_settings()
    if info is not None:
        # The server accepts feedback only on runs in the store, and this run may have made no call yet.
        emit(info, project=settings.project)
    link = Link(target, name, math.ceil(time.time() + expires_s))
    return url_of(link, address_of(settings, base_url), secret_of(settings), settings.project)


def url_of(link: Link, address: str, secret: bytes, project: str) -> str:
    """Return the URL of a feedback link: `address` is the feedback server's, and `secret` and `project` sign it."""
    query = {"trajectory": link.trajectory_id, "name": link.name, "expires": str(link.expires_at)}
    return f"{address}{PATH}?{urlencode(query | {'signature': signature_of(link, secret, project)})}"


def signature_of(link: Link, secret: bytes, project: str) -> str:
    """Return the signature of a feedback link as URL-safe base64, for the parameter `signature`."""
    # As JSON and not joined by a separator, because an id could hold the separator. With the project's name: projects
    # may share a secret, and a link of one must not be valid in another.
    signed = json.dumps([_PURPOSE, project, link.trajectory_id, link.name, link.expires_at])
    return base64.urlsafe_b64encode(hmac.digest(secret, signed.encode(), hashlib.sha256)).decode().rstrip("=")


def read_link(query: Iterable[tuple[str, str]], secret: bytes, project: str, *, now: float) -> tuple[Link, str]:
    """Return the permission in a link, given as query parameters; raises `Forged` or `Expired`."""
    pairs = list(query)
    given = dict(pairs)
    if len(given) < len(pairs):  # which of two values was signed is not known
        raise Forged
    try:
        link = Link(given["trajectory"], given["name"], int(given["expires"]))
        signature = given["signature"]
    except (KeyError, ValueError):
        # A missing part and a wrong signature look the same from outside.
        raise Forged from None
    expected = signature_of(link, secret, project)
    # As bytes, because `compare_digest` refuses texts beyond ASCII. Before the time is compared, because only a signed
    # time can be believed.
    if not hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode()):
        raise Forged
    if link.expires_at <= now:
        raise Expired
    return link, signature


def address_of(settings: Settings, base_url: str | None = None) -> str:
    """Return the server's address, without a final slash: `base_url`, the setting or the file; else `ConfigError`."""
    address = base_url or settings.feedback_base_url
    if address is None:
        with suppress(OSError):
            address = (settings.directory / _ADDRESS_FILE).read_text("utf-8").strip()
    if not address:
        raise ConfigError(
            "no feedback server is known; start `art-patch feedback serve` on this machine, or set "
            "ART_PATCH_FEEDBACK_BASE_URL to its public address"
        )
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"{address!r} is not an http(s) address; write it like https://feedback.example.com")
    return address.rstrip("/")


def say_address(settings: Settings, address: str) -> None:
    """Write the feedback server's address to a file, where the project's apps on this machine read it."""
    write_whole(settings.directory / _ADDRESS_FILE, f"{address}\n", replace=True)


def secret_of(settings: Settings) -> bytes:
    """Return the key that signs links: the setting, else the key file, made if missing; `ConfigError` if unsafe."""
    if settings.feedback_secret is not None:
        return settings.feedback_secret.encode()
    return made_key(settings.directory / _KEY_FILE).encode()
