"""What `art-patch cron` changes on the machine: the user's crontab, units of their systemd, one file of settings."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from art_patch.errors import ConfigError

_EMPTY = ("no crontab for", "no such file")
"""What `crontab -l` says of a user without one (Debian's and cronie's; busybox's)."""


def has_crontab() -> bool:
    """Whether there is a `crontab` command."""
    return shutil.which("crontab") is not None


def read_crontab() -> str:
    """Return the user's crontab.

    Raises:
        ConfigError: there is no such command, or it refuses. What it could not read is never written over.
    """
    done = _crontab("-l")
    if done.returncode == 0:
        return done.stdout
    if any(words in done.stderr.lower() for words in _EMPTY):
        return ""
    raise ConfigError(f"`crontab -l` failed: {done.stderr.strip() or f'exit code {done.returncode}'}; nothing changed")


def write_crontab(text: str) -> None:
    """Make the text the user's crontab.

    Raises:
        ConfigError: `crontab` refuses it; it keeps the old one then.
    """
    done = _crontab("-", given=text)
    if done.returncode != 0:
        raise ConfigError(f"`crontab` refused the new table: {done.stderr.strip()}; the old one stays")


def unit_directory() -> Path:
    """Return where the user's own units live."""
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(configured) if configured.startswith("/") else Path.home() / ".config") / "systemd/user"


def write_units(directory: Path, units: Mapping[str, str]) -> list[str]:
    """Write the units, each whole or not at all, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in units.items():
        beside = directory / f".{name}.new"
        beside.write_text(text)
        beside.replace(directory / name)
    return [str(directory / name) for name in units]


def write_new(path: Path, text: str) -> bool:
    """Write the file, readable by its owner alone; return false if there is one, which stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return True


def _crontab(*words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("crontab")
    if program is None:
        raise ConfigError("there is no `crontab` command on this machine; install cron, or use --systemd")
    return subprocess.run(
        [program, *words], input=given, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, check=False
    )
