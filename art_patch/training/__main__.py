"""`python -m art_patch.training JOB_DIRECTORY` runs one process of an update; `launch` or a user starts it.

`torchrun --nproc-per-node N -m art_patch.training JOB_DIRECTORY` runs the update in N such processes. Then the store
through which they connect listens on all network interfaces; processes of `launch` connect through a file.
"""

import os
import sys
from pathlib import Path

from art_patch.errors import ArtPatchError, TrainingError
from art_patch.training.loop.job import read_job
from art_patch.training.loop.loading import backend_of
from art_patch.training.loop.processes import end_with_parent, joined, silently, tell, tell_error


def main(directory: Path) -> int:
    """Runs this process's part of the update in the job `directory`, and returns the exit code: 0 if it succeeded."""
    end_with_parent()
    try:
        job = read_job(directory)
        if job is None:
            raise TrainingError(f"{directory} holds no job; `art-patch retrain` makes one")
        if backend_of(job.config) == "unsloth":
            import unsloth  # type: ignore[import-not-found]  # noqa: F401  # before transformers, which it changes

        from art_patch.training.loop.update import update  # after unsloth: it imports what computes

        with joined() as ranks:
            update(job, directory, progress=tell if ranks.first else silently, ranks=ranks)
    except ArtPatchError as error:
        tell_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: now and then Gloo aborts when its threads are torn down with the interpreter (seen with torch
    # 2.13), and the update would count as failed. All files are written by rename, so nothing is left to do.
    os._exit(code)
