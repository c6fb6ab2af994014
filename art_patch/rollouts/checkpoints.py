"""The file that a trainer or an agent writes to go back to a policy later: names and counters, no weights."""

import json
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from art_patch._lib.atomic_files import replacing
from art_patch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint file: the champion's name and the trainer's counters."""

    policy: str  # the policy that served, `NAME@STEP`
    updates: int  # number of updates made
    begun: int  # number of seeds used so far


def write_checkpoint(path: str | PathLike[str], checkpoint: Checkpoint) -> Path:
    """Write a checkpoint file for `read_checkpoint`, create its directory if needed, and return its path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, mode=0o666) as file:  # the file holds no secret, so the umask decides who may read it
        file.write(f"{json.dumps(asdict(checkpoint))}\n".encode())
    return target


def read_checkpoint(path: str | PathLike[str], *, model: str) -> Checkpoint:
    """Read a checkpoint file; a `ConfigError` says that it is missing, damaged, or of another model than `model`."""
    try:
        found: Any = json.loads(Path(path).read_text())
        checkpoint = Checkpoint(str(found["policy"]), int(found["updates"]), int(found["begun"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{path} is no checkpoint ({error}); give a file that GRPOTrainer.save_checkpoint wrote"
        raise ConfigError(why) from error
    if checkpoint.policy.rpartition("@")[0] != model:
        raise ConfigError(f"{path} is of {checkpoint.policy}; {model} cannot go back to it")
    return checkpoint
