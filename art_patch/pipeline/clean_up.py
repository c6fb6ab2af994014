"""Deletes what earlier cycles left behind, and trajectories that are older or more than the user keeps.

A killed cycle may leave: the directory of an update (with a copy of the tokens that it learned from); the stores of the
gate's runs; a half-written adapter; an adapter that is not in the ledger; a policy that the engine does not need; a
candidate whose champion has changed. Two things stay, because the next cycle continues them: an update whose policy is
not in the ledger yet, and a candidate of the present champion.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from art_patch import policies, promotion
from art_patch.errors import ArtPatchError, Busy, EngineError
from art_patch.pipeline.cycle_lock import project_lock
from art_patch.pipeline.cycle_run import Cycle, CycleConfig, Progress
from art_patch.store import Store
from art_patch.types import Policy

GATE_RUNS = "gate"
"""Directory in the project that holds the stores of the gate's runs while a gate makes them."""


def sweep_leftovers(run: Cycle, champion: Policy) -> None:
    """Delete what a killed cycle left and no later cycle can continue."""
    ledger = run.store.ledger
    known = {policy.name for policy in ledger.policies()}
    for job in unfinished_jobs(run.adapters.parent):
        # The policy is in the ledger, so the cycle was killed between its registration and this deletion.
        if job.name in known:
            shutil.rmtree(job)
    shutil.rmtree(run.adapters.parent / GATE_RUNS, ignore_errors=True)
    policies.remove_unpublished(run.adapters)
    # Each candidate was to be tested against its parent. Against another champion it would start from older weights.
    for policy in ledger.policies():
        if policy.state == "candidate" and policy.path and policy.parent != champion.name:
            reason = f"{champion.name} became champion before it was tested against {policy.parent}"
            ledger.move(policy.name, "rejected", who=run.who, reason=reason)
    # While the engine is down, unused policies stay loaded; the next cycle unloads them.
    with suppress(EngineError):
        for name in promotion.unwanted(ledger, run.engine.models()):
            run.engine.unload(name)


def unfinished_jobs(project: Path) -> list[Path]:
    """Return the directories of updates, `training/NAME@STEP`, that have not ended well."""
    return sorted((project / "training").glob("*@*"))


def discard_job(job: Path, adapters: Path, known: Collection[str]) -> None:
    """Delete an update that no cycle will continue, and its adapter unless the ledger knows the policy.

    `known` holds the names of all policies in the ledger.
    """
    if job.name not in known:
        policies.remove_adapter(adapters, job.name)
    shutil.rmtree(job)


def forget_unfinished(directory: Path, known: Collection[str]) -> bool:
    """Delete all files of killed updates and gates in a project's directory, for instance when a user is erased.

    The next cycle begins them again from the data that is then in the store.

    Args:
        known: names of all policies in the ledger.

    Returns:
        Whether nothing is left. `False`: a cycle is running; it deletes its own files when it ends.
    """
    left = [path for name in ("training", GATE_RUNS) if (path := directory / name).exists()]
    if not left:
        return True
    # Under the cycle's own lock file. The store's lease is not needed: these files are on this machine only.
    try:
        with project_lock(directory):
            for job in unfinished_jobs(directory):
                discard_job(job, directory / "adapters", known)
            for path in left:
                shutil.rmtree(path)
    except Busy:
        return False
    return True


@contextmanager
def pruning_at_end(
    store: Store, config: CycleConfig, progress: Progress, *, who: str, now: float | None
) -> Generator[None]:
    """Prune old trajectories when the block ends, well or with an error of art_patch."""
    try:
        yield
    except ArtPatchError:
        # A judge that is down for a month must not keep users' data for a month longer.
        prune(store, config, progress, who=who, now=now)
        raise
    # Not a `finally`: Ctrl-C must end the cycle at once, and pruning a large store takes minutes.
    prune(store, config, progress, who=who, now=now)


def prune(store: Store, config: CycleConfig, progress: Progress, *, who: str, now: float | None = None) -> None:
    """Delete the trajectories beyond `keep_days` and `keep_trajectories`; nothing if both are unset."""
    if config.keep_days is None and config.keep_trajectories is None:
        return
    store.rights.prune(
        older_than_s=None if config.keep_days is None else config.keep_days * 86_400,
        keep=config.keep_trajectories,
        who=who,
        progress=lambda done, total: progress("prune", done, total),
        now=now,
    )
