"""Keys live in files that only their owner can read; the store knows a file's name, never the key.

Reading one never blocks and reads nothing but a regular file: apps do it, of a path that somebody else has written.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from art_patch.errors import ConfigError

ENGINE_KEY_FILE = "engine.key"
"""In a project's directory: a copy of the key that `art-patch serve --api-key-file` was given, for apps and job."""

ADMIN_KEY_FILE = "admin.key"
"""In a project's directory: the key of whoever loads and unloads policies at a server that was given no other key."""

_LONGEST = 4096


def read_key(key_file: str | Path | None) -> str | None:
    """Return the key in the file, `None` if no file is named.

    Raises:
        ConfigError: if it cannot be read, is empty, or others may read it.
    """
    return None if key_file is None else _read(Path(key_file), None)


def engine_key(named: str | None, directory: Path, own: Path | None) -> str | None:
    """Return the key that the engine of a route asks for; it goes wherever the route leads.

    Whoever may write the store may write any path there, and other files of the project hold other secrets. So one
    file alone is read, `engine.key` in the project's directory, if it belongs to this user or to root.

    Args:
        named: the file that the store names; `None`: there is no key.
        directory: the project's.
        own: the file that this process's settings name (`engine_key_file`); it is read in place of the other.

    Raises:
        ConfigError: if the file is not to be read, or cannot be.
    """
    if own is not None or named is None:
        return read_key(own)
    path = directory / ENGINE_KEY_FILE
    if named not in (os.path.abspath(path), os.path.join(os.path.realpath(directory), ENGINE_KEY_FILE)):
        raise ConfigError(
            f"the store names the engine's key file {named!r:.300}, which is not {path}; if it is yours, set "
            "ART_PATCH_ENGINE_KEY_FILE to it, or serve again with this release, which keeps a copy there"
        )
    return _read(path, {os.geteuid(), 0})


def key_for_apps(key: str | None, directory: Path) -> str | None:
    """Put a copy of a server's key where `engine_key` looks, and return the file's name for the store.

    Raises:
        ConfigError: if the copy cannot be written.
    """
    if key is None:
        return None
    write_whole(directory / ENGINE_KEY_FILE, f"{key}\n", replace=True)
    return os.path.join(os.path.realpath(directory), ENGINE_KEY_FILE)


def _read(path: Path, owners: set[int] | None) -> str:
    try:
        # Looked at before it is opened, for opening a device may do something, and again when it is open.
        status = path.stat() if owners is None else path.lstat()
        if stat.S_ISREG(status.st_mode):
            follow = 0 if owners is None else os.O_NOFOLLOW
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | follow), "rb") as file:
                status, content = os.fstat(file.fileno()), file.read(_LONGEST + 1)
        else:
            content = b""
        key = content.decode().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read the API key file {path}: {error.strerror}; make it readable for this user, or set "
            "ART_PATCH_ENGINE_KEY_FILE to the engine's key file"
        ) from None
    except ValueError:
        raise ConfigError(f"the API key file {path} holds no text; put the key on its first line") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the API key file {path} is no regular file; write the key into one, then: chmod 600")
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
    """Return the key in the file; it is made if there is none, and the first of several that make it wins.

    Raises:
        ConfigError: if it cannot be made or read, or others may read it.
    """
    if not path.exists():
        from secrets import token_urlsafe

        write_whole(path, f"{token_urlsafe(32)}\n", replace=False)
    return read_key(str(path)) or ""


def admin_key(directory: Path) -> str | None:
    """Return the key that the project's servers ask for before they change; `None` if this user cannot read it.

    Not an error: most of what the job does changes no server, and a server says itself that it wants the key.
    """
    try:
        return read_key(str(directory / ADMIN_KEY_FILE))
    except (ConfigError, ValueError):
        return None


def write_whole(path: Path, text: str, *, replace: bool) -> None:
    """Write a file of ours alone, so that others see all of it or none; without `replace`, the first writer wins.

    Raises:
        ConfigError: if it cannot be written.
    """
    from secrets import token_hex

    draft = path.with_name(f".{path.name}.{os.getpid()}-{token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        try:
            if replace:
                draft.replace(path)
            else:
                os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); make {path.parent} writable") from None
