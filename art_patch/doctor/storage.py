"""Checks of the store: the file, the filesystem below it, the database in it, the library that writes it."""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from art_patch.doctor.finding import Finding
from art_patch.store import WITH_TRAFFIC

MIB = 2**20

_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "beegfs", "gpfs", "glusterfs", "davfs"}
    | {"fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.blobfuse2"}
)
_SOUND_WAL = (3, 51, 3)
_LITTLE, _TOO_LITTLE = 1024 * MIB, 100 * MIB
_LONG_LOG = 64 * MIB

Mount = tuple[str, str]
"""Where, and which filesystem."""


def read_mounts() -> list[Mount]:
    """Return what is mounted; empty where the system does not tell."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return []
    # Blanks in a path are written as \040.
    return [(parts[1].encode().decode("unicode_escape"), parts[2]) for parts in map(str.split, lines) if len(parts) > 2]


def place(path: Path) -> Finding:
    """Whether the store's file and its directory can be written."""
    existing = _nearest(path.parent)
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        return Finding("store", "bad", f"{path} cannot be written", "check its owner and mode")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            "store",
            "bad",
            f"{path} cannot be written: {existing} is not a directory that this user may write",
            "check its owner and mode, or name another place with ART_PATCH_HOME",
        )
    if not path.exists():
        return Finding("store", "ok", f"{path} is not there yet; the first call makes it")
    # SQLite keeps them beside the file itself, wherever the path leads to.
    files = [Path(f"{path.resolve()}{suffix}") for suffix in WITH_TRAFFIC]
    if others := [str(file) for file in files if _mode(file) & 0o077]:
        return Finding(
            "store",
            "warn",
            f"others can read {', '.join(others)}, and your traffic is in there",
            f"chmod 600 {shlex.join(others)}",
        )
    return Finding("store", "ok", f"{path} can be written")


def filesystem(path: Path, mounts: Sequence[Mount]) -> Finding | None:
    """Whether the file lies on a filesystem that is shared over a network; `None` if nobody can tell."""
    here = str(_nearest(path.parent).resolve())
    over = [mount for mount in mounts if here == mount[0] or here.startswith(mount[0].rstrip("/") + "/")]
    if not over:
        return None
    where, kind = max(over, key=lambda mount: len(mount[0]))
    if kind in _NETWORK:
        return Finding(
            "filesystem",
            "bad",
            f"{kind} at {where}: SQLite's log needs memory that all writers share, which this filesystem lacks",
            "put the store on a local disk with ART_PATCH_HOME",
        )
    return Finding("filesystem", "ok", f"{kind}, local")


def disk(path: Path, free: Callable[[Path], int] = lambda place: shutil.disk_usage(place).free) -> Finding:
    """Whether there is room."""
    cure = "free some space; what cannot be written is kept in memory, then dropped"
    return _room(free(_nearest(path.parent)), "", cure)


def adapters(
    directory: Path,
    store: Path | None,
    free: Callable[[Path], int] = lambda place: shutil.disk_usage(place).free,
    device: Callable[[Path], object] = lambda place: place.stat().st_dev,
) -> Finding | None:
    """Whether there is room for policies; `None` if they lie on the store's disk, which `disk` looks at.

    Args:
        directory: of the adapters.
        store: the store's file; `None` if it is no file.
        free: bytes that are left at a place.
        device: tells disks apart.
    """
    place = _nearest(directory)
    if store is not None and device(place) == device(_nearest(store.parent)):
        return None
    cure = "free some space; `art-patch retrain` writes every policy there, and stops where it cannot"
    return _room(free(place), f" for adapters in {directory}", cure)


def _room(left: int, what: str, cure: str) -> Finding:
    shown = f"{left / 1024 / MIB:.1f} GiB free{what}"
    if left >= _LITTLE:
        return Finding("disk", "ok", shown)
    return Finding("disk", "bad" if left < _TOO_LITTLE else "warn", shown, cure)


def database(path: Path, head: str) -> list[Finding]:
    """Journal mode, schema and sizes; nothing if there is no file yet.

    Args:
        path: the file.
        head: the schema of this release.
    """
    if not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2.0)) as connection:
            journal = connection.execute("PRAGMA journal_mode").fetchone()[0]
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            known = "alembic_version" in tables
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone() if known else None
    except sqlite3.Error as error:
        return [
            Finding(
                "database",
                "bad",
                f"{path.name} cannot be read ({error})",
                "move the file away and start a new one, or restore a backup",
            )
        ]
    return [schema(row[0] if row else None, bool(tables), head), *_log(journal, path)]


def schema(revision: str | None, tables: bool, head: str) -> Finding:
    """Whether the tables are ours, and of this release."""
    if revision == head:
        return Finding("schema", "ok", f"{head}, this release's own")
    if revision is None and tables:
        return Finding("schema", "bad", "a database, but not a store of art_patch", "name another file")
    if revision is None or revision < head:
        return Finding("schema", "ok", f"{revision or 'empty'}; it becomes {head} when it is next opened")
    return Finding(
        "schema",
        "bad",
        f"{revision}, written by a newer release (this one knows {head})",
        "upgrade art-patch here, or name another store with ART_PATCH_STORE",
    )


def _log(journal: str, path: Path) -> list[Finding]:
    size, log = path.stat().st_size, _size(Path(f"{path}-wal"))
    text = f"{size / MIB:.1f} MiB, log {log / MIB:.1f} MiB, journal mode {journal}"
    if journal != "wal":
        return [Finding("database", "warn", text, "it becomes WAL when it is next opened; what else opens this file?")]
    if log > _LONG_LOG:
        cure = "somebody has been reading for long: close what holds the file open, then run `art-patch store vacuum`"
        return [Finding("database", "warn", text, cure)]
    return [Finding("database", "ok", text)]


def library(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> Finding:
    """Whether the SQLite library has the bug that may corrupt a file when two connections reset its log at once."""
    shown = ".".join(map(str, version))
    if version >= _SOUND_WAL:
        return Finding("sqlite", "ok", shown)
    return Finding(
        "sqlite",
        "warn",
        f"{shown}, older than {'.'.join(map(str, _SOUND_WAL))}, may corrupt a file that two programs write; "
        "our own processes lock each other out",
        "do not write to the store with other tools while an app runs",
    )


def _nearest(directory: Path) -> Path:
    """Return the directory, or what exists above it."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
