"""What a policy's manifest says of the data of its update, and the same data read from the store again.

The manifest names no run and no group: it has digests of their ids, and of the rows (token sequences) that the update
was given, all under the project's key (`lineage.key`). With the advantages beside them, the update can be made again as
long as the store has the runs, whatever became of their scores. What was erased is told by its digest.

A sibling in the manifest is `[digest of the run, digest of its rows, advantage, on_policy]`, in the order in which the
update had it. A sibling without rows, which the update did not compute, has no digest of rows.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from art_patch import policies, training
from art_patch._lib.key_files import made_key, read_key
from art_patch.pipeline.cycle_run import Cycle
from art_patch.store import Store
from art_patch.types import JSON, Group, Policy

_KEY_FILE = "lineage.key"  # in the project's directory
_UPDATE = "update"  # entry of the manifest's data
_DIGITS = 16  # hex digits; enough to tell the runs of one update apart


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


@dataclass(frozen=True, slots=True)
class Remade:
    """The groups of an update as the store has them now, and the digests of the runs for which that is not so."""

    groups: tuple[training.TrainGroup, ...] = ()
    gone: tuple[str, ...] = ()  # erased, or deleted because they were too old
    withdrawn: tuple[str, ...] = ()  # not to be learned from any more
    changed: tuple[str, ...] = ()  # with other rows than at the update, such as of a call that was recorded later


def written(manifest: Mapping[str, Any]) -> JSON | None:
    """Return what a manifest says of the data of its update; `None` if its release did not keep enough of it."""
    data: Any = manifest.get(policies.DATA)
    return data.get(_UPDATE) if isinstance(data, dict) else None


def remade(store: Store, directory: Path, policy: str, update: JSON, config: training.TrainConfig) -> Remade:
    """Read the groups of a policy's update, which its manifest in the project's `directory` names, from the store."""
    key = read_key(directory / _KEY_FILE) or ""
    learned = store.reports.learned(policy)
    ids = {_digest(key, group): group for group in learned.groups}
    runs = store.read.members(learned.groups)
    known = {_digest(key, run): run for run in {*learned.runs, *runs}}
    allowed = store.consent.learned_from(sorted(known.values()))
    found: dict[str, list[str]] = {"gone": [], "withdrawn": [], "changed": []}

    def siblings(these: Sequence[Any]) -> Iterator[training.Sibling]:
        there = {each.id: each for each in store.read.trajectories([known[one[0]] for one in these if one[0] in known])}
        for digest, of_rows, advantage, on_policy in these:
            run = known.get(digest, "")
            sibling = training.Sibling(run or digest, training.Example((), advantage), on_policy)
            if of_rows is None:  # it was not computed, so nothing of it is needed
                yield sibling
            elif run not in there:
                found["gone"].append(digest)
            elif run not in allowed:
                found["withdrawn"].append(digest)
            else:
                rows, _ = training.rows_and_report(
                    there[run], max_tokens=config.max_tokens, learn_truncated=config.learn_truncated
                )
                if _digest_of_rows(key, rows) != of_rows:
                    found["changed"].append(digest)
                yield replace(sibling, example=training.Example(rows, advantage))

    # A group that the policy is not noted to have learned from was left out of the update: its runs were too far.
    groups = tuple(
        training.TrainGroup(ids[group["group"]], tuple(siblings(group["siblings"])), group["kind"])
        for group in update["groups"]
        if group["group"] in ids
    )
    return Remade(groups, **{name: tuple(digests) for name, digests in found.items()})
