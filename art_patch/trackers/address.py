"""How a tracker's address is named where others read it."""

from __future__ import annotations

from urllib.parse import urlsplit


def without_login(url: str) -> str:
    """Return the address without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in parts.netloc else url
