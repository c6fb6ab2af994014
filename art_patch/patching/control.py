"""`patch()`, `wrap()`, `unpatch()`, `status()`, `flush()`: the process has one patch, and these switch it.

Mistakes in arguments raise `ConfigError`. A variable that says something impossible stops no app: the SDK is left as it
is. That, and what is down in production (no store, no engine, an SDK we do not know), shows in `status().degraded`.
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast

import wrapt

from art_patch._lib.faults import faults, logger
from art_patch._lib.gc_pause import uncollected
from art_patch.context import carry_threads_off, carry_threads_on
from art_patch.errors import ConfigError
from art_patch.patching.runtime import Runtime
from art_patch.patching.sdk.bypass import bypasses_seen, detector
from art_patch.patching.sdk.integrations import integrations
from art_patch.patching.sdk.wrapping import MODULE, Wrapping
from art_patch.recording import set_recorder
from art_patch.settings import Match, Redact, Settings, read_settings
from art_patch.store import absolute_url, without_password
from art_patch.types import JSON, Mode

T = TypeVar("T")

STOP_DEADLINE_S = 2.0
REPORT_EVERY_S = 10.0
REPORT_AT_LEAST_EVERY_S = 60.0


_HOST = socket.gethostname()


class Status(NamedTuple):
    """What the patch is doing.

    Attributes:
        patched: whether `patch()` is in force.
        mode: the mode in force; the store may overrule the app's own.
        champion: policy that serves.
        challenger: policy that is tested beside it.
        challenger_state: `shadow`, it is asked in the background, or `canary`, it answers a share of the sessions.
        base_url: address of its engine.
        recorded: calls that the store has taken.
        dropped: records that did not fit the queue.
        served_by_policy: recorded calls that a policy answered.
        fallbacks: recorded calls that were meant for a policy and answered by upstream.
        shadowed: answers in the background, of the champion in mode `shadow` and of a challenger in state `shadow`.
        shadow_skipped: calls that they were not asked because the budget was spent or too many were waiting.
        shadow_failed: calls that they were asked and did not answer.
        instrumented: the SDK with its version, and the integrations that were armed.
        bypasses: how many calls went around the patch, by the way that they took, as far as we can see.
        errors: our own faults and the store's troubles, counted by place.
        degraded: what does not work right now, in plain sentences.
    """

    patched: bool = False
    mode: Mode = "off"
    champion: str | None = None
    challenger: str | None = None
    challenger_state: Literal["shadow", "canary"] | None = None
    base_url: str | None = None
    recorded: int = 0
    dropped: int = 0
    served_by_policy: int = 0
    fallbacks: int = 0
    shadowed: int = 0
    shadow_skipped: int = 0
    shadow_failed: int = 0
    instrumented: tuple[str, ...] = ()
    bypasses: Mapping[str, int] = MappingProxyType({})
    errors: Mapping[str, int] = MappingProxyType({})
    degraded: tuple[str, ...] = ()


class Handle:
    """What `patch()` returns: leave it alone, or use it as a context manager to undo the patch."""

    def unpatch(self) -> None:
        """Undo the patch."""
        unpatch()

    def __enter__(self) -> Self:
        """Do nothing; the patch is in force already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo the patch."""
        unpatch()


class _Reporter:
    """Writes `status()` into the store when it has changed, so that `art-patch status` sees every process."""

    def __init__(self) -> None:
        self._last: tuple[float, JSON] = (float("-inf"), {})

    def report(self, runtime: Runtime) -> None:
        """Called by the recorder's thread."""
        from art_patch.types import AppReport

        now, facts = time.monotonic(), _facts(runtime)
        age_s = now - self._last[0]
        if age_s < REPORT_EVERY_S or (facts == self._last[1] and age_s < REPORT_AT_LEAST_EVERY_S):
            return
        self._last = (now, facts)
        runtime.recorder.put_record(AppReport(f"{_HOST}:{os.getpid()}", time.time(), facts))


class _Process:
    """The state of this process. The runtime outlives `unpatch()`, because open streams still end in it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.given: dict[str, Any] = {}
        self.runtime: Runtime | None = None
        self.active: Runtime | None = None
        self.everything = False
        self.pools: weakref.WeakSet[Any] = weakref.WeakSet()
        self.wrapping = Wrapping(self.runtime_of)
        self.hooked = False
        self.installed: dict[str, EntryPoint] | None = None
        self.armed: set[str] = set()
        self.instrumented: dict[str, str] = {}
        self.reporter = _Reporter()
        self.refused: tuple[str, ...] = ()
        self.by_launcher = False

    def runtime_of(self, client: Any) -> Runtime | None:
        """Return what handles the calls of `client`; `None` if they are none of ours."""
        return self.active if self.everything or client._client in self.pools else None


_process = _Process()


def patch(
    *,
    project: str | None = None,
    home: str | os.PathLike[str] | None = None,
    store: str | None = None,
    mode: Mode | None = None,
    match: Match = None,
    sample_rate: float | None = None,
    canary_percent: float | None = None,
    shadow_rate: float | None = None,
    shadow_per_minute: int | None = None,
    base_url: str | None = None,
    timeout_s: float | None = None,
    first_token_timeout_s: float | None = None,
    connect_timeout_s: float | None = None,
    stateless_responses: bool | None = None,
    redact: Redact = None,
    otel: Literal["auto", "off"] | None = None,
    carry_threads: bool | None = None,
    integrations: Literal["auto", "off"] | Sequence[str] | None = None,
    queue_mib: int | None = None,
    flush_interval_s: float | None = None,
    poll_interval_s: float | None = None,
) -> Handle:
    """Route the OpenAI SDK's calls to the champion, fall back to upstream, record both.

    Before or after `import openai`, once or many times; another call updates the settings that it gives. A process has
    one project, one home and one store, until `unpatch()`. What is not given comes from `ART_PATCH_*` variables, then
    from the defaults of `Settings`, which says more on each.

    Args:
        project: keeps agents apart; each has its own store and policies.
        home: directory of all projects.
        store: database URL.
        mode: `off`, `record`, `shadow`, `canary` or `route`; the store may overrule it while the app runs.
        match: which calls are ours: a glob of the model's name, `re:EXPRESSION`, or a function of the request's body.
        sample_rate: share of trajectories that is recorded.
        canary_percent: share of sessions that the champion answers in mode `canary`.
        shadow_rate: share of calls that the champion is asked too in mode `shadow`.
        shadow_per_minute: budget of mode `shadow`.
        base_url: address of the engine; the store knows it unless given.
        timeout_s: how long the champion may keep a caller waiting for a whole answer, or for the next chunk.
        first_token_timeout_s: how long the champion may take for the first chunk of a stream.
        connect_timeout_s: how long connecting to the engine may take.
        stateless_responses: Responses calls that leave `store` unset may be routed too.
        redact: what is taken out of texts before they are written: `secrets`, or a function from text to text.
        otel: `off` emits no spans.
        carry_threads: threads take the surrounding trajectory along.
        integrations: `off`, or the import names of the frameworks that tell of their runs; all that are installed
            unless given.
        queue_mib: how much may wait to be written.
        flush_interval_s: how long the writer collects.
        poll_interval_s: how often the store is asked for changes.

    Raises:
        ConfigError: if an argument says something impossible, or the process has another project, home or store. Where
            a variable says something impossible, the SDK is left as it is.
    """
    _apply(dict(locals()), everything=True)
    return Handle()


def wrap(client: T, **settings: Any) -> T:
    """Patch one client only, and the copies made of it; all others stay as they are. Returns the client.

    A copy (`with_options`) is known by the connection pool that it shares, so another client to which the app gave the
    same `http_client` is patched along. After `patch()` this changes nothing, because every client is ours already.
    `unpatch()` undoes it.

    Args:
        client: an `OpenAI` or `AsyncOpenAI` client, or one of a subclass.
        settings: as in `patch()`; the process has one set of them.

    Raises:
        ConfigError: as `patch()` does, and if `client` is no client of the OpenAI SDK.
    """
    from openai._base_client import BaseClient

    if not isinstance(client, BaseClient):
        raise ConfigError(f"wrap() takes a client of the OpenAI SDK, not {type(client).__name__}")
    unknown = settings.keys() - inspect.signature(patch).parameters.keys()
    if unknown:
        raise ConfigError(f"wrap() knows no {', '.join(sorted(unknown))}; it takes what patch() takes")
    with _process.lock:
        _apply(settings, everything=_process.everything)
        _process.pools.add(cast(Any, client)._client)
    return cast(T, client)


def patch_around(**settings: Any) -> None:
    """`patch()` by a program of ours that runs an app: whatever the app's project is, and the app may change it once.

    For `art-patch run`, whose variables the app's own arguments win over, and for runs that the job repeats elsewhere.
    """
    _apply(settings, everything=True, lent=True)


def _apply(given: dict[str, Any], *, everything: bool, lent: bool = False) -> None:
    given = {key: value for key, value in given.items() if value is not None}
    if "home" in given:
        given["home"] = Path(os.fspath(given["home"]))
    with _process.lock:
        together = {**_process.given, **given}
        settings, wrong = read_settings(**together)
        try:
            _wanted(settings)
        except ConfigError as error:
            if "integrations" in together:
                raise
            wrong = str(error)
        if wrong is not None:
            _refuse(wrong)
            return
        if _process.active is None:
            _process.by_launcher = lent
        elif not lent:
            _keep_place(_process.active.settings, settings)
            _process.by_launcher = False
        _process.given, _process.refused = together, ()
        start(settings, everything=everything)


def _keep_place(now: Settings, wanted: Settings) -> None:
    """See that the process stays with its project, home and store; another project's calls would be mixed into it.

    Raises:
        ConfigError: it would not.
    """
    if (now.project, now.home, now.store) == (wanted.project, wanted.home, wanted.store):
        return  # as they were given: the app may have changed its directory since
    if _place(now) == _place(wanted):
        return
    if _process.by_launcher:
        logger.warning("art_patch: this app's own %s replaces %s", _named(wanted), _named(now))
        return
    raise ConfigError(
        f"this process belongs to {_named(now)} and cannot take {_named(wanted)}, too: a process has one project, home "
        "and store. Run a process for each project, call unpatch() first, or give this client the address of an "
        "`art-patch proxy --project`"
    )


def _place(settings: Settings) -> tuple[str, Path, str]:
    return settings.project, settings.directory, absolute_url(settings.store_url)


def _named(settings: Settings) -> str:
    where = f"home {settings.directory.parent}" if settings.store is None else without_password(settings.store)
    return f"project {settings.project!r} ({where})"


def _refuse(wrong: str) -> None:
    """Leave everything as it is, and say so once: an app must not end for a variable that somebody else has set."""
    sentence = f"{wrong}; mend it or unset it: until then art_patch.patch() does nothing."
    if _process.refused != (sentence,):
        _process.refused = (sentence,)
        logger.warning("art_patch: %s", sentence)


def start(settings: Settings, *, everything: bool = True, **doubles: Any) -> Runtime:
    """Put the patch in force with `settings`; `doubles` are handed to `Runtime` (tests)."""
    with _process.lock:
        entries = _wanted(settings)
        runtime = _process.runtime
        if runtime is None or runtime.settings != settings or doubles:
            if runtime is not None:
                runtime.stop(STOP_DEADLINE_S)
            with uncollected():
                runtime = _process.runtime = Runtime(settings, on_tick=_process.reporter.report, **doubles)
        runtime.shadow.resume()
        _process.active = runtime
        _process.everything = everything
        set_recorder(runtime.recorder, lambda body: _process.everything and runtime.wants(body))
        with uncollected():
            _wrap(entries)
        (carry_threads_on if settings.carry_threads else carry_threads_off)()
        detector.put_on(lambda: _process.active if _process.everything else None)
        return runtime


def _wanted(settings: Settings) -> list[EntryPoint]:
    """Return the integrations that are asked for and not armed yet."""
    asked = settings.integrations
    if asked == "off":
        return []
    if _process.installed is None:
        _process.installed = {entry.name: entry for entry in integrations()}
    installed = _process.installed
    missing = [name for name in asked if name not in installed] if asked != "auto" else []
    if missing:
        known = ", ".join(sorted(installed)) or "none"
        raise ConfigError(
            f"integrations: none is installed for {', '.join(missing)}; there are those for: {known}. Install the "
            "package that brings it, or leave `integrations` (ART_PATCH_INTEGRATIONS) unset"
        )
    return [installed[name] for name in (installed if asked == "auto" else asked) if name not in _process.armed]


def _wrap(entries: Sequence[EntryPoint]) -> None:
    if MODULE in sys.modules and hasattr(sys.modules[MODULE], "AsyncAPIClient"):
        _put_on(sys.modules[MODULE])
    elif not _process.hooked:
        _process.hooked = True
        wrapt.register_post_import_hook(_put_on, MODULE)
    for entry in entries:
        _process.armed.add(entry.name)
        wrapt.register_post_import_hook(partial(_arm, entry), entry.name)


def _arm(entry: EntryPoint, module: Any) -> None:
    """Hand a framework that was just imported to its integration.

    Not by `wrapt.discover_post_import_hooks`, which loads every integration at once, whether its framework is used or
    not, and lets a broken one spoil the app's import.
    """
    try:
        entry.load()(module)
        _process.instrumented[entry.name] = f"integration {entry.name}"
    except Exception as error:
        faults.trouble("integrations", error)
        if _process.runtime is not None:
            _process.runtime.degraded[f"integration {entry.name}"] = (
                f"The integration for {entry.name} cannot be used ({type(error).__name__})."
            )


def _put_on(module: Any) -> None:
    runtime = _process.active
    if runtime is None:
        return
    try:
        _process.wrapping.put_on(module)
        _process.instrumented["sdk"] = (
            f"openai {getattr(sys.modules.get('openai._version'), '__version__', '(unknown)')}"
        )
    except Exception as error:
        faults.trouble("patching.wrap", error)
        runtime.degraded["sdk"] = "This version of the OpenAI SDK is not known; calls are not recorded nor routed."


def unpatch() -> None:
    """Restore the SDK's own functions and write what is queued, waiting at most two seconds. Nothing if not patched."""
    with _process.lock:
        runtime, _process.active = _process.active, None
        _process.given = {}
        _process.refused = ()
        _process.by_launcher = False
        _process.everything = False
        _process.pools.clear()
        set_recorder(None)
        _process.wrapping.take_off()
        carry_threads_off()
        detector.take_off()
        if runtime is not None:
            runtime.stop(STOP_DEADLINE_S)


def status() -> Status:
    """Return what the patch is doing; after `unpatch()` the counts stay until the next `patch()`."""
    runtime = _process.runtime
    if runtime is None:
        return Status(errors=faults.counts, degraded=_process.refused)
    return Status(patched=_process.active is not None, **_facts(runtime))


def _facts(runtime: Runtime) -> dict[str, Any]:
    recorder, target, shadow = runtime.recorder, runtime.target, runtime.shadow
    return {
        "mode": target.mode,
        "champion": target.champion,
        "challenger": target.challenger,
        "challenger_state": target.challenger_state,
        "base_url": target.base_url,
        "recorded": recorder.counts.recorded,
        "dropped": recorder.dropped,
        "served_by_policy": recorder.counts.served_by_policy,
        "fallbacks": recorder.counts.fallbacks,
        "shadowed": shadow.asked,
        "shadow_skipped": shadow.skipped,
        "shadow_failed": shadow.failed,
        "instrumented": tuple(_process.instrumented.values()),
        "bypasses": bypasses_seen(),
        "errors": faults.counts,
        "degraded": (*_process.refused, *runtime.sentences()),
    }


def flush(timeout_s: float = 5.0) -> bool:
    """Write what is queued; false if that took longer than `timeout_s`. Blocks: not for an event loop."""
    runtime = _process.runtime
    return True if runtime is None else runtime.recorder.flush(timeout_s)
