"""Arrays and a JSON object in one safetensors file, written whole or not at all.

One file, because two cannot be replaced at once: the object stands in the file's header. Equal content gives equal
bytes. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from art_patch._lib.atomic_files import replacing
from art_patch.errors import TrainingError
from art_patch.types import JSON

Arrays = Mapping[str, NDArray[Any]]

_FACTS = "art_patch"


def to_bytes(arrays: Arrays, facts: JSON) -> bytes:
    """Return the file's content."""
    written = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(written, metadata={_FACTS: json.dumps(facts, sort_keys=True)})


def write(path: Path, content: bytes) -> None:
    """Put `content` in place of what `path` was, or leave that as it is.

    Raises:
        TrainingError: the disk is full or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # One name for all drafts: a checkpoint is large, and what killed jobs left must not add up.
        with replacing(path, draft=path.with_name(f".{path.name}.unfinished")) as file:
            file.write(content)
    except OSError as error:
        raise TrainingError(
            f"{path} could not be written ({error.strerror}); what was there before is whole. Make room for "
            f"{len(content):,} bytes that may be written there, and run it again: it goes on from there"
        ) from error


def read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
    """Return what was written; `None` if there is no such file.

    Raises:
        TrainingError: it was changed by something else.
    """
    try:
        with safe_open(path, framework="np") as file:  # type: ignore[no-untyped-call]
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            return arrays, json.loads(file.metadata()[_FACTS])
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise TrainingError(
            f"{path} cannot be read ({error}); delete {path.parent}, and the update begins anew"
        ) from error
