"""The losses, each from one typed record to a scalar loss and its metrics: policy gradient, imitation, preference.

For each of N sampled tokens with advantage A, the ratio w is exp(logprob - old), of the token or of its trajectory. The
policy-gradient loss of the token is

    loss = surrogate(w, A) * min(exp(old - recorded), importance_cap) + kl_coefficient * w * KL(trained || reference)

The surrogate `gamma` has the importance weight, min(exp(old - recorded), importance_cap), in its W and not as a factor.
The losses of all tokens are divided by the number that the aggregation names, and summed.
`art_patch.training.loss_config` lists surrogate, aggregation, level and paper of each loss. The test
`test_loss_trl` checks that values and gradients equal those of TRL 1.16.

Rules:

- The losses of micro-batches add up to the loss of the optimizer step, if each trajectory is in one micro-batch. For
  this, every loss is divided by a number of the whole step, never of the micro-batch. So the size of the micro-batches
  changes the memory that is needed, and not the gradient.
- In `policy_loss` a token is dropped and counted if one of its log-probabilities is not finite. It gets no gradient and
  is left out of every sum and mean over its trajectory. The numbers `tokens_in_step` and `trajectories_in_step` still
  count it.
- An advantage that is not finite is an error of the caller. It is not caught here and makes the loss not finite.

Not implemented: an entropy bonus, a mask by entropy, and importance weights of whole sequences (`importance_cap` works
on single tokens).

The suffix of a name gives the axes of a tensor: N tokens, R rows (token sequences), P pairs of rows.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from art_patch.training.loss_config import Aggregation, Estimator, LossConfig, SurrogateName

# Log ratios are kept within this, as in verl. exp(20) is 5e8, and beyond it there is no gradient. So finite
# log-probabilities always give a finite loss.
_LIMIT_NATS = 20.0
_GATE_GOOD, _GATE_BAD = 1.0, 1.05  # SAPO's temperatures for advantages above 0, and others
_GAMMA_GOOD, _GAMMA_BAD = (2.0, 3.0), (3.0, 2.0)  # VESPO's (k, lambda) for advantages from 0, and below


@dataclass(frozen=True, slots=True)
class LossInput:
    """The N sampled tokens of a micro-batch of complete trajectories, in any order; all tensors have shape (N,).

    The tokens of all rows of a trajectory count as one sequence. Log-probabilities are in nats, at the temperature at
    which the token was sampled.
    """

    logprob_N: Tensor  # log-probability under the policy in training, with gradient
    old_N: Tensor  # log-probability under the policy at the start of the phase; `recorded_N` if that was not computed
    recorded_N: Tensor  # log-probability under the policy that sampled the token, as it was recorded
    advantage_N: Tensor  # advantage of the token's trajectory
    trajectory_N: Tensor  # number (int64) of the token's trajectory, at least 0 and below `trajectories_in_step`
    tokens_in_step: float  # number of sampled tokens in the whole optimizer step; with `weight_N`, their weights' sum
    trajectories_in_step: int  # number of trajectories with a sampled token in the whole optimizer step
    weight_N: Tensor | None = None  # factor of each token's loss, the KL term included; `None`: 1
    # Log-probability under the reference policy. Required if `kl_coefficient` is not 0. If it is given with coefficient
    # 0, the KL is computed for the metrics only.
    reference_N: Tensor | None = None
    entropy_N: Tensor | None = None  # entropy in nats of the token's distribution; used for the metrics only


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """Metrics of a micro-batch as sums over its tokens, so that the sums of several micro-batches can be added."""

    tokens: int = 0  # number of tokens whose log-probabilities are finite; the other sums are over these tokens
    not_finite: int = 0  # number of tokens dropped because one of their log-probabilities is not finite
    clipped_low: int = 0  # number of tokens with a negative advantage and a ratio below `1 - clip_low`: no gradient
    # Number of tokens whose ratio is too high. These are tokens with a positive advantage above `1 + clip_high` and
    # with a negative one above `clip_max`, which have no gradient; and in `cispo` tokens above `ratio_cap`, which keep
    # a gradient of bounded weight.
    clipped_high: int = 0
    dropped_tokens: int = 0  # number of tokens in trajectories dropped by `off_policy_nats`
    dropped_trajectories: int = 0  # number of trajectories dropped by `off_policy_nats`
    kl_nats: float = 0.0  # k2 estimate of KL(policy that sampled || policy in training): half the squared log ratio
    # k2 estimate of KL(policy at the start of the phase || policy in training); equals `kl_nats` if `old` is recorded
    update_kl_nats: float = 0.0
    # Estimate of KL(trained || reference) as `kl_estimator` says, multiplied by the ratio; 0 without a reference.
    reference_kl_nats: float = 0.0
    entropy_nats: float = 0.0  # entropy of the tokens' distributions; 0 if `entropy_N` is not given
    weight: float = 0.0  # weight of the token before any clip: ratio times min(exp(old - recorded), importance_cap)
    weight_squared: float = 0.0  # square of each token's `weight`, which `effective_share` needs

    @property
    def effective_share(self) -> float:
        """Effective sample size divided by the number n of tokens: (sum w)^2 / (n sum w^2), with w the `weight`.

        It is 1 if the policy in training equals the one that sampled, and 0 if there are no tokens.
        """
        return self.weight**2 / (self.tokens * self.weight_squared) if self.tokens else 0.0


def policy_loss(batch: LossInput, config: LossConfig) -> tuple[Tensor, LossMetrics]:
    """Returns the part of the step's loss, a scalar with gradient, and metrics. KL needs `reference_N`."""
    if config.kl_coefficient and batch.reference_N is None:
        raise ValueError(f"kl_coefficient={config.kl_coefficient} needs reference_N")
    finite = _only_finite(batch)
    terms = _terms(finite, config)
    surrogate = _SURROGATES[config.loss.surrogate](terms, config.settings)
    kept_N = _near_enough_N(finite, terms, config)
    kl_N = _reference_kl_N(finite, terms, config)
    loss_N = torch.where(kept_N, surrogate.loss_N, 0.0) + config.kl_coefficient * kl_N
    divisor_N = _DIVISORS[config.loss.aggregation](finite, terms.trajectories, config.settings)
    if finite.weight_N is not None:
        loss_N = loss_N * finite.weight_N
    metrics = _metrics(finite, terms, surrogate, kept_N, kl_N)
    return (loss_N / divisor_N).sum(), replace(metrics, not_finite=len(batch.logprob_N) - len(finite.logprob_N))


def toward_teacher_N(logprob_N: Tensor, teacher_N: Tensor) -> Tensor:
    """Returns the advantage of each token with which `policy_loss` has the gradient of KL(trained || teacher).

    It is log teacher - log trained, without gradient (https://thinkingmachines.ai/blog/on-policy-distillation; GKD with
    the reverse KL on the policy's own samples, https://arxiv.org/abs/2306.13649). Each token answers for its own
    divergence alone, and not for what follows it.
    """
    return (teacher_N - logprob_N.detach()).clamp(-_LIMIT_NATS, _LIMIT_NATS)


def _only_finite(batch: LossInput) -> LossInput:
    # Tokens are taken out rather than multiplied by 0: NaN * 0 is NaN, in the gradient too.
    per_token: dict[str, Tensor] = {f.name: v for f in fields(batch) if isinstance(v := getattr(batch, f.name), Tensor)}
    logprobs = [per_token[name] for name in ("logprob_N", "old_N", "recorded_N", "reference_N") if name in per_token]
    finite_N = torch.stack([values_N.detach().isfinite() for values_N in logprobs]).all(dim=0)
    kept = {name: values_N[finite_N] for name, values_N in per_token.items()}
    return replace(batch, **kept)


@dataclass(frozen=True, slots=True)
class _Trajectories:
    of_N: Tensor
    count: int

    def sum_N(self, values_N: Tensor) -> Tensor:
        """Returns at each token the sum over its trajectory."""
        return values_N.new_zeros(self.count).index_add(0, self.of_N, values_N)[self.of_N]

    def length_N(self) -> Tensor:
        return self.sum_N(torch.ones_like(self.of_N))

    def mean_N(self, values_N: Tensor) -> Tensor:
        return self.sum_N(values_N) / self.length_N()


@dataclass(frozen=True, slots=True)
class _Terms:
    """The quantities that surrogates are made of: `ratio_N` is of the chosen level, `log_ratio_N` of the token."""

    logprob_N: Tensor
    advantage_N: Tensor
    log_ratio_N: Tensor
    ratio_N: Tensor
    importance_N: Tensor
    trajectories: _Trajectories


def _terms(batch: LossInput, config: LossConfig) -> _Terms:
    trajectories = _Trajectories(batch.trajectory_N, batch.trajectories_in_step)
    log_ratio_N = (batch.logprob_N - batch.old_N).clamp(-_LIMIT_NATS, _LIMIT_NATS)
    of_level_N = trajectories.mean_N(log_ratio_N) if config.ratio_level == "sequence" else log_ratio_N
    cap, mismatch_N = config.importance_cap, (batch.old_N - batch.recorded_N).clamp(-_LIMIT_NATS, _LIMIT_NATS)
    return _Terms(
        logprob_N=batch.logprob_N,
        advantage_N=batch.advantage_N,
        log_ratio_N=log_ratio_N,
        ratio_N=of_level_N.exp(),
        # Token by token and never the product over a trajectory, in which rounding alone drowns the signal.
        importance_N=torch.ones_like(mismatch_N) if cap is None else mismatch_N.exp().clamp(max=cap),
        trajectories=trajectories,
    )


@dataclass(frozen=True, slots=True)
class _Surrogate:
    """Loss of each token, and whether its ratio is clipped for being too low or too high."""

    loss_N: Tensor
    low_N: Tensor
    high_N: Tensor


def _clip(terms: _Terms, settings: Mapping[str, float]) -> _Surrogate:
    """PPO's pessimistic bound, https://arxiv.org/abs/1707.06347, with both ends free and a third for bad tokens."""
    ratio_N, advantage_N = terms.ratio_N, terms.advantage_N
    low, high, most = 1 - settings["clip_low"], 1 + settings["clip_high"], settings["clip_max"]
    # The minimum lets a ratio beyond the clip count in full where that makes the loss larger. There `most` bounds it,
    # so that one absurd token cannot carry the step.
    gain_N = torch.minimum(ratio_N.clamp(max=most) * advantage_N, ratio_N.clamp(low, high) * advantage_N)
    return _Surrogate(
        loss_N=-gain_N * terms.importance_N,
        low_N=(ratio_N < low) & (advantage_N < 0),
        high_N=((ratio_N > high) & (advantage_N > 0)) | ((ratio_N > most) & (advantage_N < 0)),
    )


def _cap(terms: _Terms, settings: Mapping[str, float]) -> _Surrogate:
    """CISPO: REINFORCE with a bounded weight; every token keeps its gradient."""
    # Detached: the gradient is that of the log-probability, and the weight only scales it.
    weight_N = terms.ratio_N.detach().clamp(max=settings["ratio_cap"]) * terms.importance_N
    high_N = terms.ratio_N > settings["ratio_cap"]
    return _Surrogate(-weight_N * terms.advantage_N * terms.logprob_N, _never(terms), high_N)


def _gate(terms: _Terms, settings: Mapping[str, float]) -> _Surrogate:
    """SAPO: slope 1 where the ratio is 1, flatter the further away."""
    temperature_N = _either(terms.advantage_N > 0, _GATE_GOOD, _GATE_BAD, terms.ratio_N)
    gate_N = torch.sigmoid(temperature_N * (terms.ratio_N - 1)) * 4 / temperature_N
    return _Surrogate(-gate_N * terms.advantage_N * terms.importance_N, _never(terms), _never(terms))


def _gamma(terms: _Terms, settings: Mapping[str, float]) -> _Surrogate:
    """VESPO: a whole trajectory weighs W^k exp(lambda (1 - W)); W is the product of ratios and importance weights."""
    good_N = terms.advantage_N >= 0
    k_N = _either(good_N, _GAMMA_GOOD[0], _GAMMA_BAD[0], terms.ratio_N)
    lambda_N = _either(good_N, _GAMMA_GOOD[1], _GAMMA_BAD[1], terms.ratio_N)
    log_product_N = terms.trajectories.sum_N(terms.log_ratio_N.detach() + terms.importance_N.log())
    log_weight_N = log_product_N.clamp(math.log(1e-8), _LIMIT_NATS)  # the bounds of the authors' code
    phi_N = torch.exp(k_N * log_weight_N - lambda_N * torch.expm1(log_weight_N))
    return _Surrogate(-phi_N * terms.advantage_N * terms.logprob_N, _never(terms), _never(terms))


def _either(good_N: Tensor, good: float, bad: float, like_N: Tensor) -> Tensor:
    # Not `torch.where` of two numbers, whose result is fp32 in an fp64 computation too.
    return torch.full_like(like_N, bad).masked_fill(good_N, good)


def _never(terms: _Terms) -> Tensor:
    return torch.zeros_like(terms.ratio_N, dtype=torch.bool)


_Formula = Callable[[_Terms, Mapping[str, float]], _Surrogate]
_SURROGATES: dict[SurrogateName, _Formula] = {"clip": _clip, "cap": _cap, "gate": _gate, "gamma": _gamma}

_DIVISORS: dict[Aggregation, Callable[[LossInput, _Trajectories, Mapping[str, float]], Tensor | float]] = {
    "token_mean": lambda batch, _, __: batch.tokens_in_step,
    "trajectory_mean": lambda batch, trajectories, _: trajectories.length_N() * batch.trajectories_in_step,
    "trajectory_sum": lambda batch, _, __: batch.trajectories_in_step,
    "constant": lambda batch, _, settings: batch.trajectories_in_step * settings["max_completion_tokens"],
}

# Of log trained - log reference.
_ESTIMATORS: dict[Estimator, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio_N: log_ratio_N,
    "k2": lambda log_ratio_N: log_ratio_N.square() / 2,
    "k3": lambda log_ratio_N: torch.expm1(-log_ratio_N) + log_ratio_N,
}


def _reference_kl_N(batch: LossInput, terms: _Terms, config: LossConfig) -> Tensor:
    if batch.reference_N is None:
        return torch.zeros_like(batch.logprob_N)
    log_ratio_N = (batch.logprob_N - batch.reference_N).clamp(-_LIMIT_NATS, _LIMIT_NATS)
    return terms.ratio_N * _ESTIMATORS[config.kl_estimator](log_ratio_N)


def _near_enough_N(batch: LossInput, terms: _Terms, config: LossConfig) -> Tensor:
    """Tells of each token whether its trajectory is learned from; trajectories of positive advantage always are."""
    good_N = ~(batch.advantage_N < 0)
    if config.off_policy_nats is None:
        return torch.ones_like(good_N)
    drift_N = terms.trajectories.mean_N(batch.recorded_N - batch.logprob_N.detach())
    return good_N | (drift_N <= config.off_policy_nats)


@torch.no_grad()
def _metrics(batch: LossInput, terms: _Terms, surrogate: _Surrogate, kept_N: Tensor, kl_N: Tensor) -> LossMetrics:
    near_N = (batch.logprob_N - batch.recorded_N).clamp(-_LIMIT_NATS, _LIMIT_NATS)
    weight_N = terms.ratio_N * terms.importance_N
    # k2 for `kl_nats`, not k3: there one rare token that became likely, as it should, outweighs a thousand others.
    sums_N = {
        "clipped_low": surrogate.low_N & kept_N,
        "clipped_high": surrogate.high_N & kept_N,
        "dropped_tokens": ~kept_N,
        "kl_nats": near_N.square() / 2,
        "update_kl_nats": terms.log_ratio_N.square() / 2,
        "reference_kl_nats": kl_N,
        "entropy_nats": torch.zeros_like(near_N) if batch.entropy_N is None else batch.entropy_N,
        "weight": weight_N,
        "weight_squared": weight_N.square(),
    }
    # One transfer from the device for all of them; in fp64 counts stay whole.
    sums = dict(zip(sums_N, torch.stack([v.sum(dtype=torch.float64) for v in sums_N.values()]).tolist(), strict=True))
    counts = {name: int(sums.pop(name)) for name in ("clipped_low", "clipped_high", "dropped_tokens")}
    return LossMetrics(
        tokens=len(near_N), dropped_trajectories=len(torch.unique(batch.trajectory_N[~kept_N])), **counts, **sums
    )


@dataclass(frozen=True, slots=True)
class SftInput:
    """Input of the imitation loss for one micro-batch."""

    logprob_N: Tensor  # log-probability of each learned token under the model, with gradient
    tokens_in_step: int  # number of learned tokens in the whole optimizer step


@dataclass(frozen=True, slots=True)
class SftMetrics:
    """Metrics of the imitation loss for one micro-batch."""

    nll_nats: float  # sum of the negative log-likelihoods of the micro-batch's learned tokens


def sft_loss(batch: SftInput) -> tuple[Tensor, SftMetrics]:
    """Returns the micro-batch's part of the step's mean negative log-likelihood over learned tokens, and metrics."""
    # The mean over tokens, not over answers: each token weighs the same, however long its answer is.
    nll = -batch.logprob_N.sum()
    return nll / batch.tokens_in_step, SftMetrics(nll.item())


def sums_R(logprob_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Returns, for each of `rows` rows (token sequences), the sum of the log-probabilities of its learned tokens.

    `row_N` holds the index of each token's row, from 0, on the device of `logprob_N`.
    """
    return logprob_N.new_zeros(rows).index_add(0, row_N, logprob_N)


@dataclass(frozen=True, slots=True)
class PreferenceInput:
    """P pairs of a better and a worse row in one micro-batch; a row's log-probability is that of `sums_R`."""

    chosen_P: Tensor  # log-probability of the better rows under the model, with gradient
    rejected_P: Tensor  # log-probability of the worse rows under the model, with gradient
    chosen_reference_P: Tensor  # log-probability of the better rows under the policy that the update starts from
    rejected_reference_P: Tensor  # log-probability of the worse rows under the policy that the update starts from
    beta: float  # of DPO; the larger it is, the nearer the model stays to the policy that the update starts from
    pairs_in_step: int  # number of pairs in the whole optimizer step


@dataclass(frozen=True, slots=True)
class PreferenceMetrics:
    """Metrics of the preference loss, as sums over the pairs of one micro-batch.

    The reward of a row (token sequence) is DPO's implicit reward: beta times the difference between the row's
    log-probability under the model and under the policy that the update starts from.
    """

    right: int  # number of pairs whose better row has the higher reward
    margin: float  # reward of the better row minus the reward of the worse row
    chosen_reward: float  # reward of the better row; if it becomes negative, the better answers became less likely
    rejected_reward: float  # reward of the worse row


def preference_loss(batch: PreferenceInput) -> tuple[Tensor, PreferenceMetrics]:
    """Returns the micro-batch's part of the DPO loss of its optimizer step, and the metrics.

    The loss is the mean over all pairs of `-log sigmoid(reward of the better row - reward of the worse row)`, equation
    7 of https://arxiv.org/abs/2305.18290. Label smoothing, normalisation by length, and an additional likelihood term
    of the better row are not implemented.
    """
    # A row's reward is beta times its log-ratio to the reference, whose log-probabilities carry no gradient.
    chosen_P = batch.beta * (batch.chosen_P - batch.chosen_reference_P)
    rejected_P = batch.beta * (batch.rejected_P - batch.rejected_reference_P)
    margin_P = chosen_P - rejected_P
    loss = -torch.nn.functional.logsigmoid(margin_P).sum() / batch.pairs_in_step
    with torch.no_grad():  # metrics only
        return loss, PreferenceMetrics(
            right=int((margin_P > 0).sum().item()),
            margin=margin_P.sum().item(),
            chosen_reward=chosen_P.sum().item(),
            rejected_reward=rejected_P.sum().item(),
        )
