"""What an update is given, as a record and as a file.

The file is all that an update in another process needs, and all that is left of one that was killed. It is written once
and never changes: a job directory belongs to one job, told by the fingerprint of its content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from art_patch.errors import TrainingError
from art_patch.training.config import TrainConfig
from art_patch.training.data.packing import Example
from art_patch.training.data.rows import Row
from art_patch.training.data.supervised import Pair
from art_patch.training.loop import tensor_file
from art_patch.training.losses.loss_config import LossConfig
from art_patch.types import JSON

JOB = "job.safetensors"
"""The file's name in a job directory."""

_FORMAT = 6
"""Raised when older files can no longer be read."""


@dataclass(frozen=True, slots=True)
class Sibling:
    """A trajectory of a group.

    Attributes:
        trajectory_id: its id.
        example: its rows and its advantage, which is 0 where there are no rows.
        on_policy: all of it was sampled by the policy that the update starts from.
    """

    trajectory_id: str
    example: Example
    on_policy: bool


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """A group that is learned from.

    Attributes:
        id: of the group.
        siblings: all of them.
    """

    id: str
    siblings: tuple[Sibling, ...]

    @property
    def teaches(self) -> bool:
        """Whether a sibling did better or worse than the others."""
        return any(sibling.example.advantage != 0.0 and sibling.example.rows for sibling in self.siblings)


@dataclass(frozen=True, slots=True)
class TrainJob:
    """All that an update depends on.

    Attributes:
        base: model directory or hub id.
        base_sha256: the base's fingerprint, for the manifest.
        parent: adapter directory of the champion; `None` if the champion is the base itself.
        target: where to publish, `adapters/NAME@STEP`.
        config: how.
        groups: to be ranked; a group that teaches nothing has no part in it.
        demonstrations: to be imitated; what is learned is marked as sampled.
        rehearsal: earlier successes; each step on groups imitates a few of them, and of the demonstrations.
        pairs: to be told apart.
        evaluation: groups that are never learned from; the policy is evaluated on them if the config asks for it.
        others: trajectories outside of the groups that some of it is of.
        mean_reward: of all trajectories that were scored, for people.
        metrics: what it was made of and what was left out, for people; JSON values.
    """

    base: str
    base_sha256: str
    parent: Path | None
    target: Path
    config: TrainConfig
    groups: tuple[TrainGroup, ...] = ()
    demonstrations: tuple[Row, ...] = ()
    rehearsal: tuple[Row, ...] = ()
    pairs: tuple[Pair, ...] = ()
    evaluation: tuple[TrainGroup, ...] = ()
    others: tuple[str, ...] = ()
    mean_reward: float | None = None
    metrics: JSON = field(default_factory=dict[str, Any])

    @property
    def start(self) -> Path | None:
        """Adapter directory of the policy that the update starts from; `None` for a new LoRA."""
        return self.parent if self.config.start == "champion" else None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Everything that may be learned from: of groups, demonstrations, what is rehearsed, then pairs."""
        of_groups = (row for group in self.groups for sibling in group.siblings for row in sibling.example.rows)
        of_pairs = (row for pair in self.pairs for row in (pair.chosen, pair.rejected))
        return (*of_groups, *self.demonstrations, *self.rehearsal, *of_pairs)

    @property
    def rehearsed(self) -> tuple[Row, ...]:
        """What steps on groups imitate some of; nothing unless the config asks for it."""
        return () if self.config.rehearse_from is None else (*self.rehearsal, *self.demonstrations)

    @property
    def group_ids(self) -> tuple[str, ...]:
        """The groups that are trained on."""
        return tuple(group.id for group in self.groups)

    @property
    def trajectory_ids(self) -> frozenset[str]:
        """The trajectories of these groups."""
        return _trajectories(self.groups)

    @property
    def evaluated_ids(self) -> frozenset[str]:
        """The trajectories that it is evaluated on."""
        return _trajectories(self.evaluation)

    @property
    def fingerprint(self) -> str:
        """Sha256 of its file."""
        return hashlib.sha256(_to_bytes(self)).hexdigest()


def _trajectories(groups: Iterable[TrainGroup]) -> frozenset[str]:
    return frozenset(sibling.trajectory_id for group in groups for sibling in group.siblings)


def claim(directory: Path, job: TrainJob) -> None:
    """Make `directory` the job's, or find that it is.

    Raises:
        TrainingError: it is another job's, or cannot be written.
    """
    content, path = _to_bytes(job), directory / JOB
    if not path.exists():
        tensor_file.write(path, content)
    elif path.read_bytes() != content:
        raise TrainingError(
            f"{directory} belongs to another update; delete it, or give this one a directory of its own"
        )


def read_job(directory: Path) -> TrainJob | None:
    """Return the job that a directory belongs to; `None` if it is nobody's.

    Raises:
        TrainingError: the file is damaged, or from another release.
    """
    found = tensor_file.read(directory / JOB)
    if found is None:
        return None
    arrays, facts = found
    if facts["format"] != _FORMAT:
        raise TrainingError(f"{directory} was begun by another release; delete it, and the update begins anew")
    rows = _rows_of(arrays)
    advantages = iter(arrays["advantages"].tolist())
    counts = iter(arrays["rows_of_siblings"].tolist())

    def sibling(trajectory_id: str, on_policy: bool) -> Sibling:
        example = Example(tuple(next(rows) for _ in range(next(counts))), next(advantages))
        return Sibling(trajectory_id, example, on_policy)

    def groups(told: Iterable[JSON]) -> tuple[TrainGroup, ...]:
        return tuple(
            TrainGroup(group["id"], tuple(sibling(key, own) for key, own in group["siblings"])) for group in told
        )

    settings = facts["config"]
    return TrainJob(
        base=facts["base"],
        base_sha256=facts["base_sha256"],
        parent=None if facts["parent"] is None else Path(facts["parent"]),
        target=Path(facts["target"]),
        config=TrainConfig(**settings | {"loss": LossConfig(**settings["loss"])}),
        groups=groups(facts["groups"]),
        demonstrations=tuple(next(rows) for _ in range(facts["demonstrations"])),
        rehearsal=tuple(next(rows) for _ in range(facts["rehearsal"])),
        pairs=tuple(Pair(next(rows), next(rows), source) for source in facts["pairs"]),
        evaluation=groups(facts["evaluation"]),
        others=tuple(facts["others"]),
        mean_reward=facts["mean_reward"],
        metrics=facts["metrics"],
    )


def _to_bytes(job: TrainJob) -> bytes:
    siblings = [sibling for group in (*job.groups, *job.evaluation) for sibling in group.siblings]
    of_evaluation = (row for group in job.evaluation for each in group.siblings for row in each.example.rows)
    arrays = _arrays_of((*job.rows, *of_evaluation)) | {
        "advantages": np.array([sibling.example.advantage for sibling in siblings], dtype=np.float64),
        "rows_of_siblings": np.array([len(sibling.example.rows) for sibling in siblings], dtype=np.int64),
    }
    facts = {
        "format": _FORMAT,
        "base": job.base,
        "base_sha256": job.base_sha256,
        "parent": None if job.parent is None else str(job.parent),
        "target": str(job.target),
        "config": asdict(job.config),
        "groups": _group_records(job.groups),
        "demonstrations": len(job.demonstrations),
        "rehearsal": len(job.rehearsal),
        "pairs": [pair.source for pair in job.pairs],
        "evaluation": _group_records(job.evaluation),
        "others": job.others,
        "mean_reward": job.mean_reward,
        "metrics": job.metrics,
    }
    return tensor_file.to_bytes(arrays, facts)


def _group_records(groups: Iterable[TrainGroup]) -> list[JSON]:
    return [
        {"id": group.id, "siblings": [[each.trajectory_id, each.on_policy] for each in group.siblings]}
        for group in groups
    ]


_DTYPES: Mapping[str, type[np.generic]] = {
    "ids_T": np.int64,
    "sampled_T": np.bool_,
    "logprobs_T": np.float64,
    "temperature_T": np.float64,
}


def _arrays_of(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    """The rows one after another; T here is their tokens together."""
    arrays: dict[str, NDArray[Any]] = {
        name: np.array([value for row in rows for value in getattr(row, name)], dtype=dtype)
        for name, dtype in _DTYPES.items()
    }
    return arrays | {"tokens_of_rows": np.array([len(row.ids_T) for row in rows], dtype=np.int64)}


def _rows_of(arrays: Mapping[str, NDArray[Any]]) -> Iterator[Row]:
    ends = np.cumsum(arrays["tokens_of_rows"])[:-1]
    columns = [[part.tolist() for part in np.split(arrays[name], ends)] for name in _DTYPES]
    for ids, sampled, logprobs, temperature in zip(*columns, strict=True):
        yield Row(tuple(ids), tuple(sampled), tuple(logprobs), tuple(temperature))
