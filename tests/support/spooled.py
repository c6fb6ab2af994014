"""Stores that tests open by hand have what ended apps left in the spool, as after any command of `art-patch`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from art_patch.recording import take_over
from art_patch.settings import Settings
from art_patch.store import open_store
from art_patch.store.backends.sqlite import SqliteDatabase


def taken_over(url: str, *projects: str) -> None:
    """Write to a store what ended apps left in its spool: of these projects, or the usual one and the directory's."""
    for project in dict.fromkeys(projects or ("default", Path(url).parent.name)):
        with suppress(ValueError), ExitStack() as stack:  # the directory's name may be none of a project
            settings = Settings(store=url, project=project)
            opened = partial(open_store, url, project=project)
            take_over(settings, cache(lambda opened=opened, stack=stack: stack.enter_context(closing(opened()))))


@contextmanager
def whenever_opened() -> Iterator[None]:
    """Take over whenever this process opens a file that is a store."""
    begin, inside = SqliteDatabase.__init__, set[str]()

    def init(self: Any, url: str, **given: Any) -> None:
        if url not in inside:
            inside.add(url)
            try:
                taken_over(url, *filter(None, ("default", Path(url).parent.name, given.get("project"))))
            finally:
                inside.discard(url)
        begin(self, url, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqliteDatabase, "__init__", init)
        yield
