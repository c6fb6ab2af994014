"""A project that a server shows, and what a page was asked for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from art_patch import feedback
from art_patch.errors import NotFound
from art_patch.recording import Redactor
from art_patch.settings import Settings
from art_patch.store import Store
from art_patch.types import Correction, Score
from art_patch.web.access import Role

_T = TypeVar("_T")

log = logging.getLogger("art_patch.web")


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line knows about the settings that its command got."""

    arguments: Collection[str] = ()  # names of the settings that were arguments
    env_file: Collection[str] = ()  # names of the variables that `--env-file` set
    of_options: Collection[str] = ()  # variables that options of commands read besides the settings


class Project:
    """A project with its settings and its open store, which threads share."""

    def __init__(self, settings: Settings, store: Store, given: Given | None = None) -> None:
        """Show this project."""
        self.name, self.settings, self.store, self.given = settings.project, settings, store, given or Given()
        self._kept: dict[str, tuple[float, Any]] = {}
        self._making: dict[str, threading.Lock] = {}
        self._lasting: set[str] = set()
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def kept(self, name: str, fresh_s: float, make: Callable[[], _T]) -> _T:
        """Return what `make` returned at most `fresh_s` ago; an older value while a new one is made in the background.

        So a page that sums up a large store waits for that sum once, when nobody has asked before.
        """
        with self._lock:
            made_at, value = self._kept.get(name, (-float("inf"), None))
            making = self._making.setdefault(name, threading.Lock())
        if time.monotonic() - made_at <= fresh_s:
            return value
        if made_at > -float("inf"):
            self._make_soon(name, make, making)
            return value
        with making:
            with self._lock:
                made_at, value = self._kept.get(name, (-float("inf"), None))
            if made_at == -float("inf"):  # else another thread has made it meanwhile
                value = make()
                self._keep(name, value)
            return value

    def kept_later(self, name: str, fresh_s: float, make: Callable[[], _T]) -> _T | None:
        """Return what `make` returned, however old; never wait: `None` until it was made once, in the background.

        Such a value outlives `forget`.
        """
        with self._lock:
            made_at, value = self._kept.get(name, (-float("inf"), None))
            making = self._making.setdefault(name, threading.Lock())
            self._lasting.add(name)
        if time.monotonic() - made_at > fresh_s:
            self._make_soon(name, make, making)
        return value

    def keep_opinion(self, opinion: Score | Correction) -> None:
        """Store what a person says about a run; `NotFound` if the run is not there any more."""
        redact = self.settings.redact
        with self._writing:  # a store has one writer at a time
            is_known = feedback.keep_opinion(self.store, opinion, None if redact is None else Redactor(redact))
        if not is_known:
            raise NotFound(f"there is no run {opinion.trajectory_id!r} any more")

    def forget(self) -> None:
        """Forget what was kept, after a change by this server."""
        with self._lock:
            self._kept = {name: one for name, one in self._kept.items() if name in self._lasting}

    def _make_soon(self, name: str, make: Callable[[], Any], making: threading.Lock) -> None:
        if making.acquire(blocking=False):
            threading.Thread(target=self._make_again, args=(name, make, making), daemon=True).start()

    def _keep(self, name: str, value: Any) -> None:
        with self._lock:
            self._kept[name] = time.monotonic(), value

    def _make_again(self, name: str, make: Callable[[], Any], making: threading.Lock) -> None:
        try:
            self._keep(name, make())
        except Exception:  # the page has an older value; the next request tries again
            log.debug("%s could not be computed again", name, exc_info=True)
        finally:
            making.release()


class Query(BaseModel):
    """The parameters that a page takes from its address; a subclass names more of them."""

    model_config = ConfigDict(extra="ignore", frozen=True, str_max_length=500)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a page was asked for: a project, the ids in its path, its query, and what the browser may do there."""

    project: Project
    ids: Mapping[str, str]
    query: Any  # the page's `Query`
    role: Role
    now: float

    @property
    def store(self) -> Store:
        """The project's store."""
        return self.project.store

    @property
    def settings(self) -> Settings:
        """The project's settings."""
        return self.project.settings
