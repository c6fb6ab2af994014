"""Runs all checks of `art-patch doctor`, in the order of its report."""

import os
import sqlite3
import time
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from art_patch import serving
from art_patch import store as stores
from art_patch.doctor import engine, environment, storage
from art_patch.doctor.finding import Finding
from art_patch.errors import ConfigError, StoreError
from art_patch.patching import MODULE
from art_patch.pipeline import check_base
from art_patch.recording import spool_directory
from art_patch.settings import Settings
from art_patch.types import Route

_Check = Callable[[], Finding | list[Finding] | None]


def examine(
    settings: Settings, arguments: Collection[str], *, of_options: Collection[str], wrong: str | None = None
) -> tuple[list[Finding], dict[str, Any]]:
    """Run all checks; return their findings, and the value and the source of each setting.

    `arguments` are the settings given on the command line, `of_options` the variables that options of commands read
    besides the settings; `wrong` tells which variables `settings` ignores as invalid.
    """
    found = environment.sources(settings, arguments, os.environ)
    store, facts = _store(settings.store_url, settings.project)
    route, trouble = _route(settings.store_url, settings.project)
    file = None if stores.is_postgres(settings.store_url) else stores.sqlite_path(settings.store_url)
    cards, version = serving.gpus(), environment.installed_version
    # Functions and not results, so that this list reads like the report.
    checks: list[_Check] = [
        environment.python,
        lambda: environment.sdk(version, lambda: import_module(MODULE)),
        lambda: environment.patchers(version),
        lambda: environment.bypasses(version),
        lambda: environment.chosen(found),
        lambda: environment.mistaken(wrong),
        lambda: environment.strangers(os.environ, of_options),
        *store,
        lambda: storage.spool(spool_directory(settings)),
        lambda: storage.adapters(settings.adapters, file),
        lambda: trouble,
        lambda: engine.mode(settings.mode, found["mode"]["source"], route),
        lambda: engine.champion(route),
        # Whether the engine has a chat template from elsewhere, only `serve` knows.
        lambda: engine.base(facts()[1], partial(check_base, has_template=True)),
        lambda: engine.engine(route, settings.base_url, _connect(settings, 5.0)),
        # With the app's own deadline: an engine that is slower than this for eight tokens also loses the app's calls.
        lambda: engine.adapter(route, settings.base_url, _connect(settings, settings.timeout_s)),
        lambda: environment.gpu(cards),
        lambda: environment.vllm(lambda: serving.find_vllm(settings.vllm_python, settings.environments), cards),
        lambda: environment.judge(settings.judge, version),
        lambda: environment.libraries(version),
        lambda: engine.clock(time.time(), facts()[0]),
    ]
    findings: list[Finding] = []
    for check in checks:
        result = check()
        findings += result if isinstance(result, list) else [result] if result is not None else []
    return findings, found


def _store(url: str, project: str) -> tuple[list[_Check], Callable[[], storage.Facts]]:
    """Return the checks of the store, and a function that returns its newest call and its champion's base."""
    if stores.is_postgres(url):
        found, facts = storage.server(url, stores.HEAD, project)
        return [lambda: found], lambda: facts
    path = stores.sqlite_path(url)
    checks: list[_Check] = [
        lambda: storage.place(path),
        lambda: storage.filesystem(path, storage.read_mounts()),
        lambda: storage.database(path, stores.HEAD, project),
        storage.library,
        lambda: storage.disk(path),
    ]
    return checks, lambda: _facts(path, project)


def _route(url: str, project: str) -> tuple[Route | None, Finding | None]:
    try:
        return stores.read_route(url, project), None
    except (sqlite3.Error, OSError, ValueError, StoreError, ConfigError) as error:
        return None, Finding("route", "bad", f"the store's route cannot be read ({error})", "see the store above")


def _connect(settings: Settings, timeout_s: float) -> engine.Connect:
    return lambda base_url, key_file: serving.EngineClient.of_project(settings, base_url, key_file, timeout_s=timeout_s)


def _facts(path: Path, project: str) -> storage.Facts:
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2.0)) as connection:
            found: Any = connection.execute(storage.FACTS.format(mark="?"), (project,)).fetchone()
            return found or (None, None)
    except sqlite3.Error:  # there is no store; or it is damaged, and `storage.database` reports it
        return None, None
