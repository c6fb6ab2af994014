"""Deletes files that killed cycles left behind, and trajectories beyond the age and number that the user keeps.

A killed cycle may leave the directory of an update (with a copy of the tokens that it trained on), the stores of the
gate's runs, a half-written adapter, or an adapter that is not in the ledger: these files are deleted. A loaded policy
that the engine does not need is unloaded, and a candidate whose champion has changed is rejected. Two things stay,
because the next cycle continues them: an update whose policy is not in the ledger yet, and a candidate that was trained
from the present champion.
"""

import shutil
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from art_patch import policies, promotion
from art_patch.errors import ArtPatchError, Busy, EngineError
from art_patch.pipeline.cycle_lock import project_lock
from art_patch.pipeline.cycle_run import Cycle, CycleConfig, Progress
from art_patch.pipeline.lineage import rival_of
from art_patch.store import Store
from art_patch.types import Policy

GATE_RUNS = "gate"  # name of the project's directory for scratch stores, which exist only while a gate repeats runs


def sweep_leftovers(run: Cycle, champion: Policy) -> None:
    """Delete what a killed cycle left and no later cycle can continue."""
    ledger = run.store.ledger
    known = {policy.name: policy for policy in ledger.policies()}
    for job in unfinished_jobs(run.adapters.parent):
        # The policy is in the ledger, so the cycle was killed between its registration and this deletion.
        if job.name in known:
            shutil.rmtree(job)
    shutil.rmtree(run.adapters.parent / GATE_RUNS, ignore_errors=True)
    policies.remove_unpublished(run.adapters)
    # Each candidate was to be tested against one champion. Against another one it would start from older weights.
    for policy in known.values():
        rival = rival_of(policy, known)
        if policy.state == "candidate" and policy.path and rival != champion.name:
            reason = f"{champion.name} became champion before it was tested against {rival}"
            ledger.move(policy.name, "rejected", who=run.who, reason=reason)
    # While the engine is down, unused policies stay loaded; the next cycle unloads them.
    with suppress(EngineError):
        for name in promotion.unwanted(ledger, run.engine.models()):
            run.engine.unload(name)


def unfinished_jobs(project: Path) -> list[Path]:
    """Return the directories `training/NAME@STEP` of updates that were begun; a successful update deletes its own."""
    return sorted((project / "training").glob("*@*"))


def discard_jobs(jobs: Iterable[Path], adapters: Path, known: Collection[str]) -> None:
    """Delete updates that no cycle will continue, and their adapters; those of `known` policies stay."""
    for job in jobs:
        if job.name not in known:
            policies.remove_adapter(adapters, job.name)
        shutil.rmtree(job)


def forget_unfinished(directory: Path, known: Collection[str]) -> bool:
    """Delete all files of killed updates and gates of a project unless a cycle runs; return whether that was done.

    An erasure needs this, because the files may contain the user's data. The next cycle begins these updates and gates
    again from the store. `known` has the names of all policies in the ledger.
    """
    left = [path for name in ("training", GATE_RUNS) if (path := directory / name).exists()]
    if not left:
        return True
    # Under the cycle's own lock file. The store's lease is not needed: these files are on this machine only.
    try:
        with project_lock(directory):
            discard_jobs(unfinished_jobs(directory), directory / "adapters", known)
            for path in left:
                shutil.rmtree(path)
    except Busy:
        return False
    return True


@contextmanager
def pruning_at_end(
    store: Store, config: CycleConfig, progress: Progress, *, who: str, now: float | None
) -> Generator[None]:
    """Call `prune` when the block ends normally or with an error of art_patch, and not after Ctrl-C or a bug."""
    try:
        yield
    except ArtPatchError:
        # A judge that is down for a month must not keep users' data for a month longer.
        prune(store, config, progress, who=who, now=now)
        raise
    # Not a `finally`: Ctrl-C must end the cycle at once, and pruning a large store takes minutes.
    prune(store, config, progress, who=who, now=now)


def prune(store: Store, config: CycleConfig, progress: Progress, *, who: str, now: float | None = None) -> None:
    """Delete trajectories older than `keep_days`, and all but the newest `keep_trajectories`; unset limits keep all."""
    if config.keep_days is None and config.keep_trajectories is None:
        return
    store.rights.prune(
        older_than_s=None if config.keep_days is None else config.keep_days * 86_400,
        keep=config.keep_trajectories,
        who=who,
        progress=lambda done, total: progress("prune", done, total),
        now=now,
    )
