"""What a framework's app left in the store, in a form that tests compare whole."""

from __future__ import annotations

from pathlib import Path

from art_patch.store import open_store
from art_patch.types import Trajectory
from tests.support.spooled import taken_over


def trajectories(url: str) -> list[Trajectory]:
    """All that is in a store and its spool, in the order it began."""
    taken_over(url)
    store = open_store(url, create=False)
    try:
        assert store.verify() == []
        return sorted(store.read.recent(limit=1000), key=lambda found: found.info.started_at)
    finally:
        store.close()


def store_url(folder: Path) -> str:
    """Of a store in `folder`."""
    return f"sqlite:///{folder}/store.db"


def tree(found: Trajectory) -> list[str]:
    """Steps and calls, one a line, two spaces a level; siblings by kind and name, as some run at once."""
    below: dict[str | None, list[tuple[str, str | None]]] = {}
    for span in found.spans:
        below.setdefault(span.parent_id, []).append((f"{span.kind} {span.name}", span.id))
    for call in found.calls:
        below.setdefault(call.span_id, []).append((f"call {call.requested_model}", None))
    lines: list[str] = []

    def add(parent: str | None, depth: int) -> None:
        for line, own in sorted(below.pop(parent, ()), key=lambda each: (each[0], each[1] or "")):
            lines.append("  " * depth + line)
            if own is not None:
                add(own, depth + 1)

    add(None, 0)
    return lines + [f"LOST {line} below {parent}" for parent, each in below.items() for line, _ in each]
