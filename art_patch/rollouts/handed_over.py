"""A file of conversations that a script hands to its trainer, which goes when it was read, or at the next start.

The script holds the operating system's lock (`flock`) of its file for as long as it lives, however it ends. A file
whose lock is free was left by a script that was killed.
"""

import fcntl
import os
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = ".train-sft-"


@contextmanager
def handed_over(directory: Path, lines: Iterable[str]) -> Generator[Path]:
    """Yield a file in the directory with these lines, which only its owner can read; it is deleted after the block."""
    delete_left(directory)
    while True:
        with tempfile.NamedTemporaryFile("w", dir=directory, prefix=_PREFIX, suffix=".jsonl", delete=False) as file:
            path = Path(file.name)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if not os.fstat(file.fileno()).st_nlink:  # another script took it for one that was left
                    continue
                file.writelines(f"{line}\n" for line in lines)
                file.flush()
                yield path
                return
            finally:
                path.unlink(missing_ok=True)


def delete_left(directory: Path) -> None:
    """Delete the files of scripts that were killed."""
    for path in directory.glob(f"{_PREFIX}*.jsonl"):
        with suppress(OSError), open(path, "rb") as file:  # another script holds its lock, or has deleted it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
