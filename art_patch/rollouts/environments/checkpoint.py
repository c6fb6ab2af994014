"""Where a trainer stands, as a JSON file: the policy that serves, by name, and what the trainer itself counts.

No weights are in it. A policy is never changed and stays where it is, so a checkpoint is as good as its project's
directory; `delete_checkpoints` makes those of deleted policies useless.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from art_patch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """See the module.

    Attributes:
        policy: `NAME@STEP`.
        updates: that the trainer made.
        begun: scenarios that it began, which says which come next.
    """

    policy: str
    updates: int
    begun: int


def write(path: str | PathLike[str], checkpoint: Checkpoint) -> Path:
    """Write the file, whole or not at all, and return where it is; its directory is made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(checkpoint)) + "\n")
    unfinished.replace(target)
    return target


def read(path: str | PathLike[str], *, model: str) -> Checkpoint:
    """Read such a file.

    Args:
        path: of the file.
        model: whose it must be.

    Raises:
        ConfigError: there is none, it is something else, or another model's.
    """
    try:
        found: Any = json.loads(Path(path).read_text())
        checkpoint = Checkpoint(str(found["policy"]), int(found["updates"]), int(found["begun"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no checkpoint ({error}); give a file that GRPOTrainer.save_checkpoint wrote"
        ) from error
    if checkpoint.policy.rpartition("@")[0] != model:
        raise ConfigError(f"{path} is of {checkpoint.policy}; {model} cannot go back to it")
    return checkpoint
