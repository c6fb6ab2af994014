"""Runs single steps of a cycle, under the cycle's lock: compares two policies, or trains on groups of a caller.

`evaluate` is the function behind `art-patch evaluate`. `run_explicit_update` trains from a script: the caller gives the
rewards, so no judge is used, and the new policy is promoted without a gate. `run_file_update` does so with files.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from art_patch import gate, promotion, rewards, serving, training
from art_patch.errors import AdapterRejected, ConfigError, EngineError, NotFound
from art_patch.pipeline import carry_over, gate_run, train_policy
from art_patch.pipeline.cycle_run import Cycle, CycleConfig, Progress, why_none_serves
from art_patch.pipeline.running_cycle import exclusive_cycle
from art_patch.pipeline.train_files import train_on_files
from art_patch.store import Store
from art_patch.types import JSON, Policy

REASON = "trained by hand; no gate was asked"


def evaluate(
    store: Store, engine: serving.EngineClient, judge: rewards.OrderedJudge, adapters: Path, config: CycleConfig,
    policy: str, against: str | None = None, *,
    gate_judge: rewards.OrderedJudge | None = None, who: str, progress: Progress, now: float | None = None,
) -> tuple[str, gate.Verdict]:  # fmt: skip
    """Compare two policies on held-out scenarios with the gate, without promoting or rejecting any.

    Returns the name of the policy that was compared with, `against` or else the champion, and the verdict:
    `Verdict.promote` says whether `policy` is better. In its metrics, `candidate` is `policy` and `champion` the other.

    Only the parts `gate`, `checks`, `combination` and `replay` of `config` are used.
    """
    with exclusive_cycle(store, adapters.parent, who=who) as held:
        ours, theirs = _policies(held.store, policy, against)
        at = time.time() if now is None else now
        run = Cycle(
            held.store, judge, config, held.guarding(progress), at, engine, adapters, who, gate_judge=gate_judge
        )
        with _unloading(run, ours.name, theirs.name):
            # The ledger notes no verdict, so the answers would stand beside the scores of another gate.
            return theirs.name, gate_run.run_gate(run, ours, theirs, keeps=False)


def _policies(store: Store, policy: str, against: str | None) -> tuple[Policy, Policy]:
    ours, theirs = store.ledger.policy(policy), store.ledger.policy(against) if against else store.ledger.leader()
    if theirs is None and not against:
        raise NotFound(f"there is no policy to compare with: {why_none_serves(store)}")
    if ours == theirs is not None:
        raise ConfigError(f"{policy} cannot be compared with itself; name another with --against")
    if ours is None or theirs is None:
        raise NotFound(f"there is no policy {policy if ours is None else against!r}; `art-patch policies` lists them")
    return ours, theirs


@contextmanager
def _unloading(run: Cycle, *names: str) -> Generator[None]:
    """Unload at the end those of the policies that were not loaded before."""
    served = run.engine.models()
    try:
        yield
    finally:
        # A person may have promoted one of them meanwhile, so the ledger is asked at the end.
        kept = {*served, *promotion.wanted(run.store.ledger)}
        for name in (name for name in names if name not in kept):
            # The comparison's own error is the one to report; or the policy was never loaded.
            with suppress(EngineError):
                run.engine.unload(name)


@dataclass(frozen=True, slots=True)
class ExplicitUpdate:
    """The result of an update from a script."""

    champion: str  # the policy that serves after the update
    path: str | None  # directory of the champion's adapter; `None` if the champion is the base model
    reason: str = ""  # why nothing was learned
    metrics: JSON = field(default_factory=dict[str, Any])


def run_file_update(
    store: Store, engine: serving.EngineClient, adapters: Path, config: training.TrainConfig, files: Sequence[str],
    *, who: str, progress: Progress,
) -> ExplicitUpdate:  # fmt: skip
    """Train on training files, and promote the new policy as `run_explicit_update` does.

    Raises as `train_on_files` does, and an `AdapterRejected` if the engine refuses the new policy, which is rejected if
    the engine would refuse it each time.
    """
    found = train_on_files(store, adapters, CycleConfig(train=_ungated(config)), files, who=who, progress=progress)
    return _promoted(store, engine, found.policy, who, found.metrics)


def _ungated(config: training.TrainConfig) -> training.TrainConfig:
    # No gate tests the new policy, so it must not go on from one that a gate has rejected.
    return replace(config, start="champion") if config.start == "candidate" else config


def _promoted(store: Store, engine: serving.EngineClient, candidate: Policy, who: str, metrics: JSON) -> ExplicitUpdate:
    ledger = store.ledger
    leader = ledger.leader()
    beside = leader is not None and leader.state == "learner"  # upstream is the champion
    state: Literal["champion", "learner"] = "learner" if beside else "champion"
    try:
        serves = promotion.promote(ledger, engine, candidate.name, state=state, who=who, reason=REASON)
    except AdapterRejected as error:
        if error.final:  # the engine would refuse it every time
            promotion.reject(ledger, engine, candidate.name, who=who, reason=f"the engine refuses it: {error}")
        raise
    return ExplicitUpdate(serves.name, serves.path, metrics=metrics)


def run_explicit_update(
    store: Store, engine: serving.EngineClient, adapters: Path, config: training.TrainConfig, group_ids: Sequence[str],
    *, evaluation: Sequence[str] = (), who: str, progress: Progress,
) -> ExplicitUpdate:  # fmt: skip
    """Train on scored groups of the store, and promote the new policy as soon as the engine has proven it.

    While upstream is the champion, the new policy becomes the learner, and upstream goes on to answer the apps.

    It starts from the champion, or anew if `config.start` is "base", and never from a candidate that a gate rejected.
    `evaluation` has ids of groups that are never trained on; every `config.eval_steps` steps they measure the update.
    Raises as `TrainableModel.train` does. If the engine refuses the new policy for good, it is rejected.
    """
    training.require_evaluation(config, evaluation)
    training.require_permission(config)
    config = _ungated(config)
    with exclusive_cycle(store, adapters.parent, who=who) as held:
        ledger, read = held.store.ledger, held.store.read
        champion = ledger.leader()
        if champion is None:
            raise NotFound(why_none_serves(held.store))
        no_judge = cast("rewards.OrderedJudge", None)  # the groups are scored, so no step below asks a judge
        at, report = time.time(), held.guarding(progress)
        run = Cycle(held.store, no_judge, CycleConfig(train=config), report, at, engine, adapters, who)
        carry_over.sweep_leftovers(run, champion)
        # A script samples new runs after a kill, so its killed update is not continued. If the update was a cycle's,
        # its groups stay scored and the next cycle trains on them.
        known = {policy.name for policy in ledger.policies()}
        carry_over.discard_jobs(carry_over.unfinished_jobs(adapters.parent), adapters, known)
        groups, held_out = read.groups_of(group_ids), read.groups_of(evaluation)
        candidate, reason = train_policy.train_groups(run, champion, groups, evaluation=held_out)
        metrics = run.metrics["train"]
        # Not an error: a batch of equal rewards is frequent in scripts, and the next batch may differ.
        if candidate is None:
            return ExplicitUpdate(champion.name, champion.path, reason, metrics)
        return _promoted(held.store, engine, candidate, who, metrics)
