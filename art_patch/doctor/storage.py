"""Checks for `art-patch doctor` of the store: SQLite file or PostgreSQL server, schema, and free space on the disks."""

import os
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from art_patch import store as stores
from art_patch.doctor.finding import Finding
from art_patch.errors import ConfigError

MIB = 2**20

_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "beegfs", "gpfs", "glusterfs", "davfs"}
    | {"fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.blobfuse2"}
)
_SOUND_WAL = (3, 51, 3)  # the first SQLite without the WAL-reset bug, which can corrupt a file with two writers
_LITTLE, _TOO_LITTLE = 1024 * MIB, 100 * MIB
_LONG_LOG = 64 * MIB
_MUCH_WAITS = 32 * MIB  # a process begins a new file of the spool after half of it
_LOOK = """
    SELECT current_setting('server_version'), current_schema(), pg_size_pretty(pg_database_size(current_database())),
           ARRAY(SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema())
"""
# When the newest call of a project began, and the base of its champion; `mark` is the driver's mark of a parameter.
FACTS = """
    SELECT (SELECT max(started_at) FROM calls WHERE project_id = projects.id),
      (SELECT base FROM policies WHERE project_id = projects.id AND state = 'champion')
    FROM projects WHERE name = {mark}
"""
Facts = tuple[float | None, str | None]
_NO_FACTS: Facts = (None, None)
_NAMES = "SELECT name FROM projects WHERE name IS NOT NULL ORDER BY id"

Mount = tuple[str, str]  # mount point, type of the filesystem


def read_mounts() -> list[Mount]:
    """Return the mount point and type of each mounted filesystem; an empty list on systems without `/proc`."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return []
    # The kernel writes a blank in a path as \040.
    return [(parts[1].encode().decode("unicode_escape"), parts[2]) for parts in map(str.split, lines) if len(parts) > 2]


def place(path: Path) -> Finding:
    """Check that the store's file and its directory can be written, and that others cannot read its files."""
    existing = _nearest(path.parent)
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        return Finding("store", "bad", f"{path} cannot be written", "check its owner and mode")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        text = f"{path} cannot be written: {existing} is not a directory that this user may write"
        cure = "check its owner and mode, or name another place with ART_PATCH_HOME"
        return Finding("store", "bad", text, cure)
    if not path.exists():
        # Not an error: recording makes the file, and its directories, when it writes for the first time.
        return Finding("store", "ok", f"{path} is not there yet; the first call makes it")
    # SQLite makes its other files beside the real file, wherever a link leads.
    files = [Path(f"{path.resolve()}{suffix}") for suffix in stores.WITH_TRAFFIC]
    if others := [str(file) for file in files if (status := _stat(file)) and status.st_mode & 0o077]:
        text = f"others can read {', '.join(others)}, and your traffic is in there"
        return Finding("store", "warn", text, f"chmod 600 {shlex.join(others)}")
    return Finding("store", "ok", f"{path} can be written")


def filesystem(path: Path, mounts: Sequence[Mount]) -> Finding | None:
    """Check that the store is not on a network filesystem, where SQLite's write-ahead log fails; `None` if unknown."""
    here = str(_nearest(path.parent).resolve())
    over = [mount for mount in mounts if here == mount[0] or here.startswith(mount[0].rstrip("/") + "/")]
    if not over:
        return None
    # Of nested mount points the longest is the one that holds the file.
    where, kind = max(over, key=lambda mount: len(mount[0]))
    if kind in _NETWORK:
        text = f"{kind} at {where}: SQLite's log needs memory that all writers share, which this filesystem lacks"
        return Finding("filesystem", "bad", text, "put the store on a local disk with ART_PATCH_HOME")
    return Finding("filesystem", "ok", f"{kind}, local")


def disk(path: Path, free: Callable[[Path], int] = lambda place: shutil.disk_usage(place).free) -> Finding:
    """Check the free space on the store's disk. `free` returns the free bytes of the disk that holds a path."""
    cure = "free some space; what cannot be written is kept in memory, then dropped"
    return _room(free(_nearest(path.parent)), "", cure)


def adapters(
    directory: Path,
    store: Path | None,
    free: Callable[[Path], int] = lambda place: shutil.disk_usage(place).free,
    device: Callable[[Path], object] = lambda place: place.stat().st_dev,
) -> Finding | None:
    """Check the free space on the disk with the adapters; `None` if it is the store's disk, which `disk` checks.

    `store` is the store's file, `None` for PostgreSQL; `device` returns the same for all paths on one disk.
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


def database(path: Path, head: str, project: str) -> list[Finding]:
    """Check journal mode, schema (this release's: `head`), projects and size of a SQLite store, if there is a file."""
    if not path.exists():
        return []
    try:
        # Read-only: the doctor must not make or migrate a store.
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2.0)) as connection:
            journal = connection.execute("PRAGMA journal_mode").fetchone()[0]
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            known = {"alembic_version", "projects"} <= tables  # before the first release there was no `projects`
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone() if known else None
            names = [name for (name,) in connection.execute(_NAMES)] if known else []
    except sqlite3.Error as error:
        cure = "move the file away and start a new one, or restore a backup"
        return [Finding("database", "bad", f"{path.name} cannot be read ({error})", cure)]
    return [schema(row[0] if row else None, bool(tables), head), *_unknown(project, names), *_log(journal, path)]


def schema(revision: str | None, tables: bool, head: str) -> Finding:
    """Check that this release, with the schema revision `head`, can open a store with this `revision`, or migrate it.

    `tables` tells whether the database has any tables.
    """
    if revision == head:
        return Finding("schema", "ok", f"{head}, this release's own")
    if revision is None and tables:
        return Finding("schema", "bad", "a database, but no store of a release of art_patch", "name another file")
    # Revisions are numbers with leading zeros, so their order as text is their order in time.
    if revision is None or revision < head:
        return Finding("schema", "ok", f"{revision or 'empty'}; it becomes {head} when it is next opened")
    text = f"{revision}, written by a newer release (this one knows {head})"
    cure = "upgrade art-patch here, or name another store with ART_PATCH_STORE"
    return Finding("schema", "bad", text, cure)


def _unknown(project: str, names: list[str]) -> list[Finding]:
    """Report that the store has other projects, and not this one."""
    if project in names or not names:
        return []
    shown = ", ".join(names[:20])
    cure = f"if the name is mistyped, say --project (ART_PATCH_PROJECT); else the first agent of {project!r} adds it"
    return [Finding("project", "warn", f"the store has no project {project!r}, but: {shown}", cure)]


def _log(journal: str, path: Path) -> list[Finding]:
    size, status = path.stat().st_size, _stat(Path(f"{path}-wal"))
    log = status.st_size if status else 0
    text = f"{size / MIB:.1f} MiB, log {log / MIB:.1f} MiB, journal mode {journal}"
    if journal != "wal":
        return [Finding("database", "warn", text, "it becomes WAL when it is next opened; what else opens this file?")]
    # SQLite cannot shorten the log while a reader still needs its oldest page.
    if log > _LONG_LOG:
        cure = "somebody has been reading for long: close what holds the file open, then run `art-patch store vacuum`"
        return [Finding("database", "warn", text, cure)]
    return [Finding("database", "ok", text)]


def library(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> Finding:
    """Check that the SQLite library is free of the bug that can corrupt a file with two writers."""
    shown = ".".join(map(str, version))
    if version >= _SOUND_WAL:
        return Finding("sqlite", "ok", shown)
    sound = ".".join(map(str, _SOUND_WAL))
    text = f"{shown}, older than {sound}, may corrupt a file that two programs write; "
    text += "our own processes lock each other out"
    return Finding("sqlite", "warn", text, "do not write to the store with other tools while an app runs")


def server(url: str, head: str, project: str) -> tuple[list[Finding], Facts]:
    """Check a store on a PostgreSQL server: whether the server can be reached, and its schema (`head`: this release's).

    Also return when the newest recorded call began, in seconds since the epoch (`None` without calls), and the base of
    the champion (`None` without one).
    """
    shown = stores.without_password(url)
    try:
        # A short timeout, unless the URL sets one: the report must come even if the server is down.
        parameters = {"connect_timeout": "3", "application_name": "art_patch doctor"} | stores.postgres_parameters(url)
        psycopg: Any = import_module("psycopg")
    except ConfigError as error:
        return [Finding("store", "bad", str(error))], _NO_FACTS
    except ImportError as error:
        return [Finding("store", "bad", stores.missing_driver(url, error))], _NO_FACTS
    facts, revision, names = _NO_FACTS, None, list[str]()
    try:
        with closing(psycopg.connect(**parameters, autocommit=True)) as connection:
            version, place, size, tables = connection.execute(_LOOK).fetchone()
            # Both: another program's database may use alembic, too.
            if {"alembic_version", "projects"} <= set(tables):
                revision = connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]
                facts = connection.execute(FACTS.format(mark="%s"), (project,)).fetchone() or facts
                names = [name for (name,) in connection.execute(_NAMES)]
    except psycopg.Error as error:
        words = " ".join(str(error).split())
        return [
            Finding("store", "bad", f"{shown} cannot be asked ({words})", "see that the server lets you in")
        ], _NO_FACTS
    text = f"{shown}, PostgreSQL {version}, schema {place}, {size}"
    return [Finding("store", "ok", text), schema(revision, bool(tables), head), *_unknown(project, names)], facts


def spool(directory: Path) -> Finding | None:
    """Check how many bytes of recorded calls wait for the store in the spool's directory; `None` if none do."""
    sizes = [status.st_size for path in directory.glob("*.*") if (status := _stat(path))]
    if not sizes:
        return None
    waits, files = sum(sizes), f"{len(sizes)} {'file' if len(sizes) == 1 else 'files'}"
    text = f"{waits / MIB:.1f} MiB in {files}, recorded calls that the store does not have yet"
    # A process that can write empties its files after a moment.
    if waits < _MUCH_WAITS:
        return Finding("spool", "ok", text)
    cure = "the store does not take them, or not as fast as they come: see `art-patch status`, and free its disk"
    return Finding("spool", "warn", text, cure)


def _nearest(directory: Path) -> Path:
    """Return the directory, or its nearest parent that exists."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
