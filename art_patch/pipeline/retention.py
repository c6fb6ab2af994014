"""Deleting what is older, or more, than is kept, at the end of every cycle."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from art_patch.errors import ArtPatchError
from art_patch.pipeline.cycle_run import CycleConfig, Progress
from art_patch.store import Store


@contextmanager
def retention(store: Store, config: CycleConfig, progress: Progress, *, who: str, now: float | None) -> Generator[None]:
    """Delete what is older than is kept, when the block has ended.

    Also when it failed with an error of ours: a judge that is down for a month must not keep data for a month longer.
    """
    try:
        yield
    except ArtPatchError:
        prune(store, config, progress, who=who, now=now)
        raise
    prune(store, config, progress, who=who, now=now)


def prune(store: Store, config: CycleConfig, progress: Progress, *, who: str, now: float | None = None) -> None:
    """Delete what is older, or more, than is kept; nothing if the settings do not say."""
    if config.keep_days is None and config.keep_trajectories is None:
        return
    store.rights.prune(
        older_than_s=None if config.keep_days is None else config.keep_days * 86_400,
        keep=config.keep_trajectories,
        who=who,
        progress=lambda done, total: progress("prune", done, total),
        now=now,
    )
