"""Computes advantages from rewards, and defines the losses that an update can minimise with them. Loads no torch.

Each loss is defined as data by three choices: a surrogate (the loss of one token), an aggregation (how the losses of
tokens are weighed against each other) and a level (whether the probability ratio is that of a token or of its
trajectory). Other combinations, and a setting that the chosen loss does not use, raise a `ConfigError`.
`art_patch.training.losses` computes the losses.

The surrogates use the ratio w. At level "token" it is exp(logprob - old) of the token. At level "sequence" it is the
exponential of the mean of (logprob - old) over the token's trajectory. `old` is the log-probability under the policy at
the start of the update, or the recorded one if `importance_cap` is off:

| surrogate | a token's loss | its gradient becomes zero |
|---|---|---|
| `clip`  | -min(min(w, clip_max) A, clip(w, 1 - clip_low, 1 + clip_high) A) | outside the clip |
| `cap`   | -min(w, ratio_cap) A logprob, the weight a constant | never |
| `gate`  | -A sigmoid(t (w - 1)) 4 / t, with t = 1 if A > 0, else 1.05 | softly |
| `gamma` | -W^k exp(l (1 - W)) A logprob, the weight a constant, (k, l) = (2, 3) if A >= 0, else (3, 2) | softly |

In this table A is the token's advantage. W is the product, over all tokens of the trajectory, of w and the importance
weight.

| aggregation | the sum of the token losses is divided by |
|---|---|
| `token_mean`      | the number of tokens in the optimizer step, both weighted by `weights_of_kinds` |
| `trajectory_mean` | the number of tokens in the trajectory, times the number of trajectories in the step |
| `trajectory_sum`  | the number of trajectories in the step |
| `constant`        | the number of trajectories in the step, times `max_completion_tokens` |
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, get_args

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
# Of equal siblings, noise alone makes their spread larger than this many times its own in 5 of 100 pairs, in 7 of 1,000
# groups of four, and in 2 of 10,000 groups of eight.
TIMES_NOISE = 2.0
_EPSILON = 1e-4  # as in TRL: keeps a small spread from becoming a huge advantage


def advantages_of_groups(
    groups: Sequence[Sequence[float | None]],
    scale: Scale = "batch",
    *,
    noise: Sequence[float] = (),
    kinds: Sequence[str] = (),
) -> tuple[tuple[float, ...] | None, ...]:
    """Returns the advantages of the siblings of each group, or `None` for a group whose rewards do not really differ.

    A group with fewer than two rewards gives `None` too. An advantage is `(reward - mean of its group) / (spread +
    1e-4)`. The spread is the standard deviation of the rewards of the "group" (DeepSeekMath,
    https://arxiv.org/abs/2402.03300), or of all rewards in `groups` ("batch", https://arxiv.org/abs/2508.08221). With
    the scale "none" the difference is not divided (Dr. GRPO, https://arxiv.org/abs/2503.20783): dividing by the group's
    own spread gives very easy and very hard scenarios more weight.

    A reward of `None`, or one that is not finite, stands for a sibling that was not scored or is not trained. It gets
    advantage 0 and does not change the other advantages.

    `noise` has for each group the standard deviation of the error in its rewards; without it there is none. Rewards
    whose standard deviation is at most `TIMES_NOISE` times their noise differ by chance. `kinds` has the kind of each
    group, such as "turn" for single turns: each kind is a "batch" of its own, because its rewards have another spread.
    """
    scored = [[reward for reward in group if _is_scored(reward)] for group in groups]
    kind_of, noise_of = kinds or ("",) * len(scored), noise or (0.0,) * len(scored)
    of_kind: dict[str, list[float]] = {}
    for rewards, kind in zip(scored, kind_of, strict=True):
        of_kind.setdefault(kind, []).extend(rewards)
    batches = {kind: _spread(rewards) for kind, rewards in of_kind.items()}
    advantages: list[tuple[float, ...] | None] = []
    for group, rewards, kind, error in zip(groups, scored, kind_of, noise_of, strict=True):
        spread = _spread(rewards)
        # Fewer than two scored siblings, or all scored alike: the group is skipped. TRL computes it with zeros, so its
        # tokens count in the mean of the loss there.
        if spread < TOLERANCE or spread <= TIMES_NOISE * error:
            advantages.append(None)
            continue
        mean = math.fsum(rewards) / len(rewards)
        divisor = {"group": spread + _EPSILON, "batch": batches[kind] + _EPSILON, "none": 1.0}[scale]
        advantages.append(tuple((reward - mean) / divisor if _is_scored(reward) else 0.0 for reward in group))
    return tuple(advantages)


def weights_of_kinds(kinds: Sequence[str], tokens: Sequence[int], trajectories: Sequence[int]) -> tuple[float, ...]:
    """Returns for each group the weight of its tokens in a "token_mean", given its kind and its numbers of both.

    With these weights each kind has the share of the loss that it has of the trajectories; without them the tokens of
    whole runs drown those of single turns. The mean weight of a token is 1.
    """
    tokens_of, trajectories_of = Counter[str](), Counter[str]()
    for kind, its_tokens, its_trajectories in zip(kinds, tokens, trajectories, strict=True):
        tokens_of[kind] += its_tokens
        trajectories_of[kind] += its_trajectories
    # In this order: the weight of the only kind is exactly 1.
    return tuple(
        (trajectories_of[kind] / trajectories_of.total()) / (tokens_of[kind] / tokens_of.total()) for kind in kinds
    )


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
    """The definition of one loss, an entry of `LOSSES`."""

    paper: str  # web address of the paper that proposed the loss
    surrogate: SurrogateName  # which formula gives the loss of one token; the module's docstring lists the formulas
    # By which number the sum of the token losses is divided; the module's docstring lists them.
    aggregation: Aggregation
    # The levels ("token" or "sequence") at which the probability ratio may be computed. The first is the paper's.
    levels: tuple[Level, ...]
    settings: Mapping[str, float]  # the fields of `LossConfig` that this loss uses, with the paper's values


def _clip(low: float, high: float, **more: float) -> dict[str, float]:
    return {"clip_low": low, "clip_high": high, "clip_max": math.inf, **more}


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
        _clip(0.2, 0.2, max_completion_tokens=1024),
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
_OF_SOME_LOSSES = {name for loss in LOSSES.values() for name in loss.settings}


@dataclass(frozen=True)
class Limit:
    """What a field of a configuration may hold; it stands in the field's type, `Annotated[int, Limit(...)]`."""

    allows: Callable[[Any], bool]
    words: str  # what an error message says after "must be"


# A config may come from JSON or a command line, so the type checker has not seen its values. And a bool is an int in
# Python: `epochs=True` would pass for 1.
def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


NUMBER = Limit(_is_number, "a number")
ABOVE_0 = Limit(lambda value: _is_number(value) and value > 0, "a number above 0")
FROM_0 = Limit(lambda value: _is_number(value) and value >= 0, "a number, at least 0")
SHARE = Limit(lambda value: _is_number(value) and 0 < value <= 1, "above 0 and at most 1")
_FROM_1 = Limit(lambda value: _is_number(value) and value >= 1, "a number, at least 1")


def limits_of(config: Any) -> Iterator[tuple[str, Any, Limit]]:
    """Yields name, value and limit of each field of a configuration whose type states a limit."""
    for each in fields(config):
        for mark in get_args(each.type):
            if isinstance(mark, Limit):
                yield each.name, getattr(config, each.name), mark


def require_one_of(field: str, value: str, known: Sequence[str]) -> None:
    """Raises `ConfigError` if the value of `field` is not one of the `known`."""
    if value not in known:
        raise ConfigError(f"{field}={value!r} is unknown; choose one of: {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Settings of the loss on groups. `None` means the value of the loss's paper (`LOSSES`), or "off" where stated.

    The ratio is the probability of a token under the policy in training, divided by its probability under the policy at
    the start of the update. If `importance_cap` is off, it is divided by the recorded probability instead, that of the
    policy that sampled the token. A bad trajectory has a negative advantage, a good one a positive advantage.

    Attributes:
        name: Loss to minimise, as in its paper (`LOSSES`).
        level: "token" computes a ratio for each token, "sequence" one for each trajectory, from the mean of its log
            ratios (GSPO). `None`: the paper's level.
        clip_low: A token of a bad trajectory gets no gradient when its ratio is below `1 - clip_low`.
        clip_high: A token of a good trajectory gets no gradient when its ratio is above `1 + clip_high` (DAPO's
            clip-higher).
        clip_max: A token of a bad trajectory gets no gradient when its ratio is above this, so that a single extreme
            token cannot dominate the step (INTELLECT-2, https://arxiv.org/abs/2505.07291; TRL's `delta`). `None`: off.
        ratio_cap: In `cispo` the ratio is a token's weight, and this is the largest weight. It bounds the ratio itself,
            not its distance from 1, and a token above it keeps its gradient. TRL's `epsilon_high` is the same number,
            so TRL's default caps every ratio at .2.
        max_completion_tokens: The constant by which `dr_grpo` divides. It scales the loss, which changes little with a
            clipped gradient norm and AdamW. Losses can be compared only between runs with the same value.
        kl_coefficient: Weight of KL(trained || reference) of each token, which is added to the loss. At 0 the reference
            policy is not computed.
        kl_estimator: How that KL is estimated, see http://joschu.net/blog/kl-approx.html: "k1" is unbiased and noisy,
            "k2" is half the squared log ratio, "k3" is unbiased and never negative. Each estimate is multiplied by the
            ratio with its gradient, so that the result has the gradient of the KL (DeepSeek-V3.2,
            https://arxiv.org/abs/2512.02556; the default in TRL). Without this factor k1 would have no gradient on
            average, and k3 would have the gradient of KL(reference || trained).
        importance_cap: Each token's loss, without its KL term, is multiplied by the importance weight min(exp(old -
            recorded), importance_cap). The weight corrects for tokens that another policy or engine sampled than the
            policy at the start of the update. In `vespo` the weight is a factor of W instead. `None`: off.
        off_policy_nats: A bad trajectory is not learned from if the mean of (recorded - logprob) over its tokens is
            above this (DeepSeek-V3.2). The KL term still applies to it. `None`: off.
    """

    PANEL: ClassVar[str] = "The loss on groups"  # of their options in `--help`

    name: Annotated[LossName, Option(name="loss")] = "dapo"
    level: Annotated[Level | None, Option(name="ratio-level")] = None
    clip_low: Annotated[float | None, SHARE, Option()] = None
    clip_high: Annotated[float | None, ABOVE_0, Option()] = None
    clip_max: Annotated[float | None, _FROM_1, Option()] = None
    ratio_cap: Annotated[float | None, _FROM_1, Option()] = None
    max_completion_tokens: Annotated[int | None, _FROM_1, Option(least=1)] = None
    kl_coefficient: Annotated[float, FROM_0, Option(name="kl", least=0.0)] = 0.0
    kl_estimator: Annotated[Estimator, Option()] = "k3"
    importance_cap: Annotated[float | None, _FROM_1, Option(or_none=True)] = 3.0
    off_policy_nats: Annotated[float | None, ABOVE_0, Option()] = None

    def __post_init__(self) -> None:
        """Raises `ConfigError` for an impossible value, with the field, the value and what to write instead."""
        require_one_of("loss name", self.name, tuple(LOSSES))
        require_one_of("kl_estimator", self.kl_estimator, get_args(Estimator))
        if self.level is not None:
            require_one_of(f"level (of {self.name})", self.level, self.loss.levels)
        for name, value, limit in limits_of(self):
            if value is None:
                continue
            if name in _OF_SOME_LOSSES and name not in self.loss.settings:
                has = ", ".join(self.loss.settings) or "none"
                raise ConfigError(f"{name}={value!r}: {self.name} does not have it (it has: {has}); leave it out")
            if not limit.allows(value):
                raise ConfigError(f"{name}={value!r} must be {limit.words}; leave it out for the default")
        if self.clip_max is not None and not self.clip_max > (least := 1 + self.settings["clip_high"]):
            raise ConfigError(f"clip_max={self.clip_max!r} must be above 1 + clip_high, {least:g}, or would replace it")

    @property
    def loss(self) -> Loss:
        """The definition of the chosen loss: the entry `name` of `LOSSES`."""
        return LOSSES[self.name]

    @property
    def ratio_level(self) -> Level:
        """The level at which the probability ratio is computed: `level` if it is set, else that of the loss's paper."""
        return self.level or self.loss.levels[0]

    @property
    def settings(self) -> dict[str, float]:
        """The settings that the chosen loss uses, by field name: the given value, else that of the loss's paper."""
        given: dict[str, float | None] = {name: getattr(self, name) for name in self.loss.settings}
        return {name: paper if (mine := given[name]) is None else mine for name, paper in self.loss.settings.items()}
