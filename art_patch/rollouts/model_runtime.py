"""The store, the engine and the trainer that one registered model of a training script uses on this machine.

The methods of a registered model (`train`, `log`, `promote`, ...) do their work here. If an engine serves the project
already, it is used; otherwise `art-patch serve` is started, which ends together with this process.
"""

from __future__ import annotations

import asyncio
import functools
import getpass
import logging
import math
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from art_patch import errors, policies, promotion, serving
from art_patch._lib.ids import new_id
from art_patch.errors import ConfigError, EngineError, NotFound
from art_patch.rollouts import processes
from art_patch.rollouts.at_once import bar
from art_patch.rollouts.handed_over import delete_left
from art_patch.rollouts.history import best_step, check_numbers, metrics_of, note
from art_patch.rollouts.trajectory_group import TrajectoryGroup, content_of, translate
from art_patch.settings import Settings
from art_patch.store import Store, open_store
from art_patch.training import TrainConfig, require_evaluation
from art_patch.trajectories import exact_of
from art_patch.types import JSON, Policy

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

_RECORDS_A_WRITE = 64  # in one transaction; more would keep other writers of the store waiting

# Metrics of an update that are copied to the history and to a `TrainResult`.
_METRICS = (
    "loss", "kl_nats", "clip_fraction", "entropy_nats", "grad_norm", "trajectories", "tokens", "steps",
    "eval_loss", "eval_kl_nats", "eval_gain_nats",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of `TrainableModel.train`."""

    step: int  # of the policy that is champion after the call
    # Means of the groups' metrics, and the metrics of the update if one was made.
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    checkpoint_path: str | None = None  # adapter of the champion at the end of the update; `None` for the base model
    reason: str = ""  # why no update was made; empty if one was made

    @property
    def policy_loss(self) -> float | None:
        """The loss of the update, its KL term included; `None` if no update was made."""
        return self.metrics.get("loss")

    @property
    def kl_loss(self) -> float | None:
        """KL(policy at the start || trained policy) per token, in nats; `None` if no update was made."""
        return self.metrics.get("kl_nats")

    @property
    def avg_reward(self) -> float | None:
        """The mean reward of the rollouts; `None` without rollouts."""
        return self.metrics.get("reward")


def _on_store_thread(
    method: Callable[Concatenate[ModelRuntime, P], T],
) -> Callable[Concatenate[ModelRuntime, P], Coroutine[Any, Any, T]]:
    """Run a method on the runtime's one thread; the event loop that awaits it goes on."""

    @functools.wraps(method)
    async def called(runtime: ModelRuntime, *args: P.args, **kwargs: P.kwargs) -> T:
        return await runtime.on_store_thread(functools.partial(method, runtime, *args, **kwargs))

    return called


class ModelRuntime:
    """The store, the engine and the trainer of one model, with the work of the model's methods.

    Attributes:
        serves: name of the champion, to which requests are sent; empty until `open` was called.
        directory: the project's directory, in which the engine and the trainer write their logs.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        """Create the runtime, which opens nothing yet."""
        self.serves = ""
        self.directory = settings.directory
        self._settings, self._name = settings, name
        self._base: str | None = None  # of a model that is trained
        self._options: dict[str, str] = {}  # of `art-patch serve`
        self._token = new_id()  # a later runtime may have the `id` of this one
        # One thread talks to the store, in the order in which it is asked, so no event loop waits for a database.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="art-patch-store")
        self._closed = False
        self._store: Store | None = None
        self._engine: processes.ScriptChild | None = None
        self._address = ""
        self._environment = {"ART_PATCH_PROJECT": settings.project, "ART_PATCH_HOME": str(settings.directory.parent)}
        if settings.store is not None:  # never on a command line, where every user of the machine can read its password
            self._environment["ART_PATCH_STORE"] = settings.store
        self._trainer = processes.Trainer(self._environment, self.directory / "train.log")
        try:
            self._who = f"{getpass.getuser()} (by hand)"
        except (KeyError, OSError):  # a container without a passwd entry
            self._who = "unknown (by hand)"

    def start_with(self, options: Mapping[str, str]) -> None:
        """Set the options of `art-patch serve`; a `ConfigError` if an engine was started with others already."""
        if self._engine is not None and (other := {n: v for n, v in options.items() if self._options.get(n) != v}):
            raise ConfigError(
                f"{self._name} is registered already, and its engine was started with {self._options}, not with "
                f"{other}; close the backend first"
            )
        if self._engine is None:
            self._options = dict(options)

    async def on_store_thread(self, function: Callable[[], T]) -> T:
        """Run a function on the one thread that uses the store; raises a `ConfigError` after `close`."""
        if self._closed:
            raise not_registered(self._name)
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    @_on_store_thread
    def open(self, base: str) -> tuple[str, str | None]:
        """Open the store, start or join the engine, return its address and key; raises like `LocalBackend.register`."""
        policies.check_name(f"{self._name}@0")
        champion, joined = self._open_store().ledger.leader(), None
        if champion is not None:
            self._check_same_model(champion, base)
        if self._engine is None or self._engine.poll() is not None:  # else the model was registered before
            joined = None if champion is None else self._joined(champion)
            if joined is None:
                self._address = self._start(base)
        # After the start: `art-patch serve` writes the base model as champion of a new project, or as the learner.
        self._champion()
        self._base = base
        delete_left(self.directory)
        return joined or (self._address, None)

    async def train(
        self,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        verbose: bool = False,
        eval_groups: Iterable[TrajectoryGroup] = (),
    ) -> TrainResult:
        """Write the groups into the store and train on them in the trainer's process; see `TrainableModel.train`."""
        groups, evaluation, config = list(trajectory_groups), list(eval_groups), config or TrainConfig()
        require_evaluation(config, [group for group in evaluation if group.trajectories])
        # By identity: two rollouts may well say the same.
        learned = {id(trajectory) for group in groups for trajectory in group}
        if any(id(trajectory) in learned for group in evaluation for trajectory in group):
            raise ConfigError("a trajectory is in eval_groups and is learned from, too; evaluate on others")
        check_numbers([*groups, *evaluation])
        self._check_learnable(groups)
        began = await self.champion()
        metrics = metrics_of(groups)
        ids = await self._keep(groups, {"split": "train", "step": began.step}, "scored")
        others = await self._keep(evaluation, {"split": "eval", "step": began.step}, "spent")
        found = await self._update({"groups": ids, "evaluation": others}, config, verbose)
        if others and not found["reason"] and not found["metrics"]["evaluation"]["groups"]:
            _log.warning("nothing was evaluated: %s", found["metrics"]["evaluation"]["left_out"])
        return await self._result(found, metrics, began)

    async def train_files(self, files: Sequence[Path], config: TrainConfig, *, verbose: bool = False) -> TrainResult:
        """Train on training files in the trainer's process, and promote the policy; see `TrainableModel.train_sft`."""
        began = await self.champion()
        found = await self._update({"files": [str(file) for file in files]}, config, verbose)
        return await self._result(found, {}, began)

    async def _update(self, what: Mapping[str, Sequence[str]], config: TrainConfig, verbose: bool) -> dict[str, Any]:
        with bar("train", 1) as shown:

            def progress(done: int, total: int, note: str) -> None:
                shown(completed=done, total=total, note=note)
                if verbose:
                    print(f"train {done}/{total} {note}", file=sys.stderr)

            return await self._trainer.update(what, config, who=self._who, progress=progress)

    async def _result(self, found: Mapping[str, Any], metrics: dict[str, float], began: Policy) -> TrainResult:
        if found["reason"]:
            _log.warning("%s learned nothing: %s; %s serves on", self._name, found["reason"], found["champion"])
        else:
            known = {name: value for name in _METRICS if isinstance(value := found["metrics"].get(name), int | float)}
            metrics |= {name: float(value) for name, value in known.items() if math.isfinite(value)}
        # Asked anew instead of taken from `found`: another script may have promoted a policy since.
        champion = await self.champion()
        await self._note("train", metrics, began.step)
        return TrainResult(champion.step, metrics, found["path"], found["reason"])

    async def log(
        self, groups: Sequence[TrajectoryGroup], split: str, metrics: Mapping[str, float], step: int | None
    ) -> None:
        """Write groups that are not trained on, and a line with their metrics; see `Model.log`."""
        check_numbers(groups)
        if step is None:
            step = 0 if self._base is None else (await self.champion()).step
        await self._keep(groups, {"split": split, "step": step, "model": self._name}, "spent")
        await self._note(split, {**metrics_of(groups), **metrics}, step)

    @_on_store_thread
    def promote(self, name: str) -> Policy:
        """Make a policy of the project the champion, without a gate run; see `LocalBackend.promote`."""
        if self._champion().name != name:
            reason = "gone back to by hand; no gate was asked"
            ledger = self._opened().ledger
            found = ledger.policy(name)
            with self._engine_for(name) as engine:
                if found is not None and found.state == "retired":
                    promotion.rollback(ledger, engine, to=name, who=self._who, reason=reason)
                else:
                    promotion.promote(ledger, engine, name, who=self._who, reason=reason)
        return self._champion()

    @_on_store_thread
    def ensure(self, name: str) -> None:
        """Make the engine serve a policy beside the champion, after testing it; see `TrainableModel.checkpoint`."""
        ledger = self._opened().ledger
        policy = ledger.policy(name)
        # Step 0 is the base model, which has no files of its own; a later policy without files was deleted.
        if policy is None or (policy.path is None and policy.step):
            known = ", ".join(each.name for each in ledger.policies() if each.path or not each.step)
            raise NotFound(f"there is no policy {name} in the project {self._settings.project!r}; there are: {known}")
        with self._engine_for(name) as engine:
            promotion.ensure_loaded(engine, name)

    @_on_store_thread
    def delete_checkpoints(self, best_metric: str) -> list[str]:
        """Reject all former champions but the best one, and delete their files; see `delete_checkpoints`."""
        ledger = self._opened().ledger
        left = [each for each in ledger.policies() if (each.model, each.state) == (self._name, "retired") and each.path]
        best = best_step(self.directory, best_metric, [policy.step for policy in (*left, self._champion())])
        gone = [policy for policy in left if policy.step != best]
        reason = f"not the best by {best_metric}; deleted"
        # All are rejected before the first file goes: from then on no process promotes or loads one of them.
        with serving.EngineClient.of_route(self._settings, ledger.route()) or nullcontext() as engine:
            for policy in gone:
                promotion.reject(ledger, engine, policy.name, who=self._who, reason=reason)
        for policy in gone:
            # The path is made of the name, and a process that may write the store could have written `../..` there.
            policies.check_name(policy.name)
            with suppress(OSError):
                policies.remove_adapter(self._settings.adapters, policy.name)
        return [policy.name for policy in gone]

    def close(self) -> None:
        """End the engine and the trainer that this object started, and close the store; a second call does nothing."""
        self._closed = True
        self._trainer.close()
        if self._engine is not None:
            self._engine.stop()
        # The thread may still use the store, so the store is closed after it.
        self._thread.shutdown(wait=True)
        if self._store is not None:
            self._store.close()

    @_on_store_thread
    def _keep(self, groups: Sequence[TrajectoryGroup], about: JSON, state: str) -> list[str]:
        """Write groups into the store and return their ids; a group in state `spent` is not trained on.

        A group that this object has written already, and that has not changed since, is not written again.
        """
        store, now = self._opened(), time.time()
        ids: list[str] = []
        # The gate may ask about scenarios that a script evaluates on, and not about those that it trains on.
        held_out = about["split"] != "train"
        for group in groups:
            if not group.trajectories:  # every rollout raised
                continue
            mark = (self._token, held_out, content_of(group))
            if (stored := group.stored_as(mark)) is not None:
                if state == "scored":
                    store.ledger.set_groups([stored], state)
                ids.append(stored)
                continue
            found = translate(group, about=about, held_out=held_out, at=now)
            # A trajectory before its calls and scores, which refer to it.
            rows = [row for each in found.trajectories for row in (each.info, *each.calls, *each.scores)]
            for begin in range(0, len(rows), _RECORDS_A_WRITE):
                store.write(rows[begin : begin + _RECORDS_A_WRITE])
            # Last, so that a group that exists is complete.
            store.ledger.add_groups([found], state=state, now=now)
            group.note_stored(mark, found.id)
            ids.append(found.id)
        return ids

    @_on_store_thread
    def _note(self, split: str, metrics: Mapping[str, float], step: int) -> None:
        # On this thread too, so that lines of the history come in the order of the calls.
        model = None if self._base is not None else self._name
        note(self.directory, step=step, split=split, metrics=metrics, at=time.time(), model=model)

    # The methods below run on the store's thread.

    def _open_store(self) -> Store:
        """Open the store; an engine is neither joined nor started."""
        if self._store is None:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._store = open_store(self._settings.store_url, project=self._settings.project)
        return self._store

    def _opened(self) -> Store:
        if self._store is None:
            raise not_registered(self._name)
        return self._store

    def _champion(self) -> Policy:
        """Look up the policy that serves, send requests to it from now on, and return it."""
        # While upstream is the champion, scripts train the learner, and no app notices.
        champion = self._opened().ledger.leader()
        if champion is None:
            raise NotFound(f"no policy serves in the project {self._settings.project!r}; register the model again")
        self.serves = champion.name
        return champion

    open_store, champion = _on_store_thread(_open_store), _on_store_thread(_champion)

    def _joined(self, champion: Policy) -> tuple[str, str | None] | None:
        """Return the address and the key of an engine that serves the project already; `None` if no engine answers."""
        route = self._opened().ledger.route()
        if (base_url := self._settings.base_url or route.base_url) is None:
            return None
        key = self._settings.engine_key(base_url, route.key_file)
        with serving.EngineClient(base_url, key) as engine:
            if not engine.health():
                return None
        if self._options:
            raise ConfigError(
                f"an engine serves {champion.name} at {base_url} already, with its own options; stop it, "
                f"or leave out: {', '.join(sorted(self._options))}"
            )
        return base_url, key

    def _start(self, base: str) -> str:
        options = [word for name, value in self._options.items() for word in (f"--{name.replace('_', '-')}", value)]
        arguments = ["serve", "--base", base, "--name", self._name, "--port", "0", "--json", *options]
        self._engine = processes.ScriptChild(processes.SELF, arguments, self._environment, self.directory / "serve.log")
        first = self._engine.read() or {}
        if "base_url" not in first:
            why = first.get("message") or self._engine.last_words()
            self._engine.stop()
            raise getattr(errors, first.get("error", ""), EngineError)(f"the engine did not start: {why}")
        return first["base_url"]

    def _engine_for(self, policy: str) -> serving.EngineClient:
        engine = serving.EngineClient.of_route(self._settings, self._opened().ledger.route())
        if engine is None:
            raise EngineError(f"no engine serves this project, so {policy} cannot be proven; register the model again")
        return engine

    def _check_same_model(self, champion: Policy, named: str) -> None:
        if champion.model != self._name:
            raise ConfigError(
                f"the project {self._settings.project!r} serves {champion.model!r} already, and has one model; "
                f"give {self._name!r} a project of its own"
            )
        base = policies.resolve_model_dir(named)
        # The fingerprint reads all weights, so it is only computed where the paths differ.
        if str(base.absolute()) != champion.base and policies.base_fingerprint(base) != champion.base_sha256:
            raise ConfigError(
                f"{champion.name} was trained on {champion.base}, which is not {named}; name that base, or give the "
                "model another project"
            )

    def _check_learnable(self, groups: Sequence[TrajectoryGroup]) -> None:
        if not any(group.trajectories for group in groups):
            raised = [each for group in groups for each in group.exceptions]
            first = f": {len(raised)} raised, the first {raised[0].type}: {raised[0].message}" if raised else ""
            raise ConfigError(f"there is no rollout to learn from{first}")
        choices = [choice for group in groups for trajectory in group for choice in trajectory.choices()]
        if not any(exact_of(choice) for choice in choices):
            raise ConfigError(
                f"none of {len(choices)} choices in {len(groups)} groups carries its exact tokens, so nothing can be "
                f"learned; ask {self._name} through model.openai_client(), or at model.inference_base_url, and append "
                "`completion.choices[0]` itself to messages_and_choices"
            )
        if not any(math.isfinite(trajectory.reward) for group in groups for trajectory in group):
            raise ConfigError("no trajectory has a reward, so nothing can be learned; set trajectory.reward")


def not_registered(model: str) -> ConfigError:
    """Return the error to raise where a model must be registered first; `model` is its name."""
    return ConfigError(f"{model} is not registered; call `await model.register(backend)` first")
