"""Writes the configuration with which cron, systemd or Kubernetes runs `art-patch retrain` on a schedule. Pure.

`times` parses a schedule, and `recipes` writes a crontab line, systemd units or a Kubernetes manifest. If one of these
cannot express a schedule or a path, `ConfigError` is raised before anything is printed or installed.
"""

from typing import TYPE_CHECKING

from art_patch._lib.lazy import lazily

if TYPE_CHECKING:
    from art_patch.schedule.recipes import (
        Job,
        cron_job,
        cron_line,
        systemd_units,
        variables_file,
        with_entry,
        without_entry,
    )
    from art_patch.schedule.times import parse_schedule
else:
    __getattr__ = lazily()
