"""API keys live in files that only their owner can read; the store knows the file's name, never the key."""

from __future__ import annotations

from pathlib import Path

from art_patch.errors import ConfigError


def read_key(key_file: str | None) -> str | None:
    """Return the key in the file, `None` if no file is named.

    Raises:
        ConfigError: if it cannot be read, is empty, or others may read it.
    """
    if key_file is None:
        return None
    path = Path(key_file)
    try:
        mode, key = path.stat().st_mode, path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the API key file {path}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"others may read the API key file {path}; run: chmod 600 {path}")
    if not key:
        raise ConfigError(f"the API key file {path} is empty; put the key on its first line")
    return key
