"""Computes, once for each update, the log-probabilities of its data under the policy at the start and the reference.

They are stored in the job directory. An update that is continued after a kill reads them from there, because the model
then no longer holds the policy from the start of the update.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from art_patch.errors import TrainingError
from art_patch.training.data.packing import Example
from art_patch.training.kernels.scoring import Scorer
from art_patch.training.loop.job import TrainJob, file_content, read_file, write_file
from art_patch.training.loop.loading import as_reference
from art_patch.training.loop.plan import Lesson, evaluated_of, lessons_of
from art_patch.training.loop.processes import Ranks

_FILE = "start.safetensors"


@dataclass(frozen=True, slots=True)
class StartScores:
    """Log-probabilities of the tokens in an update's data before its first optimizer step.

    Each field but `gap_nats` has one tensor for each example (a trajectory or a pair), with the sampled tokens of all
    its rows (token sequences) in order.
    """

    old: tuple[Tensor, ...]  # of the trajectories in the training groups, under the policy at the start of the update
    pairs: tuple[Tensor, ...]  # of each pair, first the better row's, under the policy at the start
    # Largest difference between recorded and computed log-probability, over tokens that the policy at the start
    # sampled. A large value means that trainer and server do not compute the same. `None` if that policy sampled no
    # token of the data.
    gap_nats: float | None
    reference: tuple[Tensor, ...] | None = None  # as `old`, under the reference policy; `None` without a KL term
    eval_old: tuple[Tensor, ...] = ()  # of the evaluation groups' trajectories, as `old`
    eval_reference: tuple[Tensor, ...] | None = None  # of the evaluation groups' trajectories, as `reference`


def start_scores(job: TrainJob, model: Any, scorer: Scorer, directory: Path, ranks: Ranks) -> StartScores:
    """Reads the scores from the job's `directory`, or computes them with `model` and writes them there.

    `model` is as it was loaded, before any optimizer step or restored checkpoint. Each process of the update computes a
    part, and the first writes. Raises `TrainingError` if the model gives no finite log-probability, or if the file
    cannot be read or written.
    """
    lessons = lessons_of(job)
    asked = {
        "old": _examples(lessons),
        "eval_old": _examples(evaluated_of(job)),
        "pairs": [Example((pair.chosen, pair.rejected)) for pair in job.pairs],
    }
    found = read_file(directory / _FILE)
    arrays = found[0] if found else _computed(job, model, scorer, asked, ranks)
    if found is None and ranks.first:
        write_file(directory / _FILE, file_content(arrays, {}))
    asked |= {"reference": asked["old"], "eval_reference": asked["eval_old"]}
    # Read back in one piece and cut by example, in the order in which `_flat` wrote them.
    scores: dict[str, tuple[Tensor, ...]] = {
        name: torch.from_numpy(array).to(scorer.device).split([example.sampled for example in asked[name]])
        for name, array in arrays.items()
    }
    own = [own for lesson in lessons for own in lesson.on_policy]
    return StartScores(**scores, gap_nats=_gap(asked["old"], scores["old"], own))


def _examples(lessons: Sequence[Lesson]) -> list[Example]:
    return [example for lesson in lessons for example in lesson.examples]


def _computed(
    job: TrainJob, model: Any, scorer: Scorer, asked: Mapping[str, Sequence[Example]], ranks: Ranks
) -> dict[str, Any]:
    tokens = job.config.micro_batch_tokens
    scores = {name: _flat(scorer, each, tokens, ranks) for name, each in asked.items()}
    # The loss drops single tokens that are not finite. Where none is finite the model itself is broken.
    if not all(bool(torch.isfinite(each).any()) for each in scores.values() if len(each)):
        raise TrainingError(
            f"the policy to start from ({job.start or job.base}) has no finite log-probability for what was recorded: "
            "its weights are broken, or the dtype is too small; begin anew with start=base, or take dtype=float32"
        )
    # Before the first step the trained LoRA is still the policy at the start; only the reference must be loaded.
    if job.config.loss.kl_coefficient:
        with as_reference(model, job.parent if job.config.reference == "champion" else None):
            scores["reference"] = _flat(scorer, asked["old"], tokens, ranks)
            scores["eval_reference"] = _flat(scorer, asked["eval_old"], tokens, ranks)
    return {name: values.cpu().numpy() for name, values in scores.items()}


@torch.no_grad()
def _flat(scorer: Scorer, examples: Sequence[Example], max_tokens: int, ranks: Ranks) -> Tensor:
    """Returns the log-probabilities of all examples, one after another."""
    first = [0, *accumulate(example.sampled for example in examples)]
    # Each process fills in its own examples and leaves 0 elsewhere, so the sum over processes holds all of them.
    flat = torch.zeros(first[-1], dtype=scorer.dtype, device=scorer.device)
    for pack in ranks.shard(examples, max_tokens):
        examples_E = pack.examples_E.tolist()  # E examples of the pack, which stand together among all
        flat[first[examples_E[0]] : first[examples_E[-1] + 1]] = scorer.score(pack).logprob_N
    return ranks.sum(flat)


def _gap(examples: Sequence[Example], old: Sequence[Tensor], on_policy: Sequence[bool]) -> float | None:
    gaps: list[Tensor] = []
    for example, its_old, own in zip(examples, old, on_policy, strict=True):
        if own:  # of another policy's tokens a gap is expected
            recorded = [logprob for row in example.rows for logprob in compress(row.logprobs_T, row.sampled_T)]
            gaps.append((its_old - torch.tensor(recorded, dtype=its_old.dtype, device=its_old.device)).abs())
    finite = [gap[gap.isfinite()] for gap in gaps]
    return max((float(gap.max()) for gap in finite if len(gap)), default=None)
