"""The functions that control the patch of this process: `patch()`, `wrap()`, `unpatch()`, `status()` and `flush()`.

The first `patch()` or `wrap()` decides the project of the process. A `wrap()` that names another project gives its
client a runtime of that project: settings, route, engine and record of its own.

A wrong argument raises `ConfigError`. A wrong environment variable raises nothing: that call of `patch()` changes
nothing, and `status().degraded` says so. It also names a failing store or engine, and an SDK of an unknown version.
"""

import inspect
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import wrapt

from art_patch._lib.faults import faults, logger
from art_patch._lib.lazy import uncollected
from art_patch.context import carry_threads_off, carry_threads_on
from art_patch.errors import ConfigError
from art_patch.patching.runtime import Runtime, Status
from art_patch.patching.sdk.bypass import detector
from art_patch.patching.sdk.integrations import Integrations
from art_patch.patching.sdk.wrapping import MODULE, Wrapping
from art_patch.recording import set_recorder
from art_patch.settings import Match, Redact, Settings, read_settings
from art_patch.store import absolute_url, without_password
from art_patch.types import Mode

T = TypeVar("T")

STOP_DEADLINE_S = 2.0


class Handle(AbstractContextManager["Handle"]):
    """The result of `patch()`. As a context manager it undoes the patch at the end of the block."""

    def unpatch(self) -> None:
        """Undo the patch, like `art_patch.unpatch()`."""
        unpatch()

    def __exit__(self, *_: object) -> None:
        """Undo the patch."""
        unpatch()


class _Process:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        # What all calls of `patch()` and `wrap()` have given so far, without defaults and environment; by the project
        # that `wrap()` named, or `None` for that of the process.
        self.given: dict[str | None, dict[str, Any]] = {}
        # The runtime outlives `unpatch()`, because streams that are still open end in it. `active` is `None` then.
        self.runtime: Runtime | None = None
        self.active: Runtime | None = None
        # The runtimes of the projects beside that of the process.
        self.beside: dict[str, Runtime] = {}
        # False while only the clients of `wrap()` are patched.
        self.everything = False
        # Connection pool of a client of `wrap()` -> its project, or "" for that of the process.
        self.pools = weakref.WeakKeyDictionary[Any, str]()
        self.wrapping = Wrapping(self.runtime_of)
        self.hooked = False
        self.integrations = Integrations(self._armed, self._broken)
        self.instrumented: dict[str, str] = {}
        self.refused: tuple[str, ...] = ()
        # Whether the settings in force come from `patch_around()`.
        self.by_launcher = False

    def runtime_of(self, client: Any) -> Runtime | None:
        """Return the runtime that handles the calls of `client`; `None` if they are not patched."""
        active = self.active
        if active is None or (self.everything and not self.beside):
            return active
        # By pool, because a copy of a client (`with_options`) shares the pool of the client it was made of.
        project = self.pools.get(client._client, "" if self.everything else None)
        return None if project is None else self.beside.get(project) if project else active

    def in_force(self) -> list[Runtime]:
        """Return the runtimes of all projects, that of the process first; after `unpatch()` those of before."""
        return [each for each in (self.runtime, *self.beside.values()) if each is not None]

    def facts(self, runtime: Runtime) -> dict[str, Any]:
        """Return the fields of `Status` for one project, except for `patched`."""
        return runtime.facts() | {
            "instrumented": tuple(self.instrumented.values()),
            "bypasses": detector.seen,
            "errors": faults.counts,
            "degraded": (*self.refused, *runtime.sentences()),
        }

    def _armed(self, framework: str) -> None:
        self.instrumented[framework] = f"integration {framework}"

    def _broken(self, framework: str, error: str) -> None:
        if self.runtime is not None:
            sentence = f"The integration for {framework} cannot be used ({error})."
            self.runtime.degraded[f"integration {framework}"] = sentence


_process = _Process()


def patch(
    *,
    project: str | None = None,
    home: str | os.PathLike[str] | None = None,
    store: str | None = None,
    mode: Mode | None = None,
    match: Match = None,
    sample_rate: float | None = None,
    learn: bool | None = None,
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
    spool_mib: int | None = None,
    flush_interval_s: float | None = None,
    poll_interval_s: float | None = None,
) -> Handle:
    """Route the calls of the OpenAI SDK to the champion, send them upstream if it fails, and record the calls.

    Call it before or after `import openai`. It may be called many times: a later call changes only the settings that it
    names. It has one project, home and store until `unpatch()`; `wrap()` gives a client another project. A setting that
    is not given comes from its `ART_PATCH_*` variable, then from its default. `Settings` documents each setting.

    Args:
        project: name of the project. Each project has its own traffic and policies, also in a shared store.
        home: directory that contains the directories of all projects.
        store: path or URL of a database, which projects may share. Default: a SQLite file in the project's directory.
        mode: `off`, `record`, `shadow`, `canary` or `route`. `art-patch mode` may overrule it while the app runs.
        match: the calls to patch: a glob of the model's name, `re:EXPRESSION`, or a function of the request body.
        sample_rate: share of trajectories that is recorded, 0 to 1.
        learn: `False` records all runs for operation only, as `trajectory(learn=False)` does for one.
        redact: `secrets` removes keys, tokens and passwords from texts before they are stored; a function from text to
            text removes what it chooses.

    Raises:
        ConfigError: if an argument has an impossible value, or the process belongs to another project, home or store.
    """
    _apply(dict(locals()), everything=True)
    return Handle()


def wrap(client: T, **settings: Any) -> T:
    """Patch one client and the copies made of it, and return it. All other clients stay as they are.

    A copy (`with_options`) is recognised by its connection pool, which it shares with the original. Therefore another
    client with the same `http_client` is patched too. `unpatch()` undoes it.

    With another `project`, this client's calls are recorded and routed in that project alone; the settings that are not
    given are those of the process, except for `base_url`.

    Args:
        client: an `OpenAI` or `AsyncOpenAI` client, or an instance of a subclass.
        settings: the settings of `patch()`. They apply to all clients of the project, not to this client only.

    Raises:
        ConfigError: as in `patch()`, if `client` is not a client of the OpenAI SDK, or if it, or another client with
            its `http_client`, has another project already.
    """
    from openai._base_client import BaseClient

    if not isinstance(client, BaseClient):
        raise ConfigError(f"wrap() takes a client of the OpenAI SDK, not {type(client).__name__}")
    unknown = settings.keys() - inspect.signature(patch).parameters.keys()
    if unknown:
        raise ConfigError(f"wrap() knows no {', '.join(sorted(unknown))}; it takes what patch() takes")
    with _process.lock:
        active, pool = _process.active, cast("Any", client)._client
        own = "" if active is None else active.settings.project
        has = _process.pools.get(pool)
        project = settings.get("project") or has or own
        beside = project if active is not None and project != own else None
        if has not in (None, beside or ""):
            raise ConfigError(f"this client, or one with its http_client, has project {has or own!r}, not {project!r}")
        _apply(settings, everything=_process.everything, beside=beside)
        _process.pools[pool] = beside or ""
    return cast("T", client)


def patch_around(**settings: Any) -> None:
    """Patch for a launcher; an app that patches itself later replaces project, home and store once."""
    _apply(settings, everything=True, lent=True)


def _apply(given: dict[str, Any], *, everything: bool, lent: bool = False, beside: str | None = None) -> None:
    given = {key: value for key, value in given.items() if value is not None}
    if "home" in given:
        given["home"] = Path(given["home"])
    with _process.lock:
        together = {**_process.given.get(beside, _process.given.get(None, {})), **given}
        if beside not in _process.given and "base_url" not in given:
            together.pop("base_url", None)  # the engine of another project
        settings, wrong = read_settings(**together)
        try:
            _process.integrations.wanted(settings.integrations)
        except ConfigError as error:
            # A name in the app's own code is the developer's mistake. A name in a variable may come from somebody else.
            if "integrations" in together:
                raise
            wrong = str(error)
        if wrong is not None:
            return _refuse(wrong)
        now = _process.active if beside is None else _process.beside.get(beside)
        if beside is None and now is None:
            _process.by_launcher = lent
        elif now is not None and not lent:
            _keep_place(now.settings, settings, may_move=_process.by_launcher and beside is None)
            _process.by_launcher = _process.by_launcher and beside is not None
        _process.given[beside], _process.refused = together, ()
        start(settings, everything=everything, beside=beside)


def _keep_place(now: Settings, wanted: Settings, *, may_move: bool) -> None:
    """Refuse settings that would move the process to another project, or a project to another home or store."""
    # First as they were given: the app may have changed its directory since.
    are_equal = (now.project, now.home, now.store) == (wanted.project, wanted.home, wanted.store)
    if are_equal or _place(now) == _place(wanted):
        return
    if may_move:
        logger.warning("art_patch: this app's own %s replaces %s", _named(wanted), _named(now))
        return
    raise ConfigError(
        f"{_named(now)} is patched, and {_named(wanted)} cannot replace it: patch() takes one project, and a project "
        "has one home and store. Give each client of another project to wrap(client, project=...), call unpatch() "
        "first, or give this client the address of an `art-patch proxy --project`"
    )


def _place(settings: Settings) -> tuple[str, Path, str]:
    return settings.project, settings.directory, absolute_url(settings.store_url)


def _named(settings: Settings) -> str:
    where = f"home {settings.directory.parent}" if settings.store is None else without_password(settings.store)
    return f"project {settings.project!r} ({where})"


def _refuse(wrong: str) -> None:
    # An app must not end because of a variable that somebody else has set, so this does not raise.
    sentence = f"{wrong}; mend it or unset it: until then art_patch.patch() does nothing."
    if _process.refused != (sentence,):
        _process.refused = (sentence,)
        logger.warning("art_patch: %s", sentence)


def start(settings: Settings, *, everything: bool = True, beside: str | None = None, **doubles: Any) -> Runtime:
    """Patch the SDK and return the runtime, a new one if `settings` changed. Tests pass stand-ins in `doubles`.

    `beside` names the project if it is not that of the process.
    """
    with _process.lock:
        if _process.active is None:
            _process.beside.clear()  # those of the time before `unpatch()`
        entries = _process.integrations.wanted(settings.integrations)
        runtime = _process.runtime if beside is None else _process.beside.get(beside)
        # An unchanged runtime is kept: its queue, breaker and pins go on across `unpatch()` and `patch()`.
        if runtime is None or runtime.settings != settings or doubles:
            if runtime is not None:
                runtime.stop(STOP_DEADLINE_S)
            with uncollected():
                runtime = Runtime(settings, facts=_process.facts, **doubles)
        runtime.shadow.resume()
        if beside is None:
            _process.runtime = _process.active = runtime
            _process.everything = everything
            (carry_threads_on if settings.carry_threads else carry_threads_off)()
        else:
            _process.beside[beside] = runtime
        active, recorders = _process.active, [each.recorder for each in _process.in_force()]
        # After `wrap()`, calls that an integration records are left out: they belong to no client.
        set_recorder(
            active.recorder if active and (everything or len(recorders) == 1) else None,
            lambda body: _process.everything and active is not None and active.wants(body),
            recorders,
        )
        with uncollected():
            _wrap(entries)
        detector.put_on(lambda: _process.active if _process.everything else None)
        return runtime


def _wrap(entries: Sequence[EntryPoint]) -> None:
    # While the module is being imported it is in `sys.modules` already. Then the hook wraps it when its import ends.
    if MODULE in sys.modules and hasattr(sys.modules[MODULE], "AsyncAPIClient"):
        _put_on(sys.modules[MODULE])
    elif not _process.hooked:
        _process.hooked = True
        wrapt.register_post_import_hook(_put_on, MODULE)
    _process.integrations.arm_when_imported(entries)


def _put_on(module: Any) -> None:
    if (runtime := _process.active) is None:
        return
    try:
        _process.wrapping.put_on(module)
        version = getattr(sys.modules.get("openai._version"), "__version__", "(unknown)")
        _process.instrumented["sdk"] = f"openai {version}"
    except Exception as error:
        faults.trouble("patching.wrap", error)
        runtime.degraded["sdk"] = "This version of the OpenAI SDK is not known; calls are not recorded nor routed."


def unpatch() -> None:
    """Restore the SDK's own functions, if it is patched, and write queued records for at most two seconds."""
    deadline = time.monotonic() + STOP_DEADLINE_S
    with _process.lock:
        stopped = _process.in_force() if _process.active is not None else []
        _process.active = None
        _process.given, _process.refused = {}, ()
        _process.by_launcher = _process.everything = False
        _process.pools.clear()
        set_recorder(None)
        _process.wrapping.take_off()
        carry_threads_off()
        detector.take_off()
        for runtime in stopped:
            runtime.stop(max(0.0, deadline - time.monotonic()))


def status() -> Status:
    """Return the state and the counts of the patch.

    After `unpatch()` the counts stay. A `patch()` with other settings starts the counts of calls at zero.
    """
    patched, runtimes = _process.active is not None, _process.in_force()
    found = [Status(patched=patched, **_process.facts(runtime)) for runtime in runtimes]
    if len(found) < 2:
        return found[0] if found else Status(errors=faults.counts, degraded=_process.refused)
    projects = {runtime.settings.project: each for runtime, each in zip(runtimes, found, strict=True)}
    counts = [name for name, value in found[0]._asdict().items() if type(value) is int]
    sums = {name: sum(getattr(each, name) for each in found) for name in counts}
    unrouted = sum((Counter(each.not_routed) for each in found), Counter[str]())
    others = (f"{name}: {said}" for name, each in [*projects.items()][1:] for said in each.degraded)
    return found[0]._replace(**sums, not_routed=unrouted, degraded=(*found[0].degraded, *others), projects=projects)


def flush(timeout_s: float = 5.0) -> bool:
    """Write all queued records, blocking the thread; return false if that took longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    flushed = [each.recorder.flush(max(0.0, deadline - time.monotonic())) for each in _process.in_force()]
    return all(flushed)
