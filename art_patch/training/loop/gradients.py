"""The gradient of one optimizer step, for each phase: items in, the LoRA's gradient set, sums of what was seen out.

Micro-batches, accumulated batches and processes change memory and time, not the result: every normaliser is that of
the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from art_patch.training.config import TrainConfig
from art_patch.training.data.packing import Example, Pack
from art_patch.training.data.rows import Row
from art_patch.training.kernels.scoring import Scored, Scorer
from art_patch.training.loop.job import TrainJob
from art_patch.training.loop.plan import Lesson, PhaseName, lessons_of
from art_patch.training.loop.ranks import Ranks
from art_patch.training.loop.start_scores import StartScores
from art_patch.training.losses.loss_config import LossConfig
from art_patch.training.losses.policy_loss import LossInput, LossMetrics, policy_loss
from art_patch.training.losses.supervised import (
    PreferenceInput,
    PreferenceMetrics,
    SftInput,
    preference_loss,
    sft_loss,
    sums_R,
)

Sums = dict[str, float]
LossOfPack = Callable[[Pack, Scored], tuple[Tensor, Sums]]


class Gradient(Protocol):
    """How a phase learns."""

    def __call__(self, items: Sequence[int]) -> Sums:
        """Add the gradient of a step of these items to this process's; return sums over its packs."""
        ...


@dataclass(frozen=True, slots=True)
class _Maker:
    """What every phase computes with."""

    scorer: Scorer
    config: TrainConfig
    ranks: Ranks

    def backward(self, examples: Sequence[Sequence[Example]], loss_of: LossOfPack, none: Sums) -> Sums:
        """Compute the packs of this process.

        Args:
            examples: of each item of the step.
            loss_of: of a pack, whose places are among the examples of all items.
            none: the sums over no pack.
        """
        sums = none | dict.fromkeys(_WORK, 0.0)
        for pack in self._packs(examples):
            scored = self.scorer.score(pack)
            loss, seen = loss_of(pack, scored)
            loss.backward()
            seen |= {"loss": loss.item()} | work_of(pack, scored)
            sums = {name: value + seen[name] for name, value in sums.items()}
        return sums

    def _packs(self, examples: Sequence[Sequence[Example]]) -> Iterator[Pack]:
        """What is computed at once: no more than `micro_batch_tokens`, and no item of another accumulated batch."""
        accumulates = self.config.gradient_accumulation_steps > 1
        size = self.config.batch_size if accumulates and self.config.batch_size else max(1, len(examples))
        first = 0
        for batch in range(0, len(examples), size):
            together = [example for of_item in examples[batch : batch + size] for example in of_item]
            for pack in self.ranks.shard(together, self.config.micro_batch_tokens):
                yield replace(pack, examples_E=pack.examples_E + first)
            first += len(together)


_WORK = ("loss", "computed_tokens", "distinct_tokens", "row_tokens")


def work_of(pack: Pack, scored: Scored) -> Sums:
    """Return how many tokens were computed, how many distinct ones there are, and in how many they are in rows."""
    return {
        "computed_tokens": float(scored.computed),
        "distinct_tokens": float(pack.tokens),
        "row_tokens": float(sum(len(where_T) for where_T in pack.tree.where_R)),
    }


def gradients_of(
    job: TrainJob, scorer: Scorer, start: StartScores, ranks: Ranks
) -> dict[PhaseName | Literal["rehearse"], Gradient]:
    """Return how each phase learns, and how what is rehearsed is learned beside groups."""
    maker = _Maker(scorer, job.config, ranks)
    return {
        "imitate": _of_given(job.demonstrations, 1.0, maker),
        "rehearse": _of_given(job.rehearsed, job.config.rehearse_weight, maker),
        "prefer": _of_pairs(job, maker, start),
        "groups": _of_groups(job, maker, start),
    }


def _of_groups(job: TrainJob, maker: _Maker, start: StartScores) -> Gradient:
    lessons = lessons_of(job)
    places: list[range] = []
    for lesson in lessons:
        first = places[-1].stop if places else 0
        places.append(range(first, first + len(lesson.examples)))

    def gradient(items: Sequence[int]) -> Sums:
        chosen = [place for item in items for place in places[item]]
        old = [start.old[place] for place in chosen]
        reference = None if start.reference is None else [start.reference[place] for place in chosen]
        loss_of = loss_of_lessons([lessons[item] for item in items], old, reference, job.config.loss)
        return maker.backward([lessons[item].examples for item in items], loss_of, asdict(LossMetrics()))

    return gradient


def loss_of_lessons(
    lessons: Sequence[Lesson], old: Sequence[Tensor], reference: Sequence[Tensor] | None, config: LossConfig
) -> LossOfPack:
    """Return the loss of one step that takes all these lessons, for packs of their examples.

    Args:
        lessons: of the step.
        old: of each of their examples, under the policy at the start.
        reference: likewise under the reference.
        config: of the loss.
    """
    tokens = sum(lesson.tokens for lesson in lessons)
    trajectories = sum(lesson.trajectories for lesson in lessons)

    def loss_of(pack: Pack, scored: Scored) -> tuple[Tensor, Sums]:
        def of(known: Sequence[Tensor]) -> Tensor:
            return torch.cat([known[e] for e in pack.examples_E.tolist()])

        like = scored.logprob_N
        recorded_N = torch.from_numpy(pack.recorded_N).to(like)
        loss, metrics = policy_loss(
            LossInput(
                logprob_N=scored.logprob_N,
                old_N=recorded_N if config.importance_cap is None else of(old),
                recorded_N=recorded_N,
                advantage_N=torch.from_numpy(pack.advantage_E[pack.example_N]).to(like),
                trajectory_N=torch.from_numpy(pack.example_N).to(like.device),
                tokens_in_step=tokens,
                trajectories_in_step=trajectories,
                reference_N=None if reference is None else of(reference),
                entropy_N=scored.entropy_N,
            ),
            config,
        )
        return loss, asdict(metrics)

    return loss_of


def _of_given(rows: Sequence[Row], weight: float, maker: _Maker) -> Gradient:
    examples = [Example((row,)) for row in rows]

    def gradient(items: Sequence[int]) -> Sums:
        tokens = sum(examples[item].sampled for item in items)

        def loss_of(pack: Pack, scored: Scored) -> tuple[Tensor, Sums]:
            loss, metrics = sft_loss(SftInput(scored.logprob_N, tokens))
            return weight * loss, _seen(scored) | asdict(metrics)

        return maker.backward([(examples[item],) for item in items], loss_of, _NOTHING_SEEN | {"nll_nats": 0.0})

    return gradient


def _of_pairs(job: TrainJob, maker: _Maker, start: StartScores) -> Gradient:
    examples = [Example((pair.chosen, pair.rejected)) for pair in job.pairs]

    def gradient(items: Sequence[int]) -> Sums:
        def loss_of(pack: Pack, scored: Scored) -> tuple[Tensor, Sums]:
            mine = [items[e] for e in pack.examples_E.tolist()]
            lengths = [row.sampled for item in mine for row in examples[item].rows]
            row_N = torch.repeat_interleave(torch.tensor(lengths)).to(scored.logprob_N.device)
            chosen_P, rejected_P = sums_R(scored.logprob_N, row_N, len(lengths)).view(-1, 2).T
            known_N = torch.cat([start.pairs[item] for item in mine])
            chosen_start_P, rejected_start_P = sums_R(known_N, row_N, len(lengths)).view(-1, 2).T
            loss, metrics = preference_loss(
                PreferenceInput(
                    chosen_P, rejected_P, chosen_start_P, rejected_start_P, job.config.preference_beta, len(items)
                )
            )
            return loss, _seen(scored) | asdict(metrics)

        none = _NOTHING_SEEN | asdict(PreferenceMetrics(0, 0.0, 0.0, 0.0))
        return maker.backward([(examples[item],) for item in items], loss_of, none)

    return gradient


_NOTHING_SEEN: Sums = {"tokens": 0.0, "entropy_nats": 0.0}


def _seen(scored: Scored) -> Sums:
    return {"tokens": float(len(scored.logprob_N)), "entropy_nats": scored.entropy_N.sum().item()}
