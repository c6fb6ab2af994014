"""Writes files and directories so that other processes see the complete content or none.

A draft is written beside the final place, flushed to disk and renamed. By default only the owner can read a new file
and the directory created for it, because most files quote what was recorded; an existing directory keeps its mode. If
something cannot be written, `replacing` raises an `OSError`, the others a `ConfigError`.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from art_patch.errors import ConfigError


def private(path: str, flags: int) -> int:
    """Opener for `open(..., opener=private)`: only the owner can read a new file; an existing file keeps its mode."""
    return os.open(path, flags, 0o600)


def _draft_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}")


@contextmanager
def replacing(
    target: Path, *, draft: Path | None = None, mode: int = 0o600, replace: bool = True
) -> Generator[BinaryIO]:
    """Yields a new binary file, which replaces `target` when the block ends. If the block raises, `target` stays.

    Args:
        target: path of the file to write; its directory must exist.
        draft: path of the unfinished file, in the directory of `target`; one that a killed process left is replaced.
            Without this argument each writer uses its own name, so several processes may write the same `target`.
        replace: false keeps an existing `target` and deletes the new file.
    """
    if draft is None:
        draft = _draft_of(target)
    else:
        draft.unlink(missing_ok=True)
    # O_EXCL: in a directory that others may write, a link of that name must not lead the data elsewhere.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a power cut could leave the name on an empty file
        if replace:
            take_place(draft, target)
        else:
            with suppress(FileExistsError):
                os.link(draft, target)  # a rename would replace the file of the first writer; a link fails instead
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str, *, replace: bool = True) -> None:
    """Writes a whole text file, and its directory. `replace=False` keeps an existing file, so the first writer wins."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(path, replace=replace) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); make {path.parent} writable") from None


@contextmanager
def placing(target: Path, *, mode: int = 0o700) -> Generator[Path]:
    """Yields a new directory of this mode, renamed to `target` when the block ends; deleted if the block raises."""
    import shutil  # costs milliseconds, for which an app that only reads key files need not wait

    empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if os.path.lexists(target) and not empty:
        raise ConfigError(f"{target} exists already and is not an empty directory; name another one")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = _draft_of(target)
        work.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error
    try:
        yield work
        for path in (*work.rglob("*"), work):
            path.chmod(mode if path.is_dir() else mode & 0o666)
            sync(path)
        try:
            take_place(work, target)  # an empty directory gives way, a full one does not
        except OSError as error:
            raise ConfigError(f"another process wrote {target} meanwhile ({error}); name another one") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def take_place(draft: Path, target: Path) -> None:
    """Renames a file or directory, which is on disk already, to its final name; the new name survives a power cut."""
    draft.replace(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flushes to disk the content of a file, or the list of names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
