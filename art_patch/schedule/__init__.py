"""When `art-patch retrain` runs by itself: a schedule and a job in, texts for cron, systemd and Kubernetes out. Pure.

`times` reads a schedule and writes it as each of the three wants it; `recipes` writes the crontab line, the units and
the manifest; `crontab` edits the text of a crontab; `variables` writes the file that holds settings and keys. Whatever
cannot be written faithfully is refused with `ConfigError` before anything is printed or installed.
"""

# pyright: reportUnusedImport=false
from __future__ import annotations

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.schedule.crontab import has_entry, with_entry, without_entry
    from art_patch.schedule.recipes import Job, cron_job, cron_line, systemd_units
    from art_patch.schedule.times import parse_schedule
    from art_patch.schedule.variables import variables_file
else:
    __getattr__ = lazily(
        __name__,
        {
            "crontab": "has_entry with_entry without_entry",
            "recipes": "Job cron_job cron_line systemd_units",
            "times": "parse_schedule",
            "variables": "variables_file",
        },
    )
