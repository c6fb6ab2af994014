"""A trained LoRA to a policy: written beside its place, proven finite, and moved there whole."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from art_patch.errors import AdapterRejected
from art_patch.policies import ENTRY, MANIFEST, publish_adapter, read_json, unpublished
from art_patch.training.kernels.scoring import Scorer
from art_patch.training.loop.job import TrainJob
from art_patch.training.loop.probe import probe_of

_JOB = "job"
"""Entry of the manifest: the fingerprint of the job that made the policy."""


def is_published(job: TrainJob) -> bool:
    """Return whether this very job has made its policy already.

    Raises:
        AdapterRejected: another has.
    """
    if not job.target.exists():
        return False
    if read_json(job.target, MANIFEST).get(_JOB) != job.fingerprint:
        raise AdapterRejected(f"{job.target} exists already and a policy never changes. Publish under the next step.")
    return True


def publish(job: TrainJob, model: Any, scorer: Scorer) -> None:
    """Make the trained model's LoRA the policy of the job.

    Raises:
        TrainingError: it computes something that is not finite.
        AdapterRejected: the target exists.
    """
    probe = probe_of(model, scorer, job.rows)
    with unpublished(job.target) as directory:
        model.save_pretrained(directory, safe_serialization=True)
        extra = {"base": job.base, "config": asdict(job.config), _JOB: job.fingerprint, ENTRY: probe.entry()}
        publish_adapter(directory, job.target, base_sha256=job.base_sha256, extra=extra)
