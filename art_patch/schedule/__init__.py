"""Runs `art-patch retrain` on a schedule: texts for cron, systemd and Kubernetes. Pure.

`times` reads a schedule; `recipes` writes the texts. A schedule or a path that a text cannot express is refused with
`ConfigError` before anything is printed or installed.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.schedule.recipes import (
        Job,
        cron_job,
        cron_line,
        has_entry,
        systemd_units,
        variables_file,
        with_entry,
        without_entry,
    )
    from art_patch.schedule.times import parse_schedule
else:
    __getattr__ = lazily(
        __name__,
        {
            "recipes": "Job cron_job cron_line has_entry systemd_units variables_file with_entry without_entry",
            "times": "parse_schedule",
        },
    )
