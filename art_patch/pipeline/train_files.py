"""Trains a candidate on training files in place of recorded runs. The next cycle gates it, as any other candidate.

Conversations are imitated, then preferences are learned, by the first two phases of an update. It starts from the
champion, or from the learner beside upstream, and never from a candidate that a gate rejected. Neither an engine nor a
judge is needed. A command that was killed and is run again goes on with the update that it had begun.

A line whose scenario is held out in the store teaches nothing, or the gate would ask what the candidate has learned by
heart. The store knows nothing of whom a file is about: an erasure of a user does not name this policy. Its metrics name
the files, and its manifest has their sha256.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

from art_patch import formats, policies, rewards, serving, training
from art_patch.errors import ConfigError, MalformedFile, NotFound, TrainingError, TransitionError
from art_patch.pipeline.carry_over import discard_jobs, start_of, unfinished_jobs
from art_patch.pipeline.cycle_run import Cycle, CycleConfig, Progress, why_none_serves
from art_patch.pipeline.lineage import origin
from art_patch.pipeline.running_cycle import exclusive_cycle
from art_patch.pipeline.train_given import CORRECTIONS_UPTO, base_text, scenario_key_of
from art_patch.pipeline.train_policy import adapter_of, check_can_train, next_step, run_job, why_untestable
from art_patch.store import Filter, Store
from art_patch.types import JSON, Policy, Trajectory

Lines = Iterator[tuple[str, Sequence[Trajectory]]]
"""Lines of training files: the place, such as `chat.jsonl, line 3`, and what `formats.bundles_of` made of the line."""

_HELD_OUT = "held out for the gate"
_RECORDED = 32  # runs: enough to see how the engine renders a prompt
_EVERY = 200  # lines that are in memory at a time, and between two reports of progress


@dataclass(frozen=True, slots=True)
class FileTraining:
    """The result of `train_on_files`."""

    policy: Policy  # the new candidate
    start: str  # the policy from which the update started
    demonstrations: int  # rows that were imitated
    pairs: int  # preferences that were learned
    left_out: dict[str, tuple[int, str]]  # by reason: number of lines that are not learned, and place of the first
    metrics: JSON  # of the update
    untestable: str | None  # why no gate can test it yet


def read_files(files: Iterable[str], *, now: float) -> Lines:
    """Yield all lines of training files; the first one that is wrong raises a `MalformedFile` with its place.

    Files of JSON lines or Parquet, each line in any format of `formats.bundles_of` that has an answer to learn.
    """
    for file in files:
        if file == formats.STREAM:
            raise ConfigError("a file is read twice, once for its sha256, so `-` cannot be given; name a file")
        with formats.reading(file) as rows:
            for place, row in rows():
                try:
                    kind = formats.kind_of(row)
                    if kind in ("trajectories", "grpo"):
                        raise MalformedFile(
                            f"a line of format {kind} has no answer that is known to be good; export chat, sft or "
                            "preference"
                        )
                    runs = [bundle.trajectory for bundle in formats.bundles_of(row, at=now)]
                except MalformedFile as error:
                    raise MalformedFile(f"{file}, {place}: {error}; nothing was trained") from None
                yield f"{_name(file)}, {place}", runs


def train_on_files(
    store: Store, adapters: Path, config: CycleConfig, files: Sequence[str], *, who: str, progress: Progress,
    now: float | None = None,
) -> FileTraining:  # fmt: skip
    """Train a candidate on `files`, publish it, and enter it in the ledger. Of `config`, `train` and `across` are used.

    Raises:
        MalformedFile: a line is wrong; nothing was trained.
        NotFound: no policy serves or learns yet.
        TransitionError: a policy is being tested on the app's traffic.
        ConfigError: nothing in the files can be learned, or this machine or base model cannot be trained.
        TrainingError: the update failed; nothing was published.
        Busy: a cycle is running.
    """
    at = time.time() if now is None else now
    total = sum(1 for _ in read_files(files, now=at))  # all are checked before anything is done
    sums = _sums(files)
    with exclusive_cycle(store, adapters.parent, who=who) as held:
        leader, tested = held.store.ledger.leader(), held.store.ledger.challenger()
        if leader is None:
            raise NotFound(why_none_serves(held.store))
        if tested is not None:
            raise TransitionError(
                f"{tested.name} is being tested on the app's traffic, and may replace {leader.name}, from which this "
                "would start; train when the test has ended (`art-patch status`)"
            )
        nobody: Any = None  # no step below asks an engine or a judge
        engine, judge = cast("serving.EngineClient", nobody), cast("rewards.OrderedJudge", nobody)
        run = Cycle(held.store, judge, config, held.guarding(progress), at, engine, adapters, who)
        check_can_train(run, leader)
        start, _ = start_of(run.store.ledger.policies(), leader, config.train.start)
        rows = _rows(run, leader, read_files(files, now=at), total)
        if _sums(files) != sums:
            raise MalformedFile("a file was changed while it was read; nothing was trained; run the command again")
        job = _begun(run, _job(run, leader, start, rows, sums))
        run.metrics["train"] = dict(job.metrics)
        policy = run_job(run, leader, job)
        metrics = run.metrics["train"]
        return FileTraining(
            policy, start.name, len(rows.demonstrations), len(rows.pairs), dict(rows.left_out), metrics,
            why_untestable(run),
        )  # fmt: skip


def _name(file: str, *, whole: bool = False) -> str:
    """Return the name of a file, or its path, as the store can hold it: a file may be named by any bytes."""
    return (file if whole else Path(file).name).encode("utf-8", "backslashreplace").decode()


def _sums(files: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of each file by its name, or by its path if another has that name."""
    sums: dict[str, str] = {}
    for file in files:
        name = _name(file)
        try:
            with open(file, "rb") as opened:
                sums[_name(file, whole=name in sums)] = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise MalformedFile(f"{file} can no longer be read: {error.strerror}; nothing was trained") from error
    return sums


def _rows(run: Cycle, leader: Policy, lines: Lines, total: int) -> training.FileRows:
    chosen = Filter(policy=leader.name)
    recorded = [key for _, key in run.store.browse.ids(chosen, limit=_RECORDED)]
    text = base_text(leader.base, run.store.read.trajectories(recorded))
    held_out: list[str] = []

    def counted() -> Lines:
        for number in range(0, total, _EVERY):
            run.progress("read", number, total)
            page = list(islice(lines, _EVERY))
            left = _not_held_out(run, page)
            held_out.extend(place for place, runs in page if runs[0].id not in left)
            yield from (each for each in page if each[1][0].id in left)
        run.progress("read", total, total)

    found = training.rows_of_file(counted(), text.renderer(), max_tokens=run.config.train.max_tokens)
    if held_out:
        found = replace(found, left_out={_HELD_OUT: (len(held_out), held_out[0]), **found.left_out})
    if not found.demonstrations and not found.pairs:
        why = "; ".join(f"{count} lines, first {place}: {reason}" for reason, (count, place) in found.left_out.items())
        raise ConfigError(f"there is nothing to learn in these files ({why or 'they are empty'})")
    return found


def _not_held_out(run: Cycle, lines: Sequence[tuple[str, Sequence[Trajectory]]]) -> set[str]:
    """Return the ids of the first trajectories of all lines that a gate will not ask about, as far as is known."""
    firsts = [runs[0] for _, runs in lines]
    keys = {each.id: key for each in firsts if (key := scenario_key_of(each, run.config)) is not None}
    known = run.store.read.known_scenarios(set(keys.values()))
    return {each.id for each in firsts if (key := keys.get(each.id)) not in known or not known[key or ""].held_out}


def _job(run: Cycle, leader: Policy, start: Policy, rows: training.FileRows, sums: JSON) -> training.TrainJob:
    metrics: dict[str, Any] = {"start": start.name, "files": sums}
    metrics["left_out"] = {reason: count for reason, (count, _) in rows.left_out.items()}
    if since := start.metrics.get("train", {}).get(CORRECTIONS_UPTO):
        metrics[CORRECTIONS_UPTO] = since  # what the policy at the start was given, a later one need not learn again
    job = training.TrainJob(
        base=leader.base,
        base_sha256=leader.base_sha256,
        parent=adapter_of(start),
        champion=adapter_of(leader),
        target=run.adapters / f"{leader.model}@{next_step(run, leader)}",
        config=run.config.train,
        demonstrations=rows.demonstrations,
        pairs=rows.pairs,
        metrics=metrics,
    )
    lineage = origin(run, leader, start, (), job)
    return replace(job, lineage={**lineage, policies.DATA: {**lineage[policies.DATA], "files": sorted(sums.values())}})


def _begun(run: Cycle, job: training.TrainJob) -> training.TrainJob:
    """Return the same update as a killed command began it, under the name that it took; delete all other ones."""
    known = {policy.name for policy in run.store.ledger.policies()}
    for directory in unfinished_jobs(run.adapters.parent):
        with suppress(TrainingError):
            found = training.read_job(directory)
            if found is not None and replace(found, target=job.target).fingerprint == job.fingerprint:
                return found
        discard_jobs([directory], run.adapters, known)
    return job
