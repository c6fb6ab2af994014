"""The file with settings and keys that a scheduled job reads: lines that `/bin/sh` and systemd read alike. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

_HEAD = """\
# Settings and keys of `art-patch retrain` when cron or systemd starts it. Readable by you alone; lines of NAME="value".
# The key of the judge's provider belongs here, too, for instance: OPENAI_API_KEY="..."
"""


def variables_file(variables: Mapping[str, str]) -> str:
    r"""Return the file's text.

    Values stand in double quotes, with a backslash before `"`, `\`, `$` and the backtick: the one way to write any
    value that both the shell and systemd's `EnvironmentFile` read back as it was.

    Args:
        variables: by name.
    """
    return _HEAD + "".join(f"{name}={_quoted(value)}\n" for name, value in sorted(variables.items()))


def _quoted(value: str) -> str:
    escaped = re.sub(r'(["\\$`])', r"\\\1", value)
    return f'"{escaped}"'
