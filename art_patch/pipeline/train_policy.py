"""Scored groups -> a candidate, published and in the ledger.

An update that was killed is gone on with before anything else is trained: what it cost is not lost, and its groups are
still waiting.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from art_patch.errors import ArtPatchError
from art_patch.pipeline.cycle_run import Cycle
from art_patch.pipeline.train_text import base_text
from art_patch.training import require_packages
from art_patch.types import Group, Policy

if TYPE_CHECKING:
    from art_patch.training import TrainJob


_EVALUATED = 64  # groups: each is computed as often as the config asks for


def check_can_train(run: Cycle, champion: Policy) -> None:
    """Refuse what could not be trained in the end, before a judge is paid for it.

    Raises:
        ConfigError: a package, a GPU or the base's chat template is missing, or the engine would refuse each LoRA of
            the base.
        ModelNotFound: the base is missing.
    """
    config = run.config.train
    require_packages()
    if config.backend == "unsloth" or config.processes > 1:
        from art_patch.training import require_machine  # imports torch

        require_machine(config)
    if config.imitate_from is not None or config.prefer_from is not None:
        base_text(champion.base, ()).renderer()
    if champion.path is None or config.start == "base":  # the engine serves a LoRA of the same modules otherwise
        from art_patch.training import require_servable  # imports torch

        require_servable(champion.base)


def train(run: Cycle, champion: Policy) -> tuple[Policy | None, str]:
    """Return the candidate, or why there is none.

    Raises:
        TrainingError: the update failed; nothing was published.
        ConfigError: this machine cannot train as the config says.
    """
    from art_patch.pipeline.train_job import unfinished_job  # imports numpy

    job = unfinished_job(run, champion)
    if job is None:
        groups = run.store.read.groups(state="scored", held_out=False)
        if (reason := _why_wait(run, groups)) is not None:
            return None, reason
        return train_groups(run, champion, groups, evaluation=_held_out(run))
    run.metrics["train"] = {**job.metrics, "resumed": True}
    return _made(run, champion, job), ""


def train_groups(
    run: Cycle, champion: Policy, groups: Sequence[Group], *, evaluation: Sequence[Group] = ()
) -> tuple[Policy | None, str]:
    """Return the candidate that these scored groups make, or why they make none.

    Args:
        run: the cycle.
        champion: who serves.
        groups: to be learned from.
        evaluation: groups to evaluate on and never to be learned from, if the config asks for it.

    Raises:
        TrainingError: the update failed; nothing was published.
        ConfigError: this machine cannot train as the config says.
    """
    from art_patch.pipeline.train_job import make_job  # imports numpy

    target = run.adapters / f"{champion.model}@{_next_step(run, champion)}"
    job = make_job(run, champion, groups, target, evaluation=evaluation)
    if job is None:
        return None, "no group teaches anything: every group was scored alike, or is too old or not exact"
    return _made(run, champion, job), ""


def _made(run: Cycle, champion: Policy, job: TrainJob) -> Policy:
    from art_patch.pipeline.train_job import job_directory
    from art_patch.training import run_job  # imports torch

    directory = job_directory(run, job.target)
    began, key = time.monotonic(), job.fingerprint[:16]
    try:
        metrics = run_job(job, directory, progress=partial(run.progress, "train"))
    except BaseException as error:  # even of Ctrl-C: the time was spent, and is told by `art-patch report`
        took_s, why = time.monotonic() - began, type(error).__name__.lstrip("_")
        with suppress(ArtPatchError):  # what ended the update is what matters
            run.store.note_attempt(key, policy=job.target.name, took_s=took_s, why=why, who=run.who)
        raise
    run.metrics["train"] |= {**asdict(metrics), "job": key, "took_s": time.monotonic() - began}
    candidate = Policy(
        name=job.target.name,
        base=champion.base,
        base_sha256=champion.base_sha256,
        state="candidate",
        created_at=time.time(),
        path=str(job.target),
        parent=champion.name,
        metrics={"train": run.metrics["train"]},
    )
    run.store.ledger.add_candidate(candidate, trained_on=job.group_ids, also=job.others, who=run.who)
    shutil.rmtree(directory)
    return candidate


def _held_out(run: Cycle) -> Sequence[Group]:
    """The newest held-out groups, if there is to be an evaluation; they wait for the gate and nobody learns them."""
    if run.config.train.eval_steps is None:
        return ()
    return run.store.read.groups(state="formed", held_out=True, limit=_EVALUATED)


def _why_wait(run: Cycle, groups: Sequence[Group]) -> str | None:
    """Why nothing is trained yet; the groups wait for more traffic."""
    config = run.config
    if len(groups) < config.min_groups:
        left: dict[str, int] = run.metrics["group"]["left"]
        why = "; ".join(f"{count} trajectories: {reason}" for reason, count in left.items())
        return f"{len(groups)} scored groups, {config.min_groups} are needed" + (f" ({why})" if why else "")
    held_out = {group.scenario_key for group in run.store.read.groups(state="formed", held_out=True)}
    if len(held_out) < config.gate.min_scenarios:
        needed = config.gate.min_scenarios
        return f"{len(held_out)} held-out scenarios, {needed} are needed to test a candidate; the groups wait for more"
    return None


def _next_step(run: Cycle, champion: Policy) -> int:
    """One above every step that was ever taken: names are never used twice, engines cache by name."""
    taken = [p.step for p in run.store.ledger.policies() if p.model == champion.model]
    taken += [int(d.name.rpartition("@")[2]) for d in run.adapters.glob(f"{champion.model}@*") if d.is_dir()]
    return max(taken) + 1
