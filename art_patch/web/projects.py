"""A project that a server shows, and what a page was asked for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from art_patch import feedback, insights
from art_patch.errors import NotFound
from art_patch.recording import Redactor
from art_patch.settings import Settings
from art_patch.store import Store
from art_patch.types import Correction, Score
from art_patch.web.access import Role

_T = TypeVar("_T")

log = logging.getLogger("art_patch.web")


def _unknown(_model: str) -> None:
    """Know no price."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line knows about the settings that its command got."""

    arguments: Collection[str] = ()  # names of the settings that were arguments
    env_file: Collection[str] = ()  # names of the variables that `--env-file` set
    of_options: Collection[str] = ()  # variables that options of commands read besides the settings
    prices: insights.Prices = _unknown  # of upstream
    gpu_usd_per_hour: float | None = None


_QUICK_S = 0.05  # a sum that took no longer is made again at once
_REST = 20  # a sum is fresh for at most so many times as long as it took
_LEAST_REST = 3  # and for at least so many times as long, so that it takes a quarter of a processor while calls come
_LOOK_S = 0.2  # for so long the store's marks are not read again
_SURE_S = 30.0  # after so long a sum is made again though no mark has moved: marks do not tell everything


@dataclass(frozen=True, slots=True)
class _Sum:
    value: Any
    made_at: float
    took_s: float
    marks: object  # of the store, before it was made

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.made_at

    def fresh_for_s(self, fresh_s: float) -> float:
        """Return for how long it is still fresh; not above 0 if it is not."""
        return max(_LEAST_REST * self.took_s, min(fresh_s, _REST * self.took_s)) - self.age_s


class Project:
    """A project with its settings and its open store, which threads share."""

    def __init__(self, settings: Settings, store: Store, given: Given | None = None) -> None:
        """Show this project."""
        self.name, self.settings, self.store, self.given = settings.project, settings, store, given or Given()
        self.on_renewed: Callable[[], None] = _nothing  # called when a sum was made again that pages show
        self._seen: tuple[float, object] = (0.0, None)  # when the store was looked at, and its marks
        self.alike: set[str] = set()  # groups whose siblings say the same: nobody is asked to compare them
        self._sums: dict[str, _Sum] = {}
        self._making: dict[str, threading.Lock] = {}
        self._lasting: set[str] = set()
        self._due: set[str] = set()  # names of the sums that `_make_after` will make
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._renewing = threading.Lock()  # one sum after the other: pages need the processor and the database, too

    def kept(self, name: str, fresh_s: float, make: Callable[[], _T]) -> _T:
        """Return what `make` returned at most `fresh_s` ago, or an older value while a new one is made.

        A page over a large store waits for its sums only if nobody has asked for them before. Where they are quick,
        they are made for each page. `on_renewed` is called when one was made later, so that open pages show it. Such a
        page asks once after each change. If the value that it gets is fresh, but was made before the change, it is made
        again as soon as it is not fresh any more. While nothing changes in the store, an old value is as good.
        """
        known, making = self._known(name)
        left_s = 0.0 if known is None else known.fresh_for_s(fresh_s)
        if known is not None and known.took_s > _QUICK_S:
            has_moved = known.marks != self._marks()
            if left_s > 0 and has_moved:
                self._make_after(left_s, name, make, making)
            elif left_s <= 0 and (has_moved or known.age_s > _SURE_S):
                self._make_soon(name, make, making)
            return known.value
        if known is not None and left_s > 0:
            return known.value
        with making:
            newer, _ = self._known(name)
            if newer is not None and newer is not known:  # another thread has made it meanwhile
                return newer.value
            return self._make(name, make)

    def kept_later(self, name: str, fresh_s: float, make: Callable[[], _T]) -> _T | None:
        """Return what `make` returned, however old; never wait: `None` until it was made once, in the background.

        Such a value outlives `forget`.
        """
        known, making = self._known(name)
        with self._lock:
            self._lasting.add(name)
        if known is None or known.age_s > fresh_s:
            self._make_soon(name, make, making, in_turn=False)  # the doctor may wait for an engine
        return None if known is None else known.value

    def keep_opinion(self, opinion: Score | Correction) -> None:
        """Store what a person says about a run; `NotFound` if the run is not there any more."""
        redact = self.settings.redact
        with self._writing:  # a store has one writer at a time
            is_known = feedback.keep_opinion(self.store, opinion, None if redact is None else Redactor(redact))
        if not is_known:
            raise NotFound(f"there is no run {opinion.trajectory_id!r} any more")

    def notice(self, marks: object) -> None:
        """Take notice of the store's marks: sums that were made with others are behind it."""
        self._seen = time.monotonic(), marks

    def forget(self) -> None:
        """Forget what was kept, after a change by this server."""
        with self._lock:
            self._sums = {name: one for name, one in self._sums.items() if name in self._lasting}

    def _marks(self) -> object:
        looked_at, marks = self._seen
        if marks is None or time.monotonic() - looked_at > _LOOK_S:
            self.notice(marks := self.store.changes.marks())
        return marks

    def _known(self, name: str) -> tuple[_Sum | None, threading.Lock]:
        with self._lock:
            return self._sums.get(name), self._making.setdefault(name, threading.Lock())

    def _make(self, name: str, make: Callable[[], _T]) -> _T:
        marks, began = self._marks(), time.monotonic()
        value = make()
        now = time.monotonic()
        with self._lock:
            self._sums[name] = _Sum(value, now, now - began, marks)
        return value

    def _make_after(self, delay_s: float, name: str, make: Callable[[], Any], making: threading.Lock) -> None:
        with self._lock:
            if name in self._due:
                return
            self._due.add(name)

        def run() -> None:
            with self._lock:
                self._due.discard(name)
            self._make_soon(name, make, making)

        timer = threading.Timer(delay_s, run)
        timer.daemon = True
        timer.start()

    def _make_soon(self, name: str, make: Callable[[], Any], making: threading.Lock, in_turn: bool = True) -> None:
        if making.acquire(blocking=False):
            threading.Thread(target=self._make_again, args=(name, make, making, in_turn), daemon=True).start()

    def _make_again(self, name: str, make: Callable[[], Any], making: threading.Lock, in_turn: bool) -> None:
        try:
            with self._renewing if in_turn else nullcontext():
                self._make(name, make)
            self.on_renewed()
        except Exception:  # the page has an older value; the next request tries again
            log.debug("%s could not be computed again", name, exc_info=True)
        finally:
            making.release()


class Query(BaseModel):
    """The parameters that a page takes from its address; a subclass names more of them."""

    model_config = ConfigDict(extra="ignore", frozen=True, str_max_length=4_000)


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
