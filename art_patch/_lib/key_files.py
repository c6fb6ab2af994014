"""Reads and writes API keys in files that only their owner can read; the store holds the name of a file, never a key.

Reading a key never blocks, and only regular files are read, because apps read a path that another program wrote into
the store. A file that cannot be read, is empty or can be read by other users raises a `ConfigError`.
"""

import os
import stat
from pathlib import Path

from art_patch._lib.atomic_files import write_whole
from art_patch.errors import ConfigError

ENGINE_KEY_FILE = "engine.key"
"""File in a project's directory: a copy of the `art-patch serve --api-key-file` key, which apps and the job read."""

ADMIN_KEY_FILE = "admin.key"
"""File in a project's directory: the key that a server without an API key requires for loading and unloading."""

_LONGEST = 4096


def read_key(key_file: str | Path | None) -> str | None:
    """Return the API key in a file, or `None` if `key_file` is `None`."""
    return None if key_file is None else _read(Path(key_file), None)


def engine_key(named: str | None, directory: Path, own: Path | None) -> str | None:
    """Return the API key with which to call the engine, or `None` if the engine needs none.

    The store names the file `named`; only `engine.key` in `directory` is accepted. A file that this process's settings
    name, `own`, is read instead.
    """
    if own is not None or named is None:
        return read_key(own)
    # The key is sent to the address of the route. A program that may write the store could name there any file of
    # the user as the key, so only `engine.key` in the project's directory is read, if this user or root owns it.
    path = directory / ENGINE_KEY_FILE
    if named not in (os.path.abspath(path), os.path.join(os.path.realpath(directory), ENGINE_KEY_FILE)):
        raise ConfigError(
            f"the store names the engine's key file {named!r:.300}, which is not {path}; if it is yours, set "
            "ART_PATCH_ENGINE_KEY_FILE to it, or serve again with this release, which keeps a copy there"
        )
    return _read(path, {os.geteuid(), 0})


def key_for_apps(key: str | None, directory: Path) -> str | None:
    """Write a copy of a server's API key, if it has one, to `engine.key`, and return that file's path for the store."""
    if key is None:
        return None
    write_whole(directory / ENGINE_KEY_FILE, f"{key}\n")
    return os.path.join(os.path.realpath(directory), ENGINE_KEY_FILE)


def _read(path: Path, owners: set[int] | None) -> str:
    """Read a key; `owners` are the ids of the users who may own the file, `None` any."""
    try:
        # Checked before the file is opened, because opening a device may do something, and again when it is open,
        # because another file may have taken its place.
        status, content = path.stat() if owners is None else path.lstat(), b""
        if stat.S_ISREG(status.st_mode):
            follow = 0 if owners is None else os.O_NOFOLLOW
            # O_NONBLOCK: a named pipe that took its place would block the app until somebody writes to it.
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | follow), "rb") as file:
                status, content = os.fstat(file.fileno()), file.read(_LONGEST + 1)
        key = content.decode().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the API key file {path}: {error.strerror}; make it readable for this user, or set "
            "ART_PATCH_ENGINE_KEY_FILE to the engine's key file"
        ) from None
    except ValueError:
        raise ConfigError(f"the API key file {path} is not text; put the key on its first line") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the API key file {path} is not a regular file; write the key into one, then: chmod 600")
    if owners is not None and status.st_uid not in owners:
        raise ConfigError(
            f"the API key file {path} belongs to another user; set ART_PATCH_ENGINE_KEY_FILE to a copy of your own"
        )
    if status.st_mode & 0o077:
        raise ConfigError(f"others may read the API key file {path}; run: chmod 600 {path}")
    if not key:
        raise ConfigError(f"the API key file {path} is empty; put the key on its first line")
    if len(content) > _LONGEST:
        raise ConfigError(f"the API key file {path} is longer than {_LONGEST} bytes; put the key alone into it")
    return key


def made_key(path: Path) -> str:
    """Return the API key in a file, which gets a random key if it is missing; racing processes return the same key."""
    if not path.exists():
        from secrets import token_urlsafe

        write_whole(path, f"{token_urlsafe(32)}\n", replace=False)
    return read_key(path) or ""


def admin_key(directory: Path) -> str | None:
    """Return the key in `admin.key`; `None` if the file cannot be read."""
    try:
        return read_key(directory / ADMIN_KEY_FILE)
    # Not an error: most work of the job changes no server, and a server that needs the key says so in its refusal.
    except (ConfigError, ValueError):
        return None
