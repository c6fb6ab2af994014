"""Writes what runs `art-patch retrain` by cron, systemd or Kubernetes; `ConfigError` if that cannot be said. Pure."""

from art_patch._lib.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from art_patch.schedule.recipes import (
        Job, cron_job, cron_line, parse_schedule, systemd_units, variables_file, with_entry, without_entry,
    )
else:
    __getattr__ = lazily()
