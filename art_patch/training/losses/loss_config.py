"""Which loss an update minimises, as data: a table of losses, and the settings of one. Loads no torch.

A loss is a surrogate (what one token contributes), an aggregation (how tokens are weighed against each other) and the
level of its probability ratio. `art_patch.training.losses.policy_loss` computes them; this module says what belongs
together and refuses what does not. A setting that the chosen loss does not have is an error, never ignored.

With w = exp(logprob - old) of a token, or for level "sequence" the exponential of its trajectory's mean log ratio:

| surrogate | a token's loss | its gradient stops |
|---|---|---|
| `clip`  | -min(min(w, clip_max) A, clip(w, 1 - clip_low, 1 + clip_high) A) | outside the clip |
| `cap`   | -min(w, ratio_cap) A logprob, the weight a constant | never |
| `gate`  | -A sigmoid(t (w - 1)) 4 / t, with t = 1 if A > 0, else 1.05 | softly |
| `gamma` | -W^k exp(l (1 - W)) A logprob, the weight a constant, (k, l) = (2, 3) if A >= 0, else (3, 2) | softly |

W is the product of w, and of importance weights, over the trajectory.

| aggregation | the sum over tokens is divided by |
|---|---|
| `token_mean`      | tokens of the optimizer step |
| `trajectory_mean` | tokens of the trajectory, times trajectories of the step |
| `trajectory_sum`  | trajectories of the step |
| `constant`        | trajectories of the step, times `max_completion_tokens` |

TRL's `bnpo` is `dapo` with the tokens of a micro-batch in place of the step's, so that memory settings change the
gradient; it has no name here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from art_patch.errors import ConfigError

LossName = Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo", "sapo", "vespo", "luspo"]
SurrogateName = Literal["clip", "cap", "gate", "gamma"]
Aggregation = Literal["token_mean", "trajectory_mean", "trajectory_sum", "constant"]
Level = Literal["token", "sequence"]
Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class Loss:
    """What a name stands for.

    Attributes:
        paper: where it comes from.
        surrogate: what one token contributes; see the module.
        aggregation: how tokens are weighed; see the module.
        levels: of the ratio; the first is the paper's, others may be chosen.
        settings: the fields of `LossConfig` that it has, with the paper's values.
    """

    paper: str
    surrogate: SurrogateName
    aggregation: Aggregation
    levels: tuple[Level, ...]
    settings: Mapping[str, float]


def _clip(low: float, high: float) -> dict[str, float]:
    return {"clip_low": low, "clip_high": high, "clip_max": math.inf}


_TOKEN_FIRST: tuple[Level, ...] = ("token", "sequence")

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
        name: a row of `LOSSES`.
        level: "token" weighs each token by its own ratio, "sequence" by its trajectory's (GSPO); `None`: the loss's.
        clip_low: how far below 1 a ratio still moves a token of a bad trajectory.
        clip_high: how far above 1 a ratio still moves a token of a good one (DAPO's clip-higher).
        clip_max: ratio above which a token of a bad trajectory no longer moves, so that one absurd token cannot carry
            the step (INTELLECT-2, https://arxiv.org/abs/2505.07291; TRL's `delta`). `None`: off.
        ratio_cap: largest weight of a token in `cispo`. It bounds the ratio itself, not its distance from 1, and the
            token still learns. TRL takes the same number as `epsilon_high`, so that its default caps every ratio at .2.
        max_completion_tokens: the constant of `dr_grpo`. It scales the loss, and under a clipped gradient norm and
            AdamW little else; keep it fixed between runs that are compared.
        kl_coefficient: of KL(trained || reference) a token, added to the loss. 0 needs no reference.
        kl_estimator: of that KL, by http://joschu.net/blog/kl-approx.html: "k1" unbiased and noisy, "k2" half the
            squared log ratio, "k3" unbiased and never negative. Each is multiplied by the ratio, gradient included, so
            that the gradient is that of the KL (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, TRL's default).
            Without it k1 would have no gradient on average and k3 that of the opposite KL, so it is no option.
        importance_cap: data that another policy or engine sampled is weighed by min(exp(old - recorded), this), token
            by token. Never by the product over a trajectory, in which mere rounding drowns the signal. `None`: off.
        off_policy_nats: a trajectory of negative advantage whose mean of (recorded - logprob) is above this is not
            learned from (DeepSeek-V3.2); it is still held near the reference. `None`: off.
    """

    name: LossName = "dapo"
    level: Level | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    clip_max: float | None = None
    ratio_cap: float | None = None
    max_completion_tokens: int | None = None
    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k3"
    importance_cap: float | None = 3.0
    off_policy_nats: float | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: naming the field, its value and what to write instead.
        """
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
        """The row of the table."""
        return LOSSES[self.name]

    @property
    def ratio_level(self) -> Level:
        """The level in force."""
        return self.level or self.loss.levels[0]

    @property
    def settings(self) -> dict[str, float]:
        """The values in force of what this loss has."""
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
