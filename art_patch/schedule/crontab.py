"""The text of a crontab with our line in it, or without. Pure.

Ours stands between two comments that name the project's directory, so that each project has its own place and all else
stays as it was, to the byte. A crontab in which one of the two is missing is not touched: what belongs to us cannot be
told then.
"""

from __future__ import annotations

from art_patch.errors import ConfigError


def with_entry(crontab: str, directory: str, lines: str) -> str:
    """Return the crontab with these lines for the project, where its old ones stood, else at the end.

    Args:
        crontab: as it is.
        directory: the project's.
        lines: ending with a line break.

    Raises:
        ConfigError: our comments in it are damaged.
    """
    begin, end = _marks(directory)
    before, found, after = _parted(crontab, directory)
    if not found and before and not before.endswith("\n"):
        before += "\n"
    return f"{before}{begin}\n{lines}{end}\n{after}"


def without_entry(crontab: str, directory: str) -> str:
    """Return the crontab without the project's lines.

    Raises:
        ConfigError: our comments in it are damaged.
    """
    before, _, after = _parted(crontab, directory)
    return before + after


def has_entry(crontab: str, directory: str) -> bool:
    """Return whether the project has lines in it.

    Raises:
        ConfigError: our comments in it are damaged.
    """
    return _parted(crontab, directory)[1]


def _marks(directory: str) -> tuple[str, str]:
    return f"# >>> art-patch retrain {directory}", f"# <<< art-patch retrain {directory}"


def _parted(crontab: str, directory: str) -> tuple[str, bool, str]:
    """Return what comes before our lines, whether there are any, and what comes after."""
    lines = crontab.splitlines(keepends=True)
    begin, end = ([i for i, line in enumerate(lines) if line.rstrip("\r\n") == mark] for mark in _marks(directory))
    if not begin and not end:
        return crontab, False, ""
    if len(begin) != 1 or len(end) != 1 or begin[0] > end[0]:
        raise ConfigError(
            f"the comments around our line for {directory} in the crontab are damaged; "
            "take the line and both comments out with `crontab -e`, then try again"
        )
    return "".join(lines[: begin[0]]), True, "".join(lines[end[0] + 1 :])
