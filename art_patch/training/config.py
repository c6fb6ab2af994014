"""Settings of an update. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Literal, get_args

from art_patch.errors import ConfigError
from art_patch.training.losses.loss_config import LossConfig, Scale

Start = Literal["champion", "base"]
Reference = Literal["base", "champion"]
Dtype = Literal["auto", "float32", "bfloat16"]
Backend = Literal["auto", "peft", "unsloth"]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How one update is made.

    Attributes:
        learning_rate: of AdamW at its peak. Too high shows as a large `kl_nats` and a candidate that loses.
        epochs: passes over what is learned; more than two drift far from the policy that sampled them.
        minibatches: optimizer steps an epoch; each takes whole groups. More steps move further on the same data.
        batch_size: groups that one optimizer step takes (before groups are ranked: demonstrations, or pairs), whatever
            their number, in place of `minibatches`. `None`: `minibatches` says it.
        gradient_accumulation_steps: batches of `batch_size` that one optimizer step takes, as in TRL. No more than a
            batch is computed at once, and the gradient is that of the one large batch, normaliser and all; what rows
            of several batches begin with is computed in each. Needs `batch_size`. `micro_batch_tokens` bounds memory
            whatever both of them are.
        total_steps: optimizer steps that an update makes at most, over all phases. `None`: all that epochs come to.
        warmup_steps: optimizer steps of each phase over which the learning rate rises from zero.
        start: "champion" goes on from the LoRA that serves; "base" begins a new one, which forgets what was learned
            before and whatever went wrong in it.
        lora_rank: rank of a new LoRA; a LoRA that is continued keeps its own. A server is started for a largest rank.
        lora_alpha: scale of a new LoRA, likewise.
        lora_dropout: share of a LoRA's inputs that each optimizer step leaves out, as in peft; of one that is continued
            too. 0 because the losses compare what is trained with the policy that sampled: with dropout their ratio is
            not 1 in the first step, and `kl_nats` and the clip see noise. Scores at the start, the reference,
            evaluations and what serves are without it. What rows share is computed once, so its mask is shared too.
        loss: what is minimised on groups; DAPO unless said otherwise.
        reference: what `loss.kl_coefficient` holds the policy near: the "base" keeps it general, the "champion" keeps
            each update small. Without the coefficient nothing is computed for it.
        advantage_scale: what a reward's distance from its group's mean is divided by, see `advantages_of_groups`;
            "none" goes with the loss `dr_grpo`.
        imitate_from: upstream's answers in runs of at least this reward, and corrections, are imitated before groups
            are ranked, see `demonstrations`. `None`: nothing is.
        prefer_from: siblings whose rewards differ by at least this much, and corrections, are told apart likewise, see
            `preferences`. `None`: nothing is.
        rehearse_from: against forgetting, each step on groups also imitates a few answers that are known already: the
            model's own of earlier cycles in runs of at least this reward, and demonstrations. `None`: none.
        rehearse_weight: of their mean negative log-likelihood beside the groups' loss. Too much, and nothing new is
            learned.
        preference_beta: of DPO: the larger, the nearer the policy stays to where it began.
        weight_decay: of AdamW: each step takes the learning rate times this of every LoRA weight away.
        max_grad_norm: gradients are scaled down to this norm, once an optimizer step.
        max_staleness: trajectories of policies more than this many steps behind the champion are not trained on.
        max_kl_nats: an update ends before the first step in which KL(behaviour || trained) a token is above this; what
            was learned until then is published. `None`: never.
        max_clip_fraction: likewise for the share of tokens that the clip leaves without a gradient. `None`: never, as
            such tokens move nothing by themselves.
        micro_batch_tokens: distinct tokens computed at once; bounds memory, changes no result beyond rounding.
        max_tokens: longer rows are cut at the end.
        learn_truncated: train answers that were cut off at their length limit. A judge that punishes them teaches to be
            brief, but also to write nothing of what was in them; `False` leaves their tokens out. A run that has no
            other answer then does not count in the baseline of its group, see `art_patch.training.data.rows`.
        gradient_checkpointing: compute each block again in the backward: a third more time, much less memory. `None`:
            on a GPU only.
        dtype: of the base's weights; "auto" is bfloat16 on a GPU and float32 on a CPU. The LoRA is float32. Take what
            serves, or `logprob_gap_nats` grows.
        seed: of a new LoRA's weights and of the order of groups.
        checkpoint_every_s: an update that is killed loses at most this much, or one step if that takes longer; 0 keeps
            every step.
        save_steps: keep a checkpoint every so many optimizer steps as well, so that at most one less of them is lost.
            It replaces the one before: it is there to go on from, and a policy is published at the end. `None`: by
            time alone.
        eval_steps: every so many optimizer steps, and at the end, see what the policy makes of groups that it does not
            learn from, see `art_patch.training.loop.evaluation`. `retrain` takes held-out groups that have rewards
            already and says in its metrics if there are none; by hand they are `model.train(eval_groups=...)`. `None`:
            never.
        processes: on this machine, each with a GPU of its own if there are GPUs; 1 trains in the job's own.
        backend: "unsloth" computes faster on CUDA and has to be installed; "auto" takes it if it can.
        beta: another word for `loss.kl_coefficient`, to be given and not to be read.
        kl_penalty: likewise.
        clip_range: another word for `loss.clip_low` and `loss.clip_high`, one number for both or two; likewise.
    """

    learning_rate: float = 1e-4
    epochs: int = 2
    minibatches: int = 8
    batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    total_steps: int | None = None
    warmup_steps: int = 5
    start: Start = "champion"
    lora_rank: int = 8
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    loss: LossConfig = field(default_factory=LossConfig)
    reference: Reference = "base"
    advantage_scale: Scale = "group"
    imitate_from: float | None = None
    prefer_from: float | None = None
    rehearse_from: float | None = None
    rehearse_weight: float = 0.1
    preference_beta: float = 0.1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_staleness: int = 2
    max_kl_nats: float | None = 1.0
    max_clip_fraction: float | None = None
    micro_batch_tokens: int = 16_384
    max_tokens: int = 32_768
    learn_truncated: bool = True
    gradient_checkpointing: bool | None = None
    dtype: Dtype = "auto"
    seed: int = 0
    checkpoint_every_s: float = 60.0
    save_steps: int | None = None
    eval_steps: int | None = None
    processes: int = 1
    backend: Backend = "auto"
    beta: InitVar[float | None] = None
    kl_penalty: InitVar[float | None] = None
    clip_range: InitVar[float | tuple[float, float] | None] = None

    def __post_init__(
        self, beta: float | None, kl_penalty: float | None, clip_range: float | tuple[float, float] | None
    ) -> None:
        """Refuse impossible values.

        Args:
            beta: see the class.
            kl_penalty: see the class.
            clip_range: see the class.

        Raises:
            ConfigError: naming the field, its value and what to write instead.
        """
        if beta is not None and kl_penalty is not None:
            raise ConfigError(f"beta={beta!r} and kl_penalty={kl_penalty!r} say the same; leave one of them out")
        said: dict[str, float] = {}
        if (coefficient := kl_penalty if beta is None else beta) is not None:
            said["kl_coefficient"] = coefficient
        if clip_range is not None:
            low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
            said |= {"clip_low": low, "clip_high": high}
        if said:
            object.__setattr__(self, "loss", replace(self.loss, **said))
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; choose one of: {', '.join(known)}")
        for name, (possible, limit) in _LIMITS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if not possible(value):
                raise ConfigError(f"{name}={value!r} must be {limit}")
        if self.gradient_accumulation_steps != 1 and self.batch_size is None:
            raise ConfigError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps!r} counts batches and there is no "
                f"batch_size: minibatches={self.minibatches} says how many steps there are already; give batch_size, "
                "or lower minibatches for larger steps"
            )


def require_evaluation(config: TrainConfig, groups: Sequence[object]) -> None:
    """Pass if there are groups to evaluate on just when the config asks for it.

    Raises:
        ConfigError: it does and there are none, or there are and it does not.
    """
    if config.eval_steps is not None and not groups:
        raise ConfigError(
            f"eval_steps={config.eval_steps}, but there is nothing to evaluate on; give eval_groups, which are not "
            "learned from, or leave eval_steps out"
        )
    if config.eval_steps is None and groups:
        raise ConfigError(
            "eval_groups are given, but eval_steps does not say when to evaluate on them; give it to TrainConfig"
        )


_CHOICES: dict[str, tuple[str, ...]] = {
    "start": get_args(Start),
    "reference": get_args(Reference),
    "advantage_scale": get_args(Scale),
    "dtype": get_args(Dtype),
    "backend": get_args(Backend),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_Limit = tuple[Callable[[Any], bool], str]
_ABOVE_0: _Limit = (lambda value: _is_number(value) and value > 0, "a number above 0")
_FROM_0: _Limit = (lambda value: _is_number(value) and value >= 0, "a number, at least 0")
_WHOLE_FROM_0: _Limit = (lambda value: _is_whole(value) and value >= 0, "a whole number, at least 0")
_WHOLE_FROM_1: _Limit = (lambda value: _is_whole(value) and value >= 1, "a whole number, at least 1")

_LIMITS: dict[str, _Limit] = {
    "learning_rate": _ABOVE_0,
    "epochs": _WHOLE_FROM_1,
    "minibatches": _WHOLE_FROM_1,
    "batch_size": (_WHOLE_FROM_1[0], "a whole number, at least 1, or None to go by minibatches"),
    "gradient_accumulation_steps": _WHOLE_FROM_1,
    "total_steps": (_WHOLE_FROM_1[0], "a whole number, at least 1, or None for no bound"),
    "warmup_steps": _WHOLE_FROM_0,
    "lora_rank": _WHOLE_FROM_1,
    "lora_alpha": _WHOLE_FROM_1,
    "lora_dropout": (lambda value: _is_number(value) and 0 <= value < 1, "at least 0 and below 1"),
    "imitate_from": (_is_number, "a number, or None to imitate nothing"),
    "prefer_from": (_ABOVE_0[0], "a number above 0, or None to prefer nothing"),
    "rehearse_from": (_is_number, "a number, or None to rehearse nothing"),
    "rehearse_weight": _ABOVE_0,
    "preference_beta": _ABOVE_0,
    "weight_decay": _FROM_0,
    "max_grad_norm": _ABOVE_0,
    "max_staleness": _WHOLE_FROM_0,
    "max_kl_nats": (_ABOVE_0[0], "a number above 0, or None for no bound"),
    "max_clip_fraction": (
        lambda value: _is_number(value) and 0 < value <= 1,
        "above 0 and at most 1, or None for no bound",
    ),
    "micro_batch_tokens": _WHOLE_FROM_1,
    "max_tokens": _WHOLE_FROM_1,
    "learn_truncated": (lambda value: isinstance(value, bool), "True or False"),
    "gradient_checkpointing": (lambda value: isinstance(value, bool), "True, False, or None to decide by the machine"),
    "seed": _WHOLE_FROM_0,
    "checkpoint_every_s": _FROM_0,
    "save_steps": (_WHOLE_FROM_1[0], "a whole number, at least 1, or None to go by checkpoint_every_s"),
    "eval_steps": (_WHOLE_FROM_1[0], "a whole number, at least 1, or None to evaluate nothing"),
    "processes": _WHOLE_FROM_1,
}
_MAY_BE_NONE = (
    "batch_size",
    "total_steps",
    "save_steps",
    "eval_steps",
    "imitate_from",
    "prefer_from",
    "rehearse_from",
    "max_kl_nats",
    "max_clip_fraction",
    "gradient_checkpointing",
)
