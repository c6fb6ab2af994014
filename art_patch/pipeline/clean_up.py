"""What a cycle that was killed left behind: swept by the next, so that only what the ledger knows is ever loaded.

Left may be: an update's job, with a copy of the tokens it was learning from; runs that a gate made; an adapter that was
being written; one that was published and never came into the ledger; a policy in the engine that nobody needs any
more; a candidate of a champion that has changed meanwhile. What can be gone on with is not touched here: a job whose
policy is not in the ledger yet, with its adapter if it has one, and a candidate of the present champion. No torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from art_patch.errors import EngineError
from art_patch.pipeline.cycle_run import Cycle
from art_patch.policies import remove_adapter, remove_unpublished
from art_patch.promotion import unwanted
from art_patch.types import Policy

GATE_RUNS = "gate"
"""Below the project: stores of the runs that a gate makes, while it makes them."""


def sweep(run: Cycle, champion: Policy) -> None:
    """Sweep what a killed cycle left; the engine's part waits for the next cycle if the engine is down.

    Args:
        run: the cycle that begins.
        champion: who serves.
    """
    ledger = run.store.ledger
    known = {policy.name for policy in ledger.policies()}
    for job in _jobs(run.adapters.parent):
        if job.name in known:  # it was registered, and then there was no time to delete this
            shutil.rmtree(job)
    shutil.rmtree(run.adapters.parent / GATE_RUNS, ignore_errors=True)
    remove_unpublished(run.adapters)
    for policy in ledger.policies():
        if policy.state == "candidate" and policy.path and policy.parent != champion.name:
            reason = f"{champion.name} became champion before it was tested against {policy.parent}"
            ledger.move(policy.name, "rejected", who=run.who, reason=reason)
    with suppress(EngineError):
        for name in unwanted(ledger, run.engine.models()):
            run.engine.unload(name)


def discard(job: Path, adapters: Path, known: Collection[str]) -> None:
    """Delete an update that nobody goes on with, and the adapter that it published if the ledger does not know it.

    Args:
        job: the update's directory, `training/NAME@STEP`.
        adapters: directory of published policies.
        known: names of the ledger's policies.
    """
    if job.name not in known:
        remove_adapter(adapters, job.name)
    shutil.rmtree(job)


def forget_unfinished(directory: Path, known: Collection[str]) -> bool:
    """Delete all that killed updates and gates left; false if a cycle is at work, whose own goes when it ends.

    The next cycle begins that update, or that gate, anew, with what is in the store then.

    Args:
        directory: the project's.
        known: names of the ledger's policies.
    """
    left = [path for name in ("training", GATE_RUNS) if (path := directory / name).exists()]
    if not left:
        return True
    try:
        with FileLock(directory / "cycle.lock", timeout=0):
            for job in _jobs(directory):
                discard(job, directory / "adapters", known)
            for path in left:
                shutil.rmtree(path)
    except Timeout:
        return False
    return True


def _jobs(directory: Path) -> list[Path]:
    return sorted((directory / "training").glob("*@*"))
