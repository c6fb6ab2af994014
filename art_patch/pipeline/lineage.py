"""What a policy's manifest says of the data of its update, and the same update made again from the store.

The manifest names no run and no group: it has digests of their ids, and of the rows (token sequences) that the update
was given, all under the project's key (`lineage.key`). With the advantages beside them, the update can be made again as
long as the store has the runs, whatever became of their scores. What was erased is told by its digest.

A sibling in the manifest is `[digest of the run, digest of its rows, advantage, on_policy]`, in the order in which the
update had it. A sibling without rows, which the update did not compute, has no digest of rows.

`reproduce` makes the update again and compares the weights; nothing is published or registered. The same groups with
the advantages of then, the same parent and settings are trained on in a directory that is deleted afterwards. If
something is missing or another one, no update is made, and the result says all that it lacks. An erasure deletes what a
killed reproduction left, since it holds a copy of the tokens that were trained on.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from art_patch import policies, training
from art_patch._lib.key_files import made_key, read_key
from art_patch._lib.version import __version__
from art_patch.errors import AdapterRejected, ConfigError, ModelNotFound, NotFound, TrainingError
from art_patch.pipeline.carry_over import REPRODUCTION
from art_patch.pipeline.cycle_run import Cycle
from art_patch.pipeline.running_cycle import project_lock
from art_patch.store import Store
from art_patch.types import IMPORTED, JSON, Group, Policy

_KEY_FILE = "lineage.key"  # in the project's directory
_UPDATE = "update"  # entry of the manifest's data
_DIGITS = 16  # hex digits; enough to tell the runs of one update apart
_ANY_RANK = 1 << 16  # nothing is served
_MOST_THREADS = 1_024  # of all processes of an update
TOLERANCE = 1e-6
"""The largest difference of two weights that are called equal."""


def origin(
    run: Cycle, champion: Policy, start: Policy, groups: Sequence[Group], job: training.TrainJob
) -> dict[str, Any]:
    """Return what the manifest of a job's policy says of its origin: parents, judges, and digests of its data."""
    kept = {group.id: [each.trajectory_id for each in group.siblings] for group in job.groups}
    siblings = ((group.id, each) for group in groups if group.id in kept for each in group.trajectories)
    scores = (score for key, each in siblings for score in each.scores if score.group_id == key)
    run.adapters.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # the key is the first file that a job writes
    judges = sorted({(score.judge, score.rubric or "") for score in scores if score.judge is not None})
    key = made_key(run.adapters.parent / _KEY_FILE)
    update = {
        "groups": [
            {"group": _digest(key, group.id), "kind": group.kind}
            | {"siblings": [_sibling(key, each) for each in group.siblings]}
            for group in job.groups
        ],
        "demonstrations": len(job.demonstrations),
        "pairs": len(job.pairs),
        "rehearsed": len(job.rehearsed),
        "taught": sum(row.teacher_T is not None for row in job.rows),
    }
    return {
        "parent": start.name,
        "champion": champion.name,
        "judges": [{"judge": judge, "rubric": rubric} for judge, rubric in judges],
        policies.DATA: policies.data_digests(key, kept, job.others) | {_UPDATE: update},
    }


def _sibling(key: str, sibling: training.Sibling) -> list[Any]:
    example = sibling.example
    rows = _digest_of_rows(key, example.rows) if example.rows else None
    return [_digest(key, sibling.trajectory_id), rows, example.advantage, sibling.on_policy]


def _digest(key: str, of: str) -> str:
    return hmac.digest(key.encode(), json.dumps([of]).encode(), hashlib.sha256).hex()[:_DIGITS]


def _digest_of_rows(key: str, rows: Sequence[training.Row]) -> str:
    import numpy as np

    digest = hmac.new(key.encode(), digestmod=hashlib.sha256)
    for row in rows:
        digest.update(str(len(row.ids_T)).encode() + b"\0")
        for values, dtype in (
            (row.ids_T, np.int64), (row.sampled_T, np.bool_), (row.logprobs_T, np.float64),
            (row.temperature_T, np.float64),
        ):  # fmt: skip
            digest.update(np.array(values, dtype=dtype).tobytes())
    return digest.hexdigest()[:_DIGITS]


_BECAME = {
    "erased": "erased, or too old to be kept",
    "withdrawn": "not to be learned from any more",
    "changed": "recorded otherwise than they were, as after a late call",  # their rows are others than at the update
}
"""What became of runs without which an update cannot be made again, in words."""


def _groups_again(
    store: Store, directory: Path, policy: str, update: JSON, config: training.TrainConfig
) -> tuple[tuple[training.TrainGroup, ...], dict[str, tuple[str, ...]]]:
    """Read the groups of a policy's update, which its manifest in the project's `directory` names, from the store.

    Also return the digests of the runs for which that is not possible, by what became of them.
    """
    key = read_key(directory / _KEY_FILE) or ""
    learned = store.reports.learned(policy)
    ids = {_digest(key, group): group for group in learned.groups}
    runs = store.read.members(learned.groups)
    known = {_digest(key, run): run for run in {*learned.runs, *runs}}
    allowed = store.consent.learned_from(sorted(known.values()))
    missing: dict[str, list[str]] = {became: [] for became in _BECAME}

    def siblings(these: Sequence[Any]) -> Iterator[training.Sibling]:
        there = {each.id: each for each in store.read.trajectories([known[one[0]] for one in these if one[0] in known])}
        for digest, of_rows, advantage, on_policy in these:
            run = known.get(digest, "")
            sibling = training.Sibling(run or digest, training.Example((), advantage), on_policy)
            if of_rows is None:  # it was not computed, so nothing of it is needed
                yield sibling
            elif run not in there:
                missing["erased"].append(digest)
            elif run not in allowed:
                missing["withdrawn"].append(digest)
            else:
                rows, _ = training.rows_and_report(
                    there[run], max_tokens=config.max_tokens, learn_truncated=config.learn_truncated
                )
                if _digest_of_rows(key, rows) != of_rows:
                    missing["changed"].append(digest)
                yield replace(sibling, example=training.Example(rows, advantage))

    # A group that the policy is not noted to have learned from was left out of the update: its runs were too far.
    groups = tuple(
        training.TrainGroup(ids[group["group"]], tuple(siblings(group["siblings"])), group["kind"])
        for group in update["groups"]
        if group["group"] in ids
    )
    return groups, {became: tuple(digests) for became, digests in missing.items() if digests}


# --- the update made again ---

_Name = Annotated[str, Field(pattern=f"^{policies.NAME_PATTERN.pattern}$")]


class _Group(BaseModel):
    group: str
    kind: str
    siblings: list[tuple[str, str | None, float, bool]]


class _Update(BaseModel):
    groups: list[_Group]
    demonstrations: int
    pairs: int
    rehearsed: int
    taught: int = 0


class _Made(BaseModel, extra="allow"):
    threads: Annotated[int, Field(ge=1, le=_MOST_THREADS)]


class _Record(BaseModel):
    """The parts of a manifest that an update is made from again: somebody may have edited the file."""

    parent: _Name
    champion: _Name
    art_patch: str
    made_with: _Made
    update: _Update


@dataclass(frozen=True, slots=True)
class Reproduction:
    """The result of making an update again."""

    policy: str
    # Kind of the reason -> the reason in words; without one, the update was made.
    why_not: Mapping[str, str] = field(default_factory=dict[str, str])
    # Digests, as in the manifest, of the runs that are erased, withdrawn or changed, by these words.
    runs_missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    # What the update was computed with and is another one here -> (then, now).
    made_with: Mapping[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    groups: int = 0
    runs: int = 0  # siblings with rows in these groups
    weights: int = 0  # number of weights that were compared
    largest_difference: float | None = None  # of two weights; `None` if no update was made
    took_s: float = 0.0

    @property
    def equal(self) -> bool | None:
        """Whether no weight differs by more than `TOLERANCE`; `None` if no update was made."""
        return None if self.largest_difference is None else self.largest_difference <= TOLERANCE


@dataclass(frozen=True, slots=True)
class _Input:
    """The input of an update, as far as it is still there, and the reasons why it cannot be made again."""

    why_not: dict[str, str]
    job: training.TrainJob | None = None  # not to be run if there is a reason
    runs_missing: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    made_with: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    threads: int = 1  # of the process that made the update


def reproduce(
    store: Store, adapters: Path, name: str, *, anyway: bool = False, progress: Callable[[int, int, str], None]
) -> Reproduction:
    """Make the update of the policy `name` again, and compare; with `anyway`, also if packages or device differ.

    Raises `NotFound` if there is no such policy, `Busy` if another process makes an update again, and `TrainingError`
    as the update itself.
    """
    if (policy := store.ledger.policy(name)) is None:
        raise NotFound(f"there is no policy {name!r}; `art-patch policies` lists them")
    its = _input_of(store, adapters, policy)
    if its.made_with and not anyway:
        differences = ", ".join(f"{key} {then} (here {now})" for key, (then, now) in its.made_with.items())
        its.why_not["made_with"] = f"it was made with {differences}, so rounding differs; try it with --anyway"
    groups = its.job.groups if its.job is not None else ()
    runs = sum(bool(each.example.rows) for group in groups for each in group.siblings)
    found = Reproduction(name, its.why_not, its.runs_missing, its.made_with, len(groups), runs)
    if its.job is None or its.why_not:
        return found
    began, work = time.monotonic(), adapters.parent / REPRODUCTION
    with project_lock(adapters.parent, REPRODUCTION):
        shutil.rmtree(work, ignore_errors=True)  # one that was killed left it
        try:
            _run(its.job, its.threads, work, progress)
            weights, largest = _compared(adapters / name, its.job.target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return replace(found, weights=weights, largest_difference=largest, took_s=time.monotonic() - began)


def _input_of(store: Store, adapters: Path, policy: Policy) -> _Input:
    if policy.path is None:
        return _Input({"no_update": "it is the base model itself, which no update made"})
    if IMPORTED in policy.metrics:
        return _Input({"imported": "it was imported; the project that trained it has what it learned from"})
    why_not: dict[str, str] = {}
    base = _base_of(policy, why_not)
    if base is None or _lacks_files(adapters, policy.name, base, "own", why_not):
        return _Input(why_not)
    manifest = policies.read_json(adapters / policy.name, policies.MANIFEST)
    data, config = manifest.get(policies.DATA), _config_of(manifest, why_not)
    update = data.get(_UPDATE) if isinstance(data, dict) else None
    if update is None or "made_with" not in manifest:
        return _Input({"no_record": "the release that made it did not record what it was given, row by row"})
    try:
        _Record.model_validate(manifest | {"update": update})
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        return _Input({"no_record": f"what its manifest says of its update cannot be read ({where:.100})"})
    if config is None:
        return _Input(why_not)
    names = {"parent": manifest["parent"]}
    if config.loss.kl_coefficient and config.reference == "champion":
        names["champion"] = manifest["champion"]
    for whose, name in names.items():
        if _step(name):
            _lacks_files(adapters, name, base, whose, why_not)
    if given := {key: update[key] for key in ("demonstrations", "pairs", "rehearsed") if update[key]}:
        these = ", ".join(f"{count} {what}" for what, count in given.items())
        why_not["given"] = f"it also learned from given answers, which no record tells exactly: {these}"
    if update.get("taught"):
        why_not["teacher"] = "it learned from a teacher's log-probabilities, which are not recorded"
    if config.early_stop is not None:
        why_not["early_stop"] = "it could be stopped early by evaluation groups, which are not recorded"
    # An evaluation changes no weight.
    config = replace(config, eval_steps=None, early_stop=None)
    try:
        groups, missing = _groups_again(store, adapters.parent, policy.name, update, config)
    except ConfigError as error:
        return _Input(why_not | {"no_key": f"the digests in its manifest cannot be compared: {error}"})
    job = training.TrainJob(
        base=policy.base,
        base_sha256=policy.base_sha256,
        parent=_adapter(adapters, manifest["parent"]),
        champion=_adapter(adapters, manifest["champion"]),
        target=adapters.parent / REPRODUCTION / "adapters" / policy.name,
        config=config,
        groups=groups,
    )
    made: JSON = manifest["made_with"] | {"art_patch": manifest["art_patch"]}
    here = training.made_with(config) | {"art_patch": __version__}
    # The number of threads is no hindrance: it is set to what it was.
    others = {key: (made.get(key), here[key]) for key in here if key != "threads" and made.get(key) != here[key]}
    if made["threads"] * config.processes > _MOST_THREADS:
        why_not["settings"] = f"it was made with more than {_MOST_THREADS} threads"
    for became, digests in missing.items():
        why_not[became] = f"of the runs that it learned from, {len(digests)} are {_BECAME[became]}"
    return _Input(why_not, job, missing, others, made["threads"])


def _base_of(policy: Policy, why_not: dict[str, str]) -> policies.BaseModel | None:
    try:
        base = policies.read_base_model(policies.resolve_model_dir(policy.base))
    except ModelNotFound as error:
        why_not["base"] = f"its base model cannot be read: {error}"
        return None
    if base.sha256 != policy.base_sha256:
        why_not["base"] = (
            f"the files of its base model are others: {policy.base} has the fingerprint {base.sha256[:12]}, and it was "
            f"trained on {policy.base_sha256[:12]}"
        )
        return None
    return base


def _lacks_files(adapters: Path, name: str, base: policies.BaseModel, whose: str, why_not: dict[str, str]) -> bool:
    try:
        policies.validate_adapter(adapters, name, base, max_rank=_ANY_RANK)
    except AdapterRejected as error:
        why_not[f"files_of_{whose}"] = f"the files of {'itself' if whose == 'own' else f'its {whose}'}: {error}"
        return True
    return False


def _config_of(manifest: JSON, why_not: dict[str, str]) -> training.TrainConfig | None:
    try:
        settings: dict[str, Any] = dict(manifest["config"])
        loss: dict[str, Any] = settings.pop("loss")
        return training.TrainConfig(**settings, loss=training.LossConfig(**loss))
    except (ConfigError, TypeError, KeyError) as error:
        why_not["settings"] = f"this release does not know its settings: {error}"
        return None


def _step(name: str) -> int:
    return int(name.rpartition("@")[2])


def _adapter(adapters: Path, name: str) -> Path | None:
    return adapters / name if _step(name) else None  # step 0 is the base model


def _run(job: training.TrainJob, threads: int, work: Path, progress: Callable[[int, int, str], None]) -> None:
    import torch

    before = torch.get_num_threads()
    # Sums are divided among the threads, so their number changes the rounding. Processes of one update share them.
    torch.set_num_threads(threads * job.config.processes)
    try:
        training.run_job(job, work / "training" / job.target.name, progress=progress)
    finally:
        torch.set_num_threads(before)


def _compared(one: Path, other: Path) -> tuple[int, float]:
    """Return the number of weights of an adapter, and their largest difference from another adapter's."""
    import numpy as np
    from safetensors.numpy import load_file

    ours, theirs = load_file(one / policies.WEIGHTS), load_file(other / policies.WEIGHTS)
    if ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in ours):
        raise TrainingError(f"{one.name} was made again, and has other layers now; take the peft release of then")
    gaps = (np.abs(each.astype(np.float64) - theirs[name]).max() for name, each in ours.items())
    return sum(each.size for each in ours.values()), float(max(gaps))
