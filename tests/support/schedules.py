"""What cron and systemd make of a schedule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


def as_cron_does(line: str) -> str:
    """The command of a line: behind five fields, percent signs without their backslash."""
    command = line.split(maxsplit=5)[5]
    assert "%" not in command.replace("\\%", ""), "cron would break the line there"
    return command.replace("\\%", "%")


class Unit(NamedTuple):
    """A unit file."""

    name: str
    values: dict[tuple[str, str], list[str]]

    def one(self, section: str, key: str) -> str:
        (value,) = self.values[section, key]
        return value


def read_unit(path: Path) -> Unit:
    """Every line is a section, a comment or an assignment; systemd has no comments behind a value."""
    values: dict[tuple[str, str], list[str]] = {}
    section = ""
    for line in path.read_text().splitlines():
        if not line or line[0] in "#;":
            continue
        if found := re.fullmatch(r"\[(Unit|Service|Timer|Install)\]", line):
            section = found[1]
            continue
        found = re.fullmatch(r"([A-Z]\w+)=(.*[^\s\\]|)", line)
        assert found and section, f"{path.name}: {line!r}"
        assert " #" not in found[2], f"{path.name}: {line!r}"
        values.setdefault((section, found[1]), []).append(found[2])
    return Unit(path.name, values)
