"""A directory that appears whole or not at all: written beside its place, flushed to disk, then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from art_patch.errors import ConfigError


@contextmanager
def placing(target: Path) -> Generator[Path]:
    """Yield a new directory, readable by its owner alone, that takes the place of `target` when the block ends.

    If the block fails nothing is left.

    Raises:
        ConfigError: something is there already, or nothing can be written there.
    """
    if os.path.lexists(target) and not _is_empty_directory(target):
        raise ConfigError(f"{target} is there already and is no empty directory; name another one")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error
    try:
        yield work
        for path in (*work.iterdir(), work):
            _flush(path)
        try:
            work.rename(target)  # an empty directory gives way
        except OSError as error:
            raise ConfigError(f"{target} was written by somebody else meanwhile ({error}); name another one") from error
        _flush(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
