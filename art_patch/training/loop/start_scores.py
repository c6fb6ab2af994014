"""The log-probabilities of an update's data under the policy at its start, and which data is near enough to be trained.

`start_scores` computes them once for each update and stores them in the job directory. An update that is continued
after a kill reads them from there, because the model then no longer holds the policy from the start of the update. A
phase that begins after another one is scored anew (`phase_scores`): its ratios start at 1, whatever was learned before.

`without_far_rows` leaves out the rows (token sequences) that a policy far from the one at the start sampled. What their
siblings are compared with changes then, so the advantages of these move by a constant.

The suffix of a name gives the axes of a tensor: N sampled tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from art_patch.errors import TrainingError
from art_patch.training.data.rows import Example
from art_patch.training.kernels.scoring import Scorer
from art_patch.training.loop.job import Lesson, PhaseName, Sibling, TrainGroup, TrainJob, read_file, write_arrays
from art_patch.training.loop.loading import as_reference
from art_patch.training.loop.processes import Ranks

_START_FILE = "start.safetensors"


@dataclass(frozen=True, slots=True)
class StartScores:
    """Log-probabilities of the tokens in an update's data before its first optimizer step.

    Each field but the gaps has one tensor for each example (a trajectory or a pair), with the sampled tokens of all
    its rows (token sequences) in order.
    """

    old: tuple[Tensor, ...]  # of the trajectories in the training groups, under the policy at the start of the update
    pairs: tuple[Tensor, ...]  # of each pair, first the better row's, under the policy at the start
    # Largest difference between recorded and computed log-probability, see `UpdateMetrics.logprob_gap_nats`.
    gap_nats: float | None
    mean_gap_nats: float | None  # the mean of these differences
    reference: tuple[Tensor, ...] | None = None  # as `old`, under the reference policy; `None` without a KL term
    eval_old: tuple[Tensor, ...] = ()  # of the evaluation groups' trajectories, as `old`
    eval_reference: tuple[Tensor, ...] | None = None  # of the evaluation groups' trajectories, as `reference`


def start_scores(job: TrainJob, model: Any, scorer: Scorer, directory: Path, ranks: Ranks) -> StartScores:
    """Reads the scores from the job's `directory`, or computes them with `model` and writes them there.

    `model` is as it was loaded, before any optimizer step or restored checkpoint. Each process of the update computes a
    part, and the first writes. Raises `TrainingError` if the model gives no finite log-probability, or if the file
    cannot be read or written.
    """
    lessons = job.lessons
    asked = {"old": examples_of(lessons), "eval_old": examples_of(job.evaluated), "pairs": _pairs(job)}
    found = read_file(directory / _START_FILE)
    arrays = found[0] if found else _computed(job, model, scorer, asked, ranks)
    if found is None and ranks.first:
        write_arrays(directory / _START_FILE, arrays)
    asked |= {"reference": asked["old"], "eval_reference": asked["eval_old"]}
    # Read back in one piece and cut by example, in the order in which `_flat` wrote them.
    scores: dict[str, tuple[Tensor, ...]] = {
        name: torch.from_numpy(array).to(scorer.device).split([example.sampled for example in asked[name]])
        for name, array in arrays.items()
    }
    gaps = _gaps(asked["old"], scores["old"], [own for lesson in lessons for own in lesson.on_policy])
    largest, mean = (float(gaps.max()), float(gaps.mean())) if len(gaps) else (None, None)
    return StartScores(**scores, gap_nats=largest, mean_gap_nats=mean)


def phase_scores(
    phase: PhaseName, job: TrainJob, start: StartScores, scorer: Scorer, directory: Path, ranks: Ranks
) -> StartScores:
    """Returns `start` with the data of a later phase scored anew, under the policy with which the phase begins.

    A phase that was under way before a kill reads its scores from the job's `directory`.
    """
    if phase == "imitate":
        return start  # it compares with no policy
    name = {"groups": "old", "prefer": "pairs"}[phase]
    examples = examples_of(job.lessons) if phase == "groups" else _pairs(job)
    found = read_file(path := directory / f"{phase}.safetensors")
    if found is None:
        flat = _flat(scorer, examples, job.config.micro_batch_tokens, ranks)
        if ranks.first:
            write_arrays(path, {name: flat.cpu().numpy()})
    else:
        flat = torch.from_numpy(found[0][name]).to(scorer.device)
    return replace(start, **{name: flat.split([example.sampled for example in examples])})


def _pairs(job: TrainJob) -> list[Example]:
    return [Example((pair.chosen, pair.rejected)) for pair in job.pairs]


def examples_of(lessons: Sequence[Lesson]) -> list[Example]:
    """Returns the trajectories of all lessons in one list, in which `StartScores` counts them."""
    return [example for lesson in lessons for example in lesson.examples]


def _computed(
    job: TrainJob, model: Any, scorer: Scorer, asked: Mapping[str, Sequence[Example]], ranks: Ranks
) -> dict[str, Any]:
    tokens = job.config.micro_batch_tokens
    scores = {name: _flat(scorer, each, tokens, ranks) for name, each in asked.items()}
    # The loss drops single tokens that are not finite. Where none is finite the model itself is broken.
    if not all(bool(torch.isfinite(each).any()) for each in scores.values() if len(each)):
        raise TrainingError(
            f"the policy to start from ({job.parent or job.base}) has no finite log-probability for what was recorded: "
            "its weights are broken, or the dtype is too small; begin anew with start=base, or take dtype=float32"
        )
    # Before the first step the trained LoRA is still the policy at the start; only the reference must be loaded.
    if job.config.loss.kl_coefficient:
        with as_reference(model, job.champion if job.config.reference == "champion" else None):
            scores["reference"] = _flat(scorer, asked["old"], tokens, ranks)
            scores["eval_reference"] = _flat(scorer, asked["eval_old"], tokens, ranks)
    return {name: values.cpu().numpy() for name, values in scores.items()}


@torch.no_grad()
def _flat(scorer: Scorer, examples: Sequence[Example], max_tokens: int, ranks: Ranks) -> Tensor:
    first = [0, *accumulate(example.sampled for example in examples)]
    # Each process fills in its own examples and leaves 0 elsewhere, so the sum over processes holds all of them.
    flat = torch.zeros(first[-1], dtype=scorer.dtype, device=scorer.device)
    for pack in ranks.shard(examples, max_tokens):
        examples_E = pack.examples_E.tolist()  # E examples of the pack, which stand together among all
        flat[first[examples_E[0]] : first[examples_E[-1] + 1]] = scorer.score(pack).logprob_N
    return ranks.sum(flat)


def _gaps(examples: Sequence[Example], old: Sequence[Tensor], on_policy: Sequence[bool]) -> Tensor:
    gaps: list[Tensor] = []
    for example, its_old, own in zip(examples, old, on_policy, strict=True):
        if own:  # of another policy's tokens a gap is expected
            recorded = [logprob for row in example.rows for logprob in compress(row.logprobs_T, row.sampled_T)]
            gaps.append((its_old - torch.tensor(recorded, dtype=its_old.dtype, device=its_old.device)).abs())
    every = torch.cat(gaps) if gaps else torch.empty(0)
    return every[every.isfinite()]


def near_job(job: TrainJob, directory: Path) -> TrainJob:
    """Returns what an update, whose `directory` this is, trained on: the job without the rows that were too far."""
    found = read_file(directory / _START_FILE)
    if found is None:
        return job
    sizes = [example.sampled for example in examples_of(job.lessons)]
    old = torch.from_numpy(found[0]["old"]).split(sizes)
    return without_far_rows(job, StartScores(old, (), None, None))[0]


def without_far_rows(job: TrainJob, start: StartScores) -> tuple[TrainJob, StartScores, int]:
    """Returns the job and its scores without rows above `max_drift_nats`, and the number of these rows.

    The drift of a row is the k2 estimate of KL(policy that sampled || policy at the start) per token.
    """
    most = job.config.max_drift_nats
    if most is None:
        return job, start, 0
    kept: dict[tuple[str, str], list[bool]] = {}
    for (group, sibling), old_N in zip(_scored(job), start.old, strict=True):
        drifts = map(_drift_nats, sibling.example.rows, _by_row(sibling.example, old_N))
        kept[group.id, sibling.trajectory_id] = [drift <= most for drift in drifts]
    far = sum(near.count(False) for near in kept.values())
    if not far:
        return job, start, 0
    near = replace(job, groups=tuple(_near_group(group, kept) for group in job.groups))
    known = {(group.id, sibling.trajectory_id): sibling.example for group, sibling in _scored(job)}

    def rest(scores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        of = dict(zip(known, scores, strict=True))
        keys = [(group.id, sibling.trajectory_id) for group, sibling in _scored(near)]
        return tuple(torch.cat(list(compress(_by_row(known[key], of[key]), kept[key]))) for key in keys)

    reference = None if start.reference is None else rest(start.reference)
    return near, replace(start, old=rest(start.old), reference=reference), far


def _scored(job: TrainJob) -> Iterator[tuple[TrainGroup, Sibling]]:
    # In the order of `lessons`, and so of the scores.
    for group in job.groups:
        if group.teaches:
            yield from ((group, sibling) for sibling in job.computed(group))


def _by_row(example: Example, scores_N: Tensor) -> Sequence[Tensor]:
    return scores_N.split([row.sampled for row in example.rows])


def _drift_nats(row: Any, old_N: Tensor) -> float:
    recorded_N = torch.tensor(list(compress(row.logprobs_T, row.sampled_T)), dtype=old_N.dtype, device=old_N.device)
    squares_N = (old_N - recorded_N).square() / 2
    # A token that is not finite is dropped by the loss, and says nothing of the others.
    return float(squares_N[squares_N.isfinite()].mean().nan_to_num())


def _near_group(group: TrainGroup, kept: Mapping[tuple[str, str], Sequence[bool]]) -> TrainGroup:
    def near(sibling: Sibling) -> Sibling:
        keep = kept.get((group.id, sibling.trajectory_id))
        rows = sibling.example.rows if keep is None else tuple(compress(sibling.example.rows, keep))
        return replace(sibling, example=replace(sibling.example, rows=rows))

    siblings = [near(sibling) for sibling in group.siblings]
    if all(bool(new.example.rows) == bool(old.example.rows) for new, old in zip(siblings, group.siblings, strict=True)):
        return replace(group, siblings=tuple(siblings))
    # Advantage 0 is that of a sibling without a reward, which is compared with nobody.
    compared = [each.example.advantage for each in siblings if each.example.rows and each.example.advantage != 0.0]
    mean = fmean(compared) if compared else 0.0

    def moved(sibling: Sibling) -> Sibling:
        advantage = sibling.example.advantage
        there = sibling.example.rows and advantage != 0.0 and len(compared) > 1
        return replace(sibling, example=replace(sibling.example, advantage=advantage - mean if there else 0.0))

    return replace(group, siblings=tuple(map(moved, siblings)))
