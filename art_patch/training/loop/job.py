"""The job: the complete input of an update, as a record and as a file, and the plan of its steps. Loads no torch.

The job's file lets another process run the update, and lets a later process continue an update that was killed. It is
written once and never changed. A job directory belongs to the one job whose file is in it.

The module also defines the format of all files in a job directory. Each is a safetensors file with arrays, and with a
JSON object in its header. Arrays and object are in one file because two files cannot be replaced atomically. A file is
written atomically, and equal content gives equal bytes.

The same job always gives the same plan, so a checkpoint needs only the number of steps done to continue it. An update
has three phases. First it imitates demonstrations, then it learns pairs of a better and a worse answer, then it learns
from ranked groups. In each epoch a phase goes through its items in a random order, which depends only on the seed, the
phase and the epoch, and divides them into steps. If the config asks for rehearsal, each step on groups also imitates a
few known answers against forgetting, drawn by the seed and the number of the step alone.
"""

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from art_patch._lib.atomic_files import replacing
from art_patch.errors import TrainingError
from art_patch.training.config import TrainConfig
from art_patch.training.data.rows import Anchors, Example, Row
from art_patch.training.data.supervised import Pair
from art_patch.training.loss_config import LossConfig, weights_of_kinds
from art_patch.types import JSON

JOB = "job.safetensors"
_FORMAT = 9  # raised when older files can no longer be read
_FACTS = "art_patch"  # the JSON object's key in the header

Arrays = Mapping[str, np.typing.NDArray[Any]]


GroupKind = Literal["run", "turn"]


@dataclass(frozen=True, slots=True)
class Sibling:
    """A trajectory of a group in a job, with its advantage."""

    trajectory_id: str  # id of the trajectory in the store
    example: Example  # the trajectory's rows (token sequences) and its advantage, which is 0 if there are no rows
    on_policy: bool  # whether the policy at the start of the update sampled all of the trajectory's answers


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """A group in a job, for training or for evaluation, with all its siblings."""

    id: str  # id of the group in the store
    siblings: tuple[Sibling, ...]  # the trajectories of the group with their advantages
    kind: GroupKind = "run"  # whether the siblings are whole runs or answers to a single turn

    @property
    def teaches(self) -> bool:
        """Whether a sibling with rows has an advantage other than 0; the loss ignores groups without one."""
        return any(sibling.example.advantage != 0.0 and sibling.example.rows for sibling in self.siblings)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A group with different rewards, as input of the loss."""

    # The siblings that go through the model: those whose advantage is not 0, or all siblings if the loss has a KL term.
    examples: tuple[Example, ...]
    on_policy: tuple[bool, ...]  # for each of them, whether the policy at the start of the update sampled all of it
    tokens: int  # number of sampled tokens in the rows of all siblings, also of those not in `examples`
    trajectories: int  # number of siblings that have a sampled token, also of those not in `examples`
    weight: float = 1.0  # factor of the loss of its tokens, see `weights_of_kinds`


@dataclass(frozen=True, slots=True)
class TrainJob:
    """The complete input of an update. A row is one token sequence with its learned tokens marked as sampled."""

    base: str  # model directory or hub id of the base model
    base_sha256: str  # the base model's fingerprint, which is written into the manifest of the new policy
    parent: Path | None  # adapter directory of the policy that the update starts from; `None`: a new LoRA
    target: Path  # directory where the new policy is published, `adapters/NAME@STEP`
    config: TrainConfig  # settings of the update
    champion: Path | None = None  # adapter directory of the champion; `None` if the champion is the base model itself
    groups: tuple[TrainGroup, ...] = ()  # to train on by the rewards of their siblings; equal rewards teach nothing
    demonstrations: tuple[Row, ...] = ()  # rows of answers to imitate
    # Rows of earlier runs with a high reward. If `config.rehearse_from` is set, each step on groups also imitates a few
    # rows drawn from these and from `demonstrations`.
    rehearsal: tuple[Row, ...] = ()
    pairs: tuple[Pair, ...] = ()  # pairs of a better and a worse row
    evaluation: tuple[TrainGroup, ...] = ()  # never trained on; evaluated on if `config.eval_steps` is set
    others: tuple[str, ...] = ()  # ids of trajectories that are in no group but from which some of the rows were made
    mean_reward: float | None = None  # of all scored trajectories, for progress lines; `None` if none was scored
    metrics: JSON = field(default_factory=dict[str, Any])  # counts for people: what it was made from, and left out
    # Entries of the policy's manifest: parent, judges, and keyed digests of the groups. No ids and no texts.
    lineage: JSON = field(default_factory=dict[str, Any])

    @property
    def rows(self) -> tuple[Row, ...]:
        """All token sequences of the job except the evaluation groups': of groups, demonstrations, rehearsal, pairs."""
        of_groups = (row for sibling in _siblings(self.groups) for row in sibling.example.rows)
        of_pairs = (row for pair in self.pairs for row in (pair.chosen, pair.rejected))
        return (*of_groups, *self.demonstrations, *self.rehearsal, *of_pairs)

    @property
    def rehearsed(self) -> tuple[Row, ...]:
        """Rows from which each step on groups draws a few to imitate; none if `config.rehearse_from` is `None`."""
        return () if self.config.rehearse_from is None else (*self.rehearsal, *self.demonstrations)

    @property
    def lessons(self) -> tuple[Lesson, ...]:
        """A lesson (the loss's input) for each training group; groups with equal rewards are left out."""
        return _lessons(self.groups, self)

    @property
    def evaluated(self) -> tuple[Lesson, ...]:
        """Lessons of the evaluation groups, which are never trained on; none if `config.eval_steps` is `None`."""
        groups = () if self.config.eval_steps is None else self.evaluation
        return _lessons(groups, self)

    def computed(self, group: TrainGroup) -> tuple[Sibling, ...]:
        """The siblings of a group that go through the model, with the advantages of their tokens."""
        there = [each for each in group.siblings if each.example.rows]
        anchors = Anchors([each.example for each in there], self.config.anchor_weight)
        anchored = (replace(each, example=anchors.of_tokens(each.example)) for each in there)
        # A sibling with advantage 0 has no gradient, but the KL term holds it near the reference too, and its turns may
        # have others.
        held = self.config.loss.kl_coefficient or self.config.anchor_weight
        return tuple(each for each in anchored if held or each.example.advantage != 0.0)

    @property
    def group_ids(self) -> tuple[str, ...]:
        """Ids of the job's training groups, in the order of `groups`."""
        return tuple(group.id for group in self.groups)

    @property
    def trajectory_ids(self) -> frozenset[str]:
        """Ids of the trajectories in the job's training groups."""
        return frozenset(each.trajectory_id for each in _siblings(self.groups))

    @property
    def evaluated_ids(self) -> frozenset[str]:
        """Ids of the trajectories in the job's evaluation groups."""
        return frozenset(each.trajectory_id for each in _siblings(self.evaluation))

    @property
    def fingerprint(self) -> str:
        """Hex sha256 of the content of the job's file, by which two jobs are compared; equal jobs have equal ones."""
        return hashlib.sha256(_to_bytes(self)).hexdigest()


def _siblings(groups: Iterable[TrainGroup]) -> list[Sibling]:
    return [sibling for group in groups for sibling in group.siblings]


def claim(directory: Path, job: TrainJob) -> None:
    """Makes `directory` the job's by writing its file; `TrainingError` if it is another job's or cannot be written."""
    # Compared byte for byte: equal jobs give equal bytes, and an update that goes on must be exactly the same.
    content, path = _to_bytes(job), directory / JOB
    if not path.exists():
        write_file(path, content)
    elif path.read_bytes() != content:
        raise TrainingError(
            f"{directory} belongs to another update; delete it, or give this one a directory of its own"
        )


def read_job(directory: Path) -> TrainJob | None:
    """Reads the job in `directory`; `None` if there is none. `TrainingError`: it is damaged or of another format."""
    found = read_file(directory / JOB)
    if found is None:
        return None
    arrays, facts = found
    if facts["format"] != _FORMAT:
        raise TrainingError(f"{directory} was begun by another release; delete it, and the update begins anew")
    # The rows stand one after another, in the order of `_to_bytes`. So the fields below must be read in that order.
    rows = _rows_of(arrays)
    advantages = iter(arrays["advantages"].tolist())
    counts = iter(arrays["rows_of_siblings"].tolist())

    def sibling(trajectory_id: str, on_policy: bool) -> Sibling:
        example = Example(tuple(next(rows) for _ in range(next(counts))), next(advantages))
        return Sibling(trajectory_id, example, on_policy)

    def groups(written: Iterable[JSON]) -> tuple[TrainGroup, ...]:
        return tuple(
            TrainGroup(group["id"], tuple(sibling(key, own) for key, own in group["siblings"]), group["kind"])
            for group in written
        )

    settings = facts["config"]
    return TrainJob(
        **{name: facts[name] for name in _PLAIN},
        parent=None if facts["parent"] is None else Path(facts["parent"]),
        champion=None if facts["champion"] is None else Path(facts["champion"]),
        target=Path(facts["target"]),
        config=TrainConfig(**settings | {"loss": LossConfig(**settings["loss"])}),
        groups=groups(facts["groups"]),
        demonstrations=tuple(next(rows) for _ in range(facts["demonstrations"])),
        rehearsal=tuple(next(rows) for _ in range(facts["rehearsal"])),
        pairs=tuple(Pair(next(rows), next(rows), source) for source in facts["pairs"]),
        evaluation=groups(facts["evaluation"]),
        others=tuple(facts["others"]),
    )


def _to_bytes(job: TrainJob) -> bytes:
    siblings = _siblings((*job.groups, *job.evaluation))
    of_evaluation = (row for sibling in _siblings(job.evaluation) for row in sibling.example.rows)
    arrays = _arrays_of((*job.rows, *of_evaluation)) | {
        "advantages": np.array([sibling.example.advantage for sibling in siblings], dtype=np.float64),
        "rows_of_siblings": np.array([len(sibling.example.rows) for sibling in siblings], dtype=np.int64),
    }
    facts = {name: getattr(job, name) for name in _PLAIN} | {
        "format": _FORMAT,
        "parent": None if job.parent is None else str(job.parent),
        "champion": None if job.champion is None else str(job.champion),
        "target": str(job.target),
        "config": asdict(job.config),
        "groups": _group_records(job.groups),
        "demonstrations": len(job.demonstrations),
        "rehearsal": len(job.rehearsal),
        "pairs": [pair.source for pair in job.pairs],
        "evaluation": _group_records(job.evaluation),
        "others": job.others,
    }
    return file_content(arrays, facts)


def _group_records(groups: Iterable[TrainGroup]) -> list[JSON]:
    return [
        {"id": group.id, "kind": group.kind}
        | {"siblings": [[each.trajectory_id, each.on_policy] for each in group.siblings]}
        for group in groups
    ]


_PLAIN = ("base", "base_sha256", "mean_reward", "metrics", "lineage")  # fields of a job that the file holds as they are
# fp64, as Python's floats are: a job that is read must equal the job that was written.
_DTYPES = {"ids_T": np.int64, "sampled_T": np.bool_, "logprobs_T": np.float64, "temperature_T": np.float64}

_TEACHER = "teacher_T"  # in the file only if a row has it


def _arrays_of(rows: Sequence[Row]) -> dict[str, np.typing.NDArray[Any]]:
    # The rows one after another: T here counts the tokens of all rows together.
    arrays: dict[str, Any] = {"tokens_of_rows": np.array([len(row.ids_T) for row in rows], dtype=np.int64)}
    for name, dtype in _DTYPES.items():
        arrays[name] = np.array([value for row in rows for value in getattr(row, name)], dtype=dtype)
    if any(row.teacher_T for row in rows):
        nothing = (math.nan,)  # stands for a row without a teacher
        arrays[_TEACHER] = np.array([value for row in rows for value in row.teacher_T or nothing * len(row.ids_T)])
    return arrays


def _rows_of(arrays: Mapping[str, np.typing.NDArray[Any]]) -> Iterator[Row]:
    ends = np.cumsum(arrays["tokens_of_rows"])[:-1]
    names = [*_DTYPES, *([_TEACHER] if _TEACHER in arrays else [])]
    columns = [[part.tolist() for part in np.split(arrays[name], ends)] for name in names]
    for ids, sampled, logprobs, temperature, *taught in zip(*columns, strict=True):
        teacher = next((tuple(values) for values in taught if not math.isnan(values[0])), None)
        yield Row(tuple(ids), tuple(sampled), tuple(logprobs), tuple(temperature), teacher)


def file_content(arrays: Arrays, facts: JSON) -> bytes:
    """Returns the bytes of a file of a job directory: safetensors with `arrays`, and `facts` as JSON in the header."""
    written = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(written, metadata={_FACTS: json.dumps(facts, sort_keys=True)})


def write_file(path: Path, content: bytes) -> None:
    """Writes a file of a job directory, or replaces it atomically; raises `TrainingError` if that fails."""
    try:
        for directory in (path.parent.parent, path.parent):  # `parents=True` would make the upper one with another mode
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # One name for all drafts: a checkpoint is large, and what killed jobs left must not add up.
        with replacing(path, draft=path.with_name(f".{path.name}.unfinished")) as file:
            file.write(content)
    except OSError as error:
        raise TrainingError(
            f"{path} could not be written ({error.strerror}); what was there before is whole. Make room for "
            f"{len(content):,} bytes that may be written there, and run it again: it goes on from there"
        ) from error


def write_arrays(path: Path, arrays: Arrays, facts: JSON | None = None) -> None:
    """Writes arrays and facts to a file of a job directory, as `write_file` does."""
    write_file(path, file_content(arrays, facts or {}))


def read_file(path: Path) -> tuple[dict[str, np.typing.NDArray[Any]], dict[str, Any]] | None:
    """Returns the arrays and JSON object of a file; `None` if it is missing, `TrainingError` if it is unreadable."""
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


PhaseName = Literal["imitate", "prefer", "groups"]

# Rehearsed rows a step: as many as a group has siblings, so that they cost about as much as one group more.
_REHEARSED = 8


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of the plan."""

    phase: PhaseName  # "imitate" for demonstrations, "prefer" for pairs, or "groups"
    number: int  # number of the step within its phase, from 0
    epoch: int  # number of the pass over the phase's items, from 0
    last: bool  # whether this is the last step of its phase, or of the update
    items: tuple[int, ...]  # indices of the demonstrations, pairs or lessons (groups) that the step learns from
    of: int = 1  # number of steps of its phase in the plan
    rehearsed: tuple[int, ...] = ()  # indices into the job's `rehearsed` rows, which the step imitates as well


def _lessons(groups: Sequence[TrainGroup], job: TrainJob) -> tuple[Lesson, ...]:
    taught = [group for group in groups if group.teaches]
    lessons = [_lesson(group, job) for group in taught]
    if job.config.loss.loss.aggregation != "token_mean":
        return tuple(lessons)  # the others weigh trajectories alike, whatever their lengths
    weights = weights_of_kinds(
        [group.kind for group in taught],
        [lesson.tokens for lesson in lessons],
        [lesson.trajectories for lesson in lessons],
    )
    return tuple(replace(lesson, weight=weight) for lesson, weight in zip(lessons, weights, strict=True))


def _lesson(group: TrainGroup, job: TrainJob) -> Lesson:
    there = [each for each in group.siblings if each.example.rows]
    computed = job.computed(group)
    return Lesson(
        examples=tuple(each.example for each in computed),
        on_policy=tuple(each.on_policy for each in computed),
        # Of all siblings, computed or not: the loss is a mean over the group.
        tokens=sum(each.example.sampled for each in there),
        trajectories=len(there),
    )


def plan_of(job: TrainJob) -> tuple[Step, ...]:
    """Returns the optimizer steps of an update in order, at most `total_steps`; none if there is nothing to learn."""
    phases: tuple[tuple[PhaseName, int], ...] = (
        ("imitate", len(job.demonstrations)),
        ("prefer", len(job.pairs)),
        ("groups", len(job.lessons)),
    )
    steps = [step for name, items in phases for step in _steps(name, items, job)]
    most = job.config.total_steps
    if most is not None and most < len(steps):
        steps = steps[:most]
        steps[-1] = replace(steps[-1], last=True)  # the last step of a phase is always kept in a checkpoint
    of_phase = Counter(step.phase for step in steps)
    return tuple(replace(step, of=of_phase[step.phase]) for step in steps)


def _steps(phase: PhaseName, items: int, job: TrainJob) -> Iterator[Step]:
    if not items:
        return
    config = job.config
    batch, batches = config.batch_size, config.gradient_accumulation_steps
    each_epoch = min(config.minibatches, items) if batch is None else math.ceil(items / (batch * batches))
    edges = [round(i * items / each_epoch) for i in range(each_epoch + 1)]
    known = len(job.rehearsed) if phase == "groups" else 0
    for epoch in range(config.epochs):
        # An item is a whole group: siblings share what they begin with, and a step's normalisers count all of them.
        order = random.Random(f"{config.seed} {phase} {epoch}").sample(range(items), items)
        for number, (first, stop) in enumerate(pairwise(edges), start=epoch * each_epoch):
            # From seed and number alone, not from a running generator: a step after a kill draws the same rows.
            drawn = random.Random(f"{config.seed} rehearse {number}").sample(range(known), min(known, _REHEARSED))
            last = number + 1 == config.epochs * each_epoch
            yield Step(phase, number, epoch, last, tuple(order[first:stop]), rehearsed=tuple(sorted(drawn)))
