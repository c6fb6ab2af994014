"""What of a store, and of a project's directory, tells that something has changed, from the end of an index each."""

from __future__ import annotations

from collections.abc import Callable

from art_patch import pipeline
from art_patch.web.live import Marks
from art_patch.web.projects import Project


def marks_of(project: Project) -> Callable[[], Marks]:
    """Return the function that `Live` asks."""

    def look() -> Marks:
        paths = [project.settings.directory / name for name in (pipeline.RUNNING, "cycles", pipeline.LAST_RETRAIN)]
        files = [path.stat().st_mtime_ns if path.exists() else 0 for path in paths]
        marks = project.store.changes.marks()
        project.notice(marks)
        return marks | {"cycle": tuple(files)}

    return look
