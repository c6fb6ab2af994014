"""Where an update runs: in this process, or in processes of its own.

Its own if there are to be several, or if Unsloth is to compute: it changes transformers, which this process may have
imported long ago.
"""

from __future__ import annotations

from pathlib import Path

from art_patch.training.loop.backend import backend_of, require_machine
from art_patch.training.loop.job import TrainJob, claim
from art_patch.training.loop.launch import launch
from art_patch.training.loop.metrics import UpdateMetrics
from art_patch.training.loop.notes import Progress, silently
from art_patch.training.loop.publish import is_published
from art_patch.training.loop.update import update


def run_job(job: TrainJob, directory: Path, *, progress: Progress = silently) -> UpdateMetrics:
    """Make the policy of a job, or go on doing so; see `update`.

    Raises:
        TrainingError: it failed, or one of its processes died; nothing was published.
        AdapterRejected: the target exists.
        ConfigError: this machine cannot do as the config says.
    """
    require_machine(job.config)
    own_process = job.config.processes > 1 or backend_of(job.config) == "unsloth"
    if own_process and not is_published(job):
        claim(directory, job)
        launch(directory, job.config.processes, progress)
    return update(job, directory, progress=progress)
