"""All that one trainable model has on this machine: its project's store, its engine, its trainer.

The engine is the project's: one that runs already is joined, else `art-patch serve` is started, and ends with us. Only
one thread talks to the store, in the order in which it is asked, and no event loop waits for it.
"""

from __future__ import annotations

import asyncio
import getpass
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

from art_patch import errors
from art_patch._lib.key_files import engine_key
from art_patch.errors import ConfigError, EngineError, StoreError
from art_patch.policies import base_fingerprint, check_name, resolve_model_dir
from art_patch.promotion import ensure_loaded, promote, reject
from art_patch.rollouts import logs
from art_patch.rollouts.child import Child
from art_patch.rollouts.trainer import Trainer
from art_patch.rollouts.trajectory_group import TrajectoryGroup
from art_patch.rollouts.translate import translate
from art_patch.serving import EngineClient
from art_patch.settings import Settings
from art_patch.store import Store, open_store
from art_patch.types import JSON, Policy

T = TypeVar("T")

_AT_ONCE = 64
"""Trajectories written in one transaction."""


class ModelRuntime:
    """See the module. Methods that begin with `_` run on the store's thread."""

    def __init__(self, settings: Settings, name: str, base: str | None, engine: Mapping[str, str]) -> None:
        """Start nothing yet.

        Args:
            settings: of the project.
            name: of the model; its policies are `NAME@STEP`.
            base: model directory or Hugging Face id; `None` for a model that does not learn.
            engine: options of `art-patch serve`, for an engine that has to be started.
        """
        check_name(f"{name}@0")
        self.settings = settings
        self.name = name
        self._base = base
        self._options = dict(engine)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="art-patch-store")
        self._store: Store | None = None
        self._engine: Child | None = None
        self._address = ""
        self.environment = {"ART_PATCH_PROJECT": settings.project, "ART_PATCH_HOME": str(settings.directory.parent)}
        if settings.store is not None:  # not on a command line, where everybody can read its password
            self.environment["ART_PATCH_STORE"] = settings.store
        self.trainer = Trainer(self.environment, settings.directory / "train.log")
        self.who = _who()

    async def open(self) -> tuple[str, str | None]:
        """Open the store, and join the engine or start it.

        Returns:
            The engine's address, ending in `/v1`, and its key.

        Raises:
            ConfigError: the project serves another model, or an engine with other options is up.
            EngineError: the engine does not start.
        """
        return await self.run(self._open)

    async def champion(self) -> Policy:
        """Return who serves."""
        return await self.run(self._champion)

    async def open_store(self) -> None:
        """Open the store alone."""
        await self.run(self._open_store)

    async def keep(self, groups: Sequence[TrajectoryGroup], about: JSON, *, state: str) -> list[str]:
        """Write groups into the store, and return their ids.

        Args:
            groups: of rollouts; those of failures alone are left out.
            about: for the metadata of each trajectory.
            state: `scored`, to be trained on, or `spent`, never.
        """
        return await self.run(lambda: self._keep(groups, about, state))

    async def note(self, split: str, metrics: Mapping[str, float], *, step: int) -> None:
        """Add a line to the history."""
        directory, at = self.settings.directory, time.time()
        await self.run(lambda: logs.note(directory, step=step, split=split, metrics=metrics, at=at))

    async def forget(self, best_metric: str) -> list[str]:
        """Give up every policy but who serves, the base and the best by a metric, and delete their files.

        Returns:
            The names of those that were given up.
        """
        return await self.run(lambda: self._forget(best_metric))

    async def promote(self, name: str) -> None:
        """Let a policy serve again.

        Raises:
            StoreError: there is no such policy.
            TransitionError: it was given up.
            EngineError: the engine cannot serve it; the same policy serves as before.
        """
        await self.run(lambda: self._promote(name))

    async def ensure(self, name: str) -> None:
        """Have the engine serve a policy, and prove it.

        Raises:
            StoreError: there is no such policy.
            EngineError: the engine cannot serve it.
        """
        await self.run(lambda: self._ensure(name))

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function on the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def close(self) -> None:
        """End what was started here; twice does no harm."""
        self.trainer.close()
        if self._engine is not None:
            self._engine.stop()
        self._thread.shutdown(wait=True)
        if self._store is not None:
            self._store.close()

    # on the store's thread

    def _open_store(self) -> Store:
        if self._store is None:
            self.settings.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._store = open_store(self.settings.store_url, project=self.settings.project)
        return self._store

    def _open(self) -> tuple[str, str | None]:
        ledger, base = self._open_store().ledger, self._base or ""
        champion = ledger.champion()
        if champion is not None:
            self._check(champion, base)
        if self._engine is not None and self._engine.alive():
            return self._address, None  # registered again
        route = ledger.route()
        base_url = self.settings.base_url or route.base_url
        key = engine_key(route.key_file, self.settings.directory, self.settings.engine_key_file)
        if base_url is not None and champion is not None:
            with EngineClient(base_url, key) as engine:
                if engine.health():
                    if self._options:
                        given = ", ".join(sorted(self._options))
                        raise ConfigError(
                            f"an engine serves {champion.name} at {base_url} already, with its own options; stop it, "
                            f"or leave out: {given}"
                        )
                    return base_url, key
        self._address = self._start(base)
        return self._address, None

    def _start(self, base: str) -> str:
        options = [word for name, value in self._options.items() for word in (f"--{name.replace('_', '-')}", value)]
        arguments = ["serve", "--base", base, "--name", self.name, "--port", "0", "--json", *options]
        log = self.settings.directory / "serve.log"
        self._engine = Child("art_patch.rollouts.serving_process", arguments, self.environment, log)
        first = self._engine.read() or {}
        if "base_url" not in first:
            why = first.get("message") or self._engine.last_words()
            self._engine.stop()
            raise getattr(errors, first.get("error", ""), EngineError)(f"the engine did not start: {why}")
        return first["base_url"]

    def _check(self, champion: Policy, named: str) -> None:
        if champion.model != self.name:
            raise ConfigError(
                f"the project {self.settings.project!r} serves {champion.model!r} already, and has one model; "
                f"give {self.name!r} a project of its own"
            )
        base = resolve_model_dir(named)
        if str(base.absolute()) != champion.base and base_fingerprint(base) != champion.base_sha256:
            raise ConfigError(
                f"{champion.name} was trained on {champion.base}, which is not {named}; name that base, or give the "
                "model another project"
            )

    def _opened(self) -> Store:
        if self._store is None:
            raise ConfigError(f"{self.name} is not registered; call `await model.register(backend)` first")
        return self._store

    def _champion(self) -> Policy:
        champion = self._opened().ledger.champion()
        if champion is None:
            raise StoreError(f"nobody serves in the project {self.settings.project!r}; register the model again")
        return champion

    def _keep(self, groups: Sequence[TrajectoryGroup], about: JSON, state: str) -> list[str]:
        store, now = self._opened(), time.time()
        ids: list[str] = []
        for group in groups:
            if not group.trajectories:
                continue
            found = translate(group, about=about, held_out=state != "scored", at=now)
            for begin in range(0, len(found.records), _AT_ONCE):
                store.write(found.records[begin : begin + _AT_ONCE])
            store.ledger.add_groups([found.group], state=state, now=now)
            ids.append(found.group.id)
        return ids

    def _promote(self, name: str) -> None:
        ledger = self._opened().ledger
        if self._champion().name == name:
            return
        with self._proving(name) as engine:
            promote(ledger, engine, name, who=self.who, reason="gone back to by hand; no gate was asked")

    def _ensure(self, name: str) -> None:
        policy = self._opened().ledger.policy(name)
        if policy is None or (policy.path is None and policy.step):
            known = ", ".join(each.name for each in self._opened().ledger.policies() if each.path or not each.step)
            raise StoreError(f"there is no policy {name} in the project {self.settings.project!r}; there are: {known}")
        with self._proving(name) as engine:
            ensure_loaded(engine, name)

    def _proving(self, name: str) -> EngineClient:
        engine = EngineClient.of_route(self.settings, self._opened().ledger.route())
        if engine is None:
            raise EngineError(f"no engine serves this project, so {name} cannot be proven; register the model again")
        return engine

    def _forget(self, best_metric: str) -> list[str]:
        ledger = self._opened().ledger
        mine = [policy for policy in ledger.policies() if policy.model == self.name]
        left = [policy for policy in mine if policy.state == "retired" and policy.path]
        serves = self._champion()
        steps = [policy.step for policy in (*left, serves)]
        best = logs.best_step(self.settings.directory, best_metric, steps)
        gone = [policy for policy in left if policy.step != best]
        engine = EngineClient.of_route(self.settings, ledger.route())
        with engine or nullcontext():
            for policy in gone:
                reject(ledger, engine, policy.name, who=self.who, reason=f"not the best by {best_metric}; deleted")
        for policy in gone:
            check_name(policy.name)  # whoever may write the store writes names, and any path beside them
            shutil.rmtree(self.settings.adapters / policy.name, ignore_errors=True)
        return [policy.name for policy in gone]


def _who() -> str:
    try:
        return f"{getpass.getuser()} (by hand)"
    except (KeyError, OSError):  # a container without a passwd entry
        return "unknown (by hand)"
