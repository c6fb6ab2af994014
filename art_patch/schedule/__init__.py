"""Writes the configuration with which cron, systemd or Kubernetes runs `art-patch retrain` on a schedule. Pure.

If a crontab line, a systemd unit or a Kubernetes manifest cannot express a schedule or a path, `ConfigError` is raised
before anything is printed or installed.
"""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.schedule.recipes import (
        Job, cron_job, cron_line, parse_schedule, systemd_units, variables_file, with_entry, without_entry,
    )
else:
    __getattr__ = lazily()
