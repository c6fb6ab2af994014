"""What the policy in training makes of groups that it never learns from: to see whether what it learns carries over.

No gradient, no dropout, no random number: an update is the same with evaluations and without. Three metrics, over the
groups whose siblings were not all scored alike:

- `eval_loss`: the loss of an optimizer step that would take all of them.
- `eval_kl_nats`: k2 estimate of KL(behaviour || trained) a token, as `kl_nats` is. It measures how far the policy went
  where it was not taught.
- `eval_gain_nats`: mean over tokens of the advantage times how much likelier the token has become since the start of
  the update. Above 0, better runs have become likelier than worse ones. While `loss` falls and this does too, what is
  learned is the groups by heart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from art_patch.training.data.packing import Pack
from art_patch.training.kernels.scoring import Scored, Scorer
from art_patch.training.loop.gradients import loss_of_lessons
from art_patch.training.loop.job import TrainJob
from art_patch.training.loop.plan import evaluated_of
from art_patch.training.loop.ranks import Ranks
from art_patch.training.loop.start_scores import StartScores

_SUMS = ("tokens", "loss", "kl_nats", "gain_nats")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Evaluates the policy in training.

    Attributes:
        job: the job.
        scorer: of the model.
        start: scores of the policy at the start.
        ranks: of this process.
    """

    job: TrainJob
    scorer: Scorer
    start: StartScores
    ranks: Ranks

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return the metrics of now; none if there is nothing to evaluate on."""
        lessons = evaluated_of(self.job)
        loss_of = loss_of_lessons(lessons, self.start.eval_old, self.start.eval_reference, self.job.config.loss)
        sums = dict.fromkeys(_SUMS, 0.0)
        examples = [example for lesson in lessons for example in lesson.examples]
        for pack in self.ranks.shard(examples, self.job.config.micro_batch_tokens):
            scored = self.scorer.score(pack)
            loss, seen = loss_of(pack, scored)
            seen |= {"loss": loss.item(), "gain_nats": self._gain_nats(pack, scored)}
            sums = {name: value + seen[name] for name, value in sums.items()}
        values = torch.tensor(list(sums.values()), dtype=torch.float64, device=self.scorer.device)
        tokens, loss, kl_nats, gain_nats = self.ranks.sum(values).tolist()
        if not tokens:
            return {}
        return {"eval_loss": loss, "eval_kl_nats": kl_nats / tokens, "eval_gain_nats": gain_nats / tokens}

    def _gain_nats(self, pack: Pack, scored: Scored) -> float:
        old_N: Tensor = torch.cat([self.start.eval_old[e] for e in pack.examples_E.tolist()])
        advantage_N = torch.from_numpy(pack.advantage_E[pack.example_N]).to(old_N)
        gain_N = advantage_N * (scored.logprob_N - old_N)
        return gain_N[gain_N.isfinite()].sum().item()
