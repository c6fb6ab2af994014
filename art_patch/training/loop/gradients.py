"""Computes the gradient of one optimizer step for each phase of an update, and the loss on evaluation groups.

Both need the log-probabilities of the data under the policy at the start and under the reference. `start_scores`
computes them once for each update and stores them in the job directory. An update that is continued after a kill reads
them from there, because the model then no longer holds the policy from the start of the update. A phase that begins
after another one is scored anew (`phase_scores`): its ratios start at 1, whatever was learned before.

A gradient function gets the items of a step (demonstrations, pairs or groups), adds to the gradients of the LoRA's
weights, and returns sums for the step's metrics. The size of micro-batches, the number of accumulated batches and the
number of processes change memory and time, and not the result: every loss is divided by a number of the whole step.

The suffix of a name gives the axes of a tensor: N sampled tokens of a pack, E its examples; R rows (token sequences)
and P pairs of rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, compress, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from art_patch.errors import TrainingError
from art_patch.training import losses
from art_patch.training.config import TrainConfig
from art_patch.training.data.packing import Pack
from art_patch.training.data.rows import Example, Row
from art_patch.training.loop.job import Lesson, PhaseName, TrainJob, read_file, write_arrays
from art_patch.training.loop.loading import as_reference
from art_patch.training.loop.processes import Ranks
from art_patch.training.loss_config import LossConfig
from art_patch.training.scoring import Scored, Scorer

START_FILE = "start.safetensors"

Sums = dict[str, float]
# Adds the gradient of a step on these items to this process's gradient, and returns sums over its packs.
Gradient = Callable[[Sequence[int]], Sums]
_LossOfPack = Callable[[Pack, Scored], tuple[Tensor, Sums]]
_NOTHING_SEEN: Sums = {"tokens": 0.0, "entropy_nats": 0.0}


# --- scores at the start ---


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
    found = read_file(directory / START_FILE)
    arrays = found[0] if found else _computed(job, model, scorer, asked, ranks)
    if found is None and ranks.first:
        write_arrays(directory / START_FILE, arrays)
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


# --- gradients ---


def gradients_of(
    job: TrainJob, scorer: Scorer, start: StartScores, ranks: Ranks
) -> dict[PhaseName | Literal["rehearse"], Gradient]:
    """Returns a gradient function for each phase of the update, and one ("rehearse") for the rehearsed answers."""
    by_packs = _ByPacks(scorer, job.config, ranks)
    return {
        "imitate": _of_given(job.demonstrations, 1.0, by_packs),
        "rehearse": _of_given(job.rehearsed, job.config.rehearse_weight, by_packs),
        "prefer": _of_pairs(job, by_packs, start),
        "groups": _of_groups(job, by_packs, start),
    }


@dataclass(frozen=True, slots=True)
class _ByPacks:
    """Runs the backward of a step pack by pack, each no larger than memory allows."""

    scorer: Scorer
    config: TrainConfig
    ranks: Ranks

    def backward(self, examples: Sequence[Sequence[Example]], loss_of: _LossOfPack, none: Sums) -> Sums:
        """Computes the gradient of this process's packs and returns the sums over them.

        `examples` are those of each item of the step; a pack's `examples_E` count them over all items. `none` are the
        sums over no pack.
        """
        sums = none | dict.fromkeys(("loss", "computed_tokens", "distinct_tokens", "row_tokens"), 0.0)
        for pack in self._packs(examples):
            scored = self.scorer.score(pack)
            loss, seen = loss_of(pack, scored)
            loss.backward()  # gradients add up over packs; the activations of this pack are freed
            seen["loss"] = loss.item()
            seen["computed_tokens"], seen["distinct_tokens"] = scored.computed, pack.tokens
            seen["row_tokens"] = sum(len(where_T) for where_T in pack.tree.where_R)
            sums = {name: value + seen[name] for name, value in sums.items()}
        return sums

    def _packs(self, examples: Sequence[Sequence[Example]]) -> Iterator[Pack]:
        # No pack holds items of two accumulated batches. So no more is computed at once than one batch, but beginnings
        # that rows of several batches share are computed in each.
        accumulates = self.config.gradient_accumulation_steps > 1
        size = self.config.batch_size if accumulates and self.config.batch_size else max(1, len(examples))
        first = 0
        for batch in range(0, len(examples), size):
            together = [example for of_item in examples[batch : batch + size] for example in of_item]
            for pack in self.ranks.shard(together, self.config.micro_batch_tokens):
                yield replace(pack, examples_E=pack.examples_E + first)
            first += len(together)


def _of_groups(job: TrainJob, by_packs: _ByPacks, start: StartScores) -> Gradient:
    lessons = job.lessons
    # Of each lesson's examples among those of all lessons, as `StartScores` counts them.
    edges = accumulate((len(lesson.examples) for lesson in lessons), initial=0)
    places = [range(first, stop) for first, stop in pairwise(edges)]

    def gradient(items: Sequence[int]) -> Sums:
        chosen = [place for item in items for place in places[item]]
        old = [start.old[place] for place in chosen]
        reference = None if start.reference is None else [start.reference[place] for place in chosen]
        # The loss counts examples from the step's first, as the packs do.
        loss_of = _loss_of_lessons([lessons[item] for item in items], old, reference, job.config.loss)
        return by_packs.backward([lessons[item].examples for item in items], loss_of, asdict(losses.LossMetrics()))

    return gradient


def _loss_of_lessons(
    lessons: Sequence[Lesson], old: Sequence[Tensor], reference: Sequence[Tensor] | None, config: LossConfig
) -> _LossOfPack:
    """Returns the loss of one step that takes all these lessons, as a function of a pack of their examples.

    `old` and `reference` are log-probabilities of each example, under the policy at the start and under the reference.
    """
    weight_E = np.array([lesson.weight for lesson in lessons for _ in lesson.examples])

    def loss_of(pack: Pack, scored: Scored) -> tuple[Tensor, Sums]:
        def of(known: Sequence[Tensor]) -> Tensor:
            return torch.cat([known[e] for e in pack.examples_E.tolist()])

        like = scored.logprob_N
        recorded_N = torch.from_numpy(pack.recorded_N).to(like)
        teacher_N = None if pack.teacher_N is None else torch.from_numpy(pack.teacher_N).to(like)
        advantage_N = torch.from_numpy(pack.advantage_N).to(like)
        if teacher_N is not None:
            advantage_N = losses.toward_teacher_N(like, teacher_N)
        loss, metrics = losses.policy_loss(
            losses.LossInput(
                logprob_N=scored.logprob_N,
                # Without importance weights the ratio itself must lead back to the policy that sampled.
                old_N=recorded_N if config.importance_cap is None else of(old),
                recorded_N=recorded_N,
                advantage_N=advantage_N,
                trajectory_N=torch.from_numpy(pack.example_N).to(like.device),
                tokens_in_step=sum(lesson.tokens * lesson.weight for lesson in lessons),
                trajectories_in_step=sum(lesson.trajectories for lesson in lessons),
                weight_N=torch.from_numpy(weight_E[pack.examples_E][pack.example_N]).to(like),
                reference_N=teacher_N if reference is None else of(reference),
                entropy_N=scored.entropy_N,
            ),
            config,
        )
        return loss, asdict(metrics)

    return loss_of


def _of_given(rows: Sequence[Row], weight: float, by_packs: _ByPacks) -> Gradient:
    examples = [Example((row,)) for row in rows]

    def gradient(items: Sequence[int]) -> Sums:
        tokens = sum(examples[item].sampled for item in items)

        # `tokens` is of the whole step, though a pack holds a part of it: so packs add up to the mean.
        def loss_of(pack: Pack, scored: Scored) -> tuple[Tensor, Sums]:
            loss, metrics = losses.sft_loss(losses.SftInput(scored.logprob_N, tokens))
            return weight * loss, _seen(scored) | asdict(metrics)

        return by_packs.backward([(examples[item],) for item in items], loss_of, _NOTHING_SEEN | {"nll_nats": 0.0})

    return gradient


def _of_pairs(job: TrainJob, by_packs: _ByPacks, start: StartScores) -> Gradient:
    examples = [Example((pair.chosen, pair.rejected)) for pair in job.pairs]

    def gradient(items: Sequence[int]) -> Sums:
        def loss_of(pack: Pack, scored: Scored) -> tuple[Tensor, Sums]:
            # A pack's tokens stand example by example and row by row: chosen, rejected, chosen, rejected ...
            mine = [items[e] for e in pack.examples_E.tolist()]
            lengths = [row.sampled for item in mine for row in examples[item].rows]
            row_N = torch.repeat_interleave(torch.tensor(lengths)).to(scored.logprob_N.device)
            known_N = torch.cat([start.pairs[item] for item in mine])
            chosen_P, rejected_P = losses.sums_R(scored.logprob_N, row_N, len(lengths)).view(-1, 2).T
            chosen_start_P, rejected_start_P = losses.sums_R(known_N, row_N, len(lengths)).view(-1, 2).T
            loss, metrics = losses.preference_loss(
                losses.PreferenceInput(
                    chosen_P, rejected_P, chosen_start_P, rejected_start_P, job.config.preference_beta, len(items)
                )
            )
            return loss, _seen(scored) | asdict(metrics)

        none = _NOTHING_SEEN | asdict(losses.PreferenceMetrics(0, 0.0, 0.0, 0.0))
        return by_packs.backward([(examples[item],) for item in items], loss_of, none)

    return gradient


def _seen(scored: Scored) -> Sums:
    return {"tokens": float(len(scored.logprob_N)), "entropy_nats": scored.entropy_N.sum().item()}


@torch.no_grad()
def evaluate(job: TrainJob, scorer: Scorer, start: StartScores, ranks: Ranks) -> dict[str, float]:
    """Evaluates the policy in training on the job's evaluation groups, which it never learns from.

    Returns three metrics, or an empty dict if no group has different rewards:

    - `eval_loss`: the loss that an optimizer step on all evaluation groups together would have.
    - `eval_kl_nats`: k2 estimate of KL(policy that sampled || policy in training) per token.
    - `eval_gain_nats`: the mean over tokens of the advantage times the increase of the token's log-probability since
      the start of the update. Above 0, better runs have become likelier relative to worse ones. If it falls while the
      training loss falls, the policy overfits the training groups.

    An evaluation uses no gradient, dropout or random number, so it does not change the weights that an update makes.
    """
    lessons = job.evaluated
    loss_of = _loss_of_lessons(lessons, start.eval_old, start.eval_reference, job.config.loss)
    sums: Sums = dict.fromkeys(("tokens", "loss", "kl_nats", "gain_nats"), 0.0)
    for pack in ranks.shard(examples_of(lessons), job.config.micro_batch_tokens):
        scored = scorer.score(pack)
        loss, seen = loss_of(pack, scored)
        old_N: Tensor = torch.cat([start.eval_old[e] for e in pack.examples_E.tolist()])
        gain_N = torch.from_numpy(pack.advantage_N).to(old_N) * (scored.logprob_N - old_N)
        seen |= {"loss": loss.item(), "gain_nats": gain_N[gain_N.isfinite()].sum().item()}
        sums = {name: value + seen[name] for name, value in sums.items()}
    sums = ranks.sum_each(sums, scorer.device)
    if not (tokens := sums["tokens"]):
        return {}
    return {
        "eval_loss": sums["loss"],
        "eval_kl_nats": sums["kl_nats"] / tokens,
        "eval_gain_nats": sums["gain_nats"] / tokens,
    }
