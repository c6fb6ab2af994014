"""Advantages, and which loss an update minimises with them, as data: a table and its settings. Loads no torch.

A loss is a surrogate (the term of one token), an aggregation (how tokens are weighed against each other) and the level
of its probability ratio. `art_patch.training.losses.policy_loss` computes them. This module says which of them belong
together and refuses other combinations. A setting that the chosen loss does not have is an error, never ignored.

With w = exp(logprob - old) of a token, or for level "sequence" the exponential of its trajectory's mean log ratio:

| surrogate | a token's loss | its gradient stops |
|---|---|---|
| `clip`  | -min(min(w, clip_max) A, clip(w, 1 - clip_low, 1 + clip_high) A) | outside the clip |
| `cap`   | -min(w, ratio_cap) A logprob, the weight a constant | never |
| `gate`  | -A sigmoid(t (w - 1)) 4 / t, with t = 1 if A > 0, else 1.05 | softly |
| `gamma` | -W^k exp(l (1 - W)) A logprob, the weight a constant, (k, l) = (2, 3) if A >= 0, else (3, 2) | softly |

A is the token's advantage. W is the product of w, and of importance weights, over the trajectory.

| aggregation | the sum over tokens is divided by |
|---|---|
| `token_mean`      | tokens of the optimizer step |
| `trajectory_mean` | tokens of the trajectory, times trajectories of the step |
| `trajectory_sum`  | trajectories of the step |
| `constant`        | trajectories of the step, times `max_completion_tokens` |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeGuard, get_args

from art_patch._lib.option import Option
from art_patch.errors import ConfigError

LossName = Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo", "sapo", "vespo", "luspo"]
SurrogateName = Literal["clip", "cap", "gate", "gamma"]
Aggregation = Literal["token_mean", "trajectory_mean", "trajectory_sum", "constant"]
Level = Literal["token", "sequence"]
Estimator = Literal["k1", "k2", "k3"]
Scale = Literal["group", "batch", "none"]

# A spread of rewards below this is rounding: three rewards of 0.1 have a standard deviation of 1e-17.
TOLERANCE = 1e-6
_EPSILON = 1e-4  # as in TRL: keeps a small spread from becoming a huge advantage


def advantages_of_groups(
    groups: Sequence[Sequence[float | None]], scale: Scale = "group"
) -> tuple[tuple[float, ...] | None, ...]:
    """Returns the advantage of every sibling of every group, and `None` in place of a group that teaches nothing.

    An advantage is `(reward - mean of its group) / (spread + 1e-4)`. The spread is the standard deviation of the group
    (DeepSeekMath, https://arxiv.org/abs/2402.03300) or of all rewards of the batch (https://arxiv.org/abs/2508.08221).
    With "none" nothing is divided (Dr. GRPO, https://arxiv.org/abs/2503.20783: the group's own spread makes very easy
    and very hard scenarios count more).

    Args:
        groups: The rewards of each group. `None`, or a number that is not finite, stands for a sibling that was not
            scored or is not trained. It gets advantage 0 and changes no other advantage.
        scale: The spread to divide by. "batch" counts every reward given, those of groups that teach nothing too.
    """
    scored = [[reward for reward in group if _is_scored(reward)] for group in groups]
    of_batch = _spread([reward for rewards in scored for reward in rewards])
    return tuple(
        _advantages(group, rewards, {"group": _spread(rewards), "batch": of_batch, "none": None}[scale])
        for group, rewards in zip(groups, scored, strict=True)
    )


def _advantages(
    group: Sequence[float | None], scored: Sequence[float], spread: float | None
) -> tuple[float, ...] | None:
    # Fewer than two scored siblings, or all scored alike: the group is skipped. TRL computes it with zeros, so its
    # tokens count in the mean of the loss there.
    if _spread(scored) < TOLERANCE:
        return None
    mean = math.fsum(scored) / len(scored)
    divisor = 1.0 if spread is None else spread + _EPSILON
    return tuple((reward - mean) / divisor if _is_scored(reward) else 0.0 for reward in group)


def _is_scored(reward: float | None) -> TypeGuard[float]:
    return reward is not None and math.isfinite(reward)


def _spread(rewards: Sequence[float]) -> float:
    """Returns the standard deviation with ddof=1, as TRL computes it; 0 of fewer than two rewards."""
    if len(rewards) < 2:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


@dataclass(frozen=True, slots=True)
class Loss:
    """A row of the table of losses: surrogate and aggregation are explained at the top of the module.

    Attributes:
        paper: Address of the paper that proposed the loss.
        levels: Levels of the probability ratio that may be chosen. The first is the paper's.
        settings: The fields of `LossConfig` that this loss has, with the paper's values.
    """

    paper: str
    surrogate: SurrogateName
    aggregation: Aggregation
    levels: tuple[Level, ...]
    settings: Mapping[str, float]


def _clip(low: float, high: float) -> dict[str, float]:
    return {"clip_low": low, "clip_high": high, "clip_max": math.inf}


_TOKEN_FIRST: tuple[Level, ...] = ("token", "sequence")

# TRL's `bnpo` has no name here: it is `dapo` with the tokens of a micro-batch in place of the step's, so that settings
# of memory change the gradient.
LOSSES: dict[LossName, Loss] = {
    # Long trajectories weigh less a token: a long bad answer is punished less than a short one.
    "grpo": Loss("https://arxiv.org/abs/2402.03300", "clip", "trajectory_mean", _TOKEN_FIRST, _clip(0.2, 0.2)),
    # Meant for advantages that are not scaled either: `TrainConfig.advantage_scale="none"`.
    "dr_grpo": Loss(
        "https://arxiv.org/abs/2503.20783",
        "clip",
        "constant",
        _TOKEN_FIRST,
        _clip(0.2, 0.2) | {"max_completion_tokens": 1024},
    ),
    "dapo": Loss("https://arxiv.org/abs/2503.14476", "clip", "token_mean", _TOKEN_FIRST, _clip(0.2, 0.28)),
    # The paper bounds the ratio from above only and gives no number; 5 is ScaleRL's, https://arxiv.org/abs/2510.13786.
    "cispo": Loss("https://arxiv.org/abs/2506.13585", "cap", "token_mean", _TOKEN_FIRST, {"ratio_cap": 5.0}),
    # Section 5.1. A mean of log ratios is a hundred times nearer to 0 than one token's, hence so narrow a clip.
    "gspo": Loss("https://arxiv.org/abs/2507.18071", "clip", "trajectory_mean", ("sequence",), _clip(3e-4, 4e-4)),
    "sapo": Loss("https://arxiv.org/abs/2511.20347", "gate", "trajectory_mean", _TOKEN_FIRST, {}),
    # Its weight is a product over the trajectory, so noise of .02 nats a token silences trajectories of some thousand
    # tokens; the level is that of the ratio that weighs the KL term.
    "vespo": Loss("https://arxiv.org/abs/2602.10693", "gamma", "token_mean", ("token",), {}),
    # GSPO without its division by length; section 5.1.
    "luspo": Loss(
        "https://arxiv.org/abs/2602.05261", "clip", "trajectory_sum", ("sequence", "token"), _clip(2e-3, 2.5e-3)
    ),
}


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Settings of a loss. `None` stands for the value of its paper (`LOSSES`), or for "off" where it says so.

    Attributes:
        name: A row of `LOSSES`.
        level: "token" weighs each token by its own ratio, "sequence" by its trajectory's (GSPO); `None`: the paper's.
        clip_low: How far below 1 a ratio still moves a token of a bad trajectory.
        clip_high: How far above 1 a ratio still moves a token of a good trajectory (DAPO's clip-higher).
        clip_max: Ratio above which a token of a bad trajectory no longer moves, so that one absurd token cannot carry
            the step (INTELLECT-2, https://arxiv.org/abs/2505.07291; TRL's `delta`). `None`: off.
        ratio_cap: Largest weight of a token in `cispo`. It bounds the ratio itself, not its distance from 1, and the
            token still learns. TRL takes the same number as `epsilon_high`, so that its default caps every ratio at .2.
        max_completion_tokens: The constant of `dr_grpo`. It scales the loss, and under a clipped gradient norm and
            AdamW little else. Keep it fixed between runs that are compared.
        kl_coefficient: Weight of KL(trained || reference) a token, which is added to the loss. 0 needs no reference.
        kl_estimator: Estimate of that KL, see http://joschu.net/blog/kl-approx.html: "k1" is unbiased and noisy, "k2"
            is half the squared log ratio, "k3" is unbiased and never negative. Each is multiplied by the ratio,
            gradient included, so that the gradient is that of the KL (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556,
            TRL's default). Without the ratio k1 would have no gradient on average, and k3 the gradient of the opposite
            KL.
        importance_cap: Tokens that another policy or engine sampled are weighed by min(exp(old - recorded), this),
            each by itself. `None`: off.
        off_policy_nats: A trajectory of negative advantage whose mean of (recorded - logprob) is above this is not
            learned from (DeepSeek-V3.2). It is still held near the reference. `None`: off.
    """

    name: Annotated[LossName, Option(name="loss", help="Loss to minimise, as in its paper.")] = "dapo"
    level: Level | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    clip_max: float | None = None
    ratio_cap: float | None = None
    max_completion_tokens: int | None = None
    kl_coefficient: Annotated[
        float, Option(name="kl", least=0.0, help="Weight of the KL divergence that keeps the policy near the base.")
    ] = 0.0
    kl_estimator: Estimator = "k3"
    importance_cap: float | None = 3.0
    off_policy_nats: float | None = None

    def __post_init__(self) -> None:
        """Raises `ConfigError` for an impossible value, with the field, the value and what to write instead."""
        _require_one_of("loss name", self.name, tuple(LOSSES))
        _require_one_of("kl_estimator", self.kl_estimator, get_args(Estimator))
        if self.level is not None:
            _require_one_of(f"level (of {self.name})", self.level, self.loss.levels)
        for name, (possible, limit) in _LIMITS.items():
            value: float | None = getattr(self, name)
            if value is None:
                continue
            if name in _OF_SOME_LOSSES and name not in self.loss.settings:
                has = ", ".join(self.loss.settings) or "none"
                raise ConfigError(f"{name}={value!r}: {self.name} does not have it (it has: {has}); leave it out")
            if not possible(value):
                raise ConfigError(f"{name}={value!r} must be {limit}; leave it out for the default")
        if self.clip_max is not None and not self.clip_max > 1 + self.settings["clip_high"]:
            least = 1 + self.settings["clip_high"]
            raise ConfigError(f"clip_max={self.clip_max!r} must be above 1 + clip_high, {least:g}, or would replace it")

    @property
    def loss(self) -> Loss:
        """The row of `LOSSES` that `name` stands for."""
        return LOSSES[self.name]

    @property
    def ratio_level(self) -> Level:
        """The level in force: the given one, else the paper's."""
        return self.level or self.loss.levels[0]

    @property
    def settings(self) -> dict[str, float]:
        """The fields that this loss has, each with the given value or the paper's."""
        given: dict[str, float | None] = {name: getattr(self, name) for name in self.loss.settings}
        return {name: paper if (mine := given[name]) is None else mine for name, paper in self.loss.settings.items()}


_Limit = tuple[Callable[[float], bool], str]
_ABOVE_0: _Limit = (lambda value: 0 < value < math.inf, "above 0")
_FROM_1: _Limit = (lambda value: 1 <= value < math.inf, "at least 1")

_LIMITS: dict[str, _Limit] = {
    "clip_low": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "clip_high": _ABOVE_0,
    "clip_max": _FROM_1,
    "ratio_cap": _FROM_1,
    "max_completion_tokens": _FROM_1,
    "kl_coefficient": (lambda value: 0 <= value < math.inf, "at least 0"),
    "importance_cap": _FROM_1,
    "off_policy_nats": _ABOVE_0,
}
_OF_SOME_LOSSES = {name for loss in LOSSES.values() for name in loss.settings}


def _require_one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{field}={value!r} is unknown; choose one of: {', '.join(known)}")
