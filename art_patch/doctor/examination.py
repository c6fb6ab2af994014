"""The whole examination, in the order of the report."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from art_patch.doctor import configuration, job, machine, packages, serving, storage
from art_patch.doctor.adapter import adapter
from art_patch.doctor.finding import Finding
from art_patch.doctor.server import server
from art_patch.errors import ConfigError, StoreError
from art_patch.patching import MODULE
from art_patch.serving import find_vllm, gpus
from art_patch.settings import Settings
from art_patch.store import is_postgres, read_route, sqlite_path
from art_patch.types import Route

_Check = Callable[[], Finding | list[Finding] | None]


def examine(
    settings: Settings,
    arguments: Collection[str],
    environment: Mapping[str, str] = os.environ,
    *,
    wrong: str | None = None,
) -> tuple[list[Finding], dict[str, Any]]:
    """Return all findings, and each setting with its source.

    Args:
        settings: what the app would run with.
        arguments: names of the settings that were given as arguments.
        environment: the variables.
        wrong: what is wrong with some of them, which `settings` goes without.
    """
    found = configuration.sources(settings, arguments, environment)
    store, last_call_at = _store(settings.store_url)
    route, trouble = _route(settings.store_url)
    file = None if is_postgres(settings.store_url) else sqlite_path(settings.store_url)
    cards = gpus()
    checks: list[_Check] = [
        packages.python,
        lambda: packages.sdk(packages.installed_version, lambda: import_module(MODULE)),
        lambda: packages.patchers(packages.installed_version),
        lambda: packages.bypasses(packages.installed_version),
        lambda: configuration.chosen(found),
        lambda: configuration.mistaken(wrong),
        lambda: configuration.strangers(environment),
        *store,
        lambda: storage.adapters(settings.adapters, file),
        lambda: trouble,
        lambda: configuration.owner(settings, route),
        lambda: serving.mode(settings.mode, found["mode"]["source"], route),
        lambda: serving.champion(route),
        lambda: serving.engine(route, settings.base_url, _connect(settings, 5.0)),
        # One that takes longer than this for eight tokens loses its calls to the provider as well.
        lambda: adapter(route, settings.base_url, _connect(settings, settings.timeout_s)),
        lambda: machine.gpu(cards),
        lambda: machine.vllm(lambda: find_vllm(settings.vllm_python, settings.environments), cards),
        lambda: job.judge(settings.judge, packages.installed_version),
        lambda: job.libraries(packages.installed_version),
        lambda: serving.clock(time.time(), last_call_at()),
    ]
    findings: list[Finding] = []
    for check in checks:
        result = check()
        findings += result if isinstance(result, list) else [result] if result is not None else []
    return findings, found


def _store(url: str) -> tuple[list[_Check], Callable[[], float | None]]:
    """Return the checks of the store, and what tells when the last call was recorded."""
    if is_postgres(url):
        found, last_call_at = server(url, _head())
        return [lambda: found], lambda: last_call_at
    path = sqlite_path(url)
    checks: list[_Check] = [
        lambda: storage.place(path),
        lambda: storage.filesystem(path, storage.read_mounts()),
        lambda: storage.database(path, _head()),
        storage.library,
        lambda: storage.disk(path),
    ]
    return checks, lambda: _last_call_at(path)


def _route(url: str) -> tuple[Route, Finding | None]:
    try:
        return read_route(url), None
    except (sqlite3.Error, OSError, ValueError, StoreError, ConfigError) as error:
        return Route(), Finding("route", "bad", f"the store's route cannot be read ({error})", "see the store above")


def _head() -> str:
    from art_patch.store import HEAD

    return HEAD


def _connect(settings: Settings, timeout_s: float) -> Callable[[str, str | None], serving.Engine]:
    def connect(base_url: str, key_file: str | None) -> serving.Engine:
        from art_patch.serving import EngineClient

        return EngineClient.of_project(settings, base_url, key_file, timeout_s=timeout_s)

    return connect


def _last_call_at(path: Path) -> float | None:
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2.0)) as connection:
            return cast("float | None", connection.execute("SELECT MAX(started_at) FROM calls").fetchone()[0])
    except sqlite3.Error:  # no store, or one that `database` has something to say about
        return None
