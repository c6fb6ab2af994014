"""The settings of an update, and checks whether this environment can run one. Loads no torch."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, get_args

from art_patch._lib.option import Option
from art_patch.errors import ConfigError
from art_patch.training import loss_config as limits
from art_patch.training.loss_config import Limit, LossConfig, Scale

Schedule = Literal["constant", "linear", "cosine"]
Start = Literal["candidate", "champion", "base"]
Reference = Literal["base", "champion"]
Dtype = Literal["auto", "float32", "bfloat16"]
Backend = Literal["auto", "peft", "unsloth"]
_CHOICES = {
    "lr_schedule": Schedule,
    "start": Start,
    "reference": Reference,
    "advantage_scale": Scale,
    "dtype": Dtype,
    "backend": Backend,
}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _or_none(limit: Limit, so: str) -> Limit:
    return Limit(lambda value: value is None or limit.allows(value), f"{limit.words}, or None {so}")


_WHOLE_FROM_0 = Limit(lambda value: _is_whole(value) and value >= 0, "a whole number, at least 0")
_SEED = Limit(lambda value: _is_whole(value) and 0 <= value < 1 << 63, "a whole number, at least 0 and below 2^63")
_WHOLE_FROM_1 = Limit(lambda value: _is_whole(value) and value >= 1, "a whole number, at least 1")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of one update. A row is one token sequence of a trajectory.

    The first sentence about a field is also the help of its option on the command line.

    Attributes:
        learning_rate: Peak learning rate of AdamW. If it is too high, `kl_nats` becomes large and the candidate loses
            in the gate.
        epochs: Number of passes over the data. With more than two, the policy moves far from the one that sampled it.
        minibatches: Number of optimizer steps in each epoch, each on complete groups. With more steps, the policy moves
            further on the same data.
        batch_size: Items (groups, demonstrations or pairs) in an optimizer step; by default an eighth of all.
            `None`: `minibatches` sets the number of steps.
        gradient_accumulation_steps: Number of batches of `batch_size` items in one optimizer step, as in TRL; it needs
            `batch_size`. The gradient equals that of one large batch. A beginning that rows of several batches have in
            common is computed once in each of them. The memory is bounded by `micro_batch_tokens` in any case.
        total_steps: Largest number of optimizer steps of an update, over all phases. `None`: as many steps as `epochs`
            passes over the data take.
        warmup_steps: Optimizer steps at the start of each phase over which the learning rate rises to its peak.
        lr_schedule: Learning rate after the warm-up of a phase: "constant", or falling to 0 at the end of the phase,
            "linear" or as a "cosine". With `total_steps` the phase ends earlier, and the rate falls faster.
        start: "candidate" continues the newest candidate, if its gate rejected it only for lack of proof, else the
            champion's LoRA; an update from a script, which no gate tests, takes the champion's. "champion" always
            continues the champion's. "base" begins a new one: everything that earlier updates learned is lost, good and
            bad.
        lora_rank: Rank of a new LoRA; it must not exceed the largest rank that the server was started with. A LoRA that
            is continued keeps its own rank.
        lora_alpha: Scale of a new LoRA. A LoRA that is continued keeps its own scale.
        lora_dropout: Share of a LoRA's inputs that each optimizer step drops, as in peft; it also applies to a LoRA
            that is continued. With dropout, the ratio of the policy in training to the one that sampled is not 1 in the
            first step, which adds noise to `kl_nats` and to the clip. All else is computed without dropout. A token
            that several rows have in common is computed once, so all of these rows get the same dropout mask.
        loss: The loss that is minimised on groups; DAPO by default.
        reference: The policy from which a KL term keeps the trained policy from moving far, if `loss.kl_coefficient` is
            not 0. "base" preserves the general abilities of the base model, "champion" keeps each single update small.
        advantage_scale: The spread by which the difference between a reward and its group's mean is divided, see
            `advantages_of_groups`. With "group", siblings that hardly differ are pushed as far apart as others. The
            loss `dr_grpo` was proposed with "none".
        anchor_weight: Weight of a turn's anchor advantage beside the advantage of its run: siblings that came to the
            same prompt are compared with one another alone, see `Anchors`. 0: every turn of a run gets the same.
        imitate_from: Before the training on groups, imitate corrections, and upstream's answers in runs of at least
            this reward (default: off). See `demonstrations`.
        imitate_models: Models of the provider on whose answers an update may train, by `imitate_from` or `prefer_from`:
            names as the app requests them, or patterns such as "qwen*". By default none, because the terms of many
            providers forbid it. `("none",)` imitates corrections alone, which are people's words.
        prefer_from: Before the training on groups, learn preferences (DPO) from corrections, and from siblings whose
            rewards differ by at least this much (default: off). See `preferences`.
        rehearse_from: Against forgetting, each step on groups also imitates a few known answers: demonstrations, and
            the model's own answers of earlier cycles in runs of at least this reward (default: off).
        rehearse_weight: Weight of the rehearsed answers' mean negative log-likelihood, which is added to the loss on
            groups. If it is too large, the policy learns nothing new.
        preference_beta: The beta of DPO. The larger it is, the nearer the policy stays to the policy at the start.
        weight_decay: Of AdamW: each step reduces every LoRA weight by the share (learning rate times this number).
        max_grad_norm: Largest norm of an optimizer step's gradient; a larger gradient is scaled down to it.
        max_staleness: A trajectory is not trained on if its policy is more than this many updates away from the
            champion, counted along the parents of both. A sibling of the champion, such as a rejected candidate, is 2
            away.
        max_drift_nats: A row is not trained on if KL(policy that sampled || policy at the start) per token, measured on
            the row itself (k2), is above this. `None`: no limit.
        max_gap_nats: The update fails before its first step if log-probabilities of the server and of the trainer
            differ by more than this on average, over tokens that the policy at the start sampled. In bfloat16 0.005 are
            normal. `None`: no limit.
        max_kl_nats: The update ends before the first step at which KL(policy at the start of the phase || policy in
            training) per token (k2) is above this. The result of the steps made until then is published; if there is
            none, the update fails. `None`: no limit.
        max_clip_fraction: Ends the update as `max_kl_nats` does, for the share of tokens beyond the clip or the cap of
            the loss. `None`: no limit.
        micro_batch_tokens: Number of distinct tokens computed at once. It bounds the memory and changes only rounding.
        max_tokens: Largest number of tokens in a row; the rest of a longer row is cut off and not trained.
        learn_truncated: Whether to train on answers that were cut off at their length limit. If a judge gives them low
            rewards, the policy learns to be brief, but also to avoid the content of these answers. `False` leaves their
            tokens out. A run without any other answer then does not count in the baseline of its group, see
            `art_patch.training.data.rows`.
        gradient_checkpointing: Whether to compute each transformer block again in the backward pass, which takes a
            third more time and much less memory. `None`: on a GPU only.
        dtype: Precision of the base model's weights; "auto" is bfloat16 on a GPU and float32 on a CPU. The LoRA is
            float32. Choose the precision in which the model is served, or `logprob_gap_nats` becomes larger.
        base_bits: Bits of a base weight during an update: 4 (NF4), 8, or 16, which leaves it as `dtype` says. Layers
            with a LoRA are packed, and unpacked for each product, which needs less memory and more time. The engine
            serves the whole base, so `logprob_gap_nats` grows: little with 8 bits, and with 4 bits possibly above
            `max_gap_nats`. Only with the backend peft.
        seed: Seed of a new LoRA's weights and of the order of groups.
        checkpoint_every_s: Seconds between checkpoints. An update that is killed loses at most the work of this time,
            or of one step if a step takes longer. 0 writes a checkpoint after every step.
        save_steps: A checkpoint is also written each time after this many optimizer steps. It replaces the previous
            checkpoint and is used only to continue after a kill. `None`: checkpoints are written by time only.
        eval_steps: Each time after this many optimizer steps, and at the end, evaluate on groups that are not learned
            from. `retrain` uses held-out groups that already have rewards, and states in its metrics if there are none.
            With `model.train(eval_groups=...)` you give the groups yourself. `None`: no evaluation.
        early_stop: The update ends after so many evaluations of its last phase in a row whose `eval_loss` is not below
            the lowest one, and publishes the LoRA of the lowest one. It needs `eval_steps`. `None`: off.
        processes: Number of training processes on this machine. If there are GPUs, each process uses one of its own.
            With 1 and the backend peft, the training runs in the job's own process.
        backend: Trainer; "auto" is peft. Unsloth needs a CUDA GPU and the environment that `art-patch init unsloth`
            builds, computes each row by itself, and is not ready: of the demo's model its log-probabilities differed
            from the server's by more than `max_gap_nats`, and the update was refused.
        beta: An alias that sets `loss.kl_coefficient`, for users of other trainers. It cannot be read back.
        kl_penalty: A second alias that sets `loss.kl_coefficient`. It cannot be given together with `beta`.
        clip_range: An alias that sets `loss.clip_low` and `loss.clip_high`, to one number for both or to a pair of
            numbers. It cannot be read back.
    """

    PANEL: ClassVar[str] = "The update"  # of their options in `--help`

    learning_rate: Annotated[float, limits.ABOVE_0, Option()] = 1e-4
    epochs: Annotated[int, _WHOLE_FROM_1, Option(least=1)] = 2
    minibatches: Annotated[int, _WHOLE_FROM_1, Option(least=1)] = 8
    batch_size: Annotated[int | None, _or_none(_WHOLE_FROM_1, "to go by minibatches"), Option(least=1)] = None
    gradient_accumulation_steps: Annotated[int, _WHOLE_FROM_1, Option(least=1)] = 1
    total_steps: Annotated[int | None, _or_none(_WHOLE_FROM_1, "for no bound"), Option(least=1)] = None
    warmup_steps: Annotated[int, _WHOLE_FROM_0, Option(least=0)] = 5
    lr_schedule: Annotated[Schedule, Option()] = "constant"
    start: Annotated[Start, Option()] = "candidate"
    lora_rank: Annotated[int, _WHOLE_FROM_1, Option(least=1)] = 8
    lora_alpha: Annotated[int, _WHOLE_FROM_1, Option(least=1)] = 16
    lora_dropout: Annotated[
        float,
        Limit(lambda value: limits.NUMBER.allows(value) and 0 <= value < 1, "at least 0 and below 1"),
        Option(least=0.0),
    ] = 0.0
    loss: LossConfig = field(default_factory=LossConfig)
    reference: Annotated[Reference, Option()] = "base"
    advantage_scale: Scale = "batch"
    anchor_weight: Annotated[float, limits.FROM_0, Option(least=0.0)] = 0.0
    imitate_from: Annotated[float | None, _or_none(limits.NUMBER, "to imitate nothing"), Option()] = None
    imitate_models: tuple[str, ...] = ()
    prefer_from: Annotated[float | None, _or_none(limits.ABOVE_0, "to prefer nothing"), Option()] = None
    rehearse_from: Annotated[float | None, _or_none(limits.NUMBER, "to rehearse nothing"), Option()] = None
    rehearse_weight: Annotated[float, limits.ABOVE_0, Option()] = 0.1
    preference_beta: Annotated[float, limits.ABOVE_0, Option()] = 0.1
    weight_decay: Annotated[float, limits.FROM_0, Option(least=0.0)] = 0.0
    max_grad_norm: Annotated[float, limits.ABOVE_0, Option()] = 1.0
    max_staleness: Annotated[int, _WHOLE_FROM_0, Option(least=0)] = 2
    max_drift_nats: Annotated[float | None, _or_none(limits.ABOVE_0, "for no bound"), Option(or_none=True)] = 0.5
    max_gap_nats: Annotated[float | None, _or_none(limits.ABOVE_0, "for no bound"), Option(or_none=True)] = 0.05
    max_kl_nats: Annotated[float | None, _or_none(limits.ABOVE_0, "for no bound"), Option(or_none=True)] = 0.2
    # The demo's updates, which learn fast and well, reach 0.3; an update that broke its policy reached 0.5.
    max_clip_fraction: Annotated[float | None, _or_none(limits.SHARE, "for no bound"), Option(or_none=True)] = 0.4
    micro_batch_tokens: Annotated[int, _WHOLE_FROM_1, Option(least=1)] = 16_384
    max_tokens: Annotated[int, _WHOLE_FROM_1, Option(least=1)] = 32_768
    learn_truncated: Annotated[bool, Limit(_is_bool, "True or False"), Option(off="--no-learn-truncated")] = True
    gradient_checkpointing: Annotated[
        bool | None,
        _or_none(Limit(_is_bool, "True, False"), "to decide by the machine"),
        Option(off="--no-gradient-checkpointing"),
    ] = None
    dtype: Annotated[Dtype, Option()] = "auto"
    base_bits: Annotated[int, Limit(lambda value: value in (4, 8, 16), "4, 8 or 16"), Option(least=4, most=16)] = 16
    seed: Annotated[int, _SEED, Option(least=0)] = 0
    checkpoint_every_s: Annotated[float, limits.FROM_0, Option(least=0.0)] = 60.0
    save_steps: Annotated[int | None, _or_none(_WHOLE_FROM_1, "to go by checkpoint_every_s"), Option(least=1)] = None
    eval_steps: Annotated[int | None, _or_none(_WHOLE_FROM_1, "to evaluate nothing"), Option(least=1)] = None
    early_stop: Annotated[int | None, _or_none(_WHOLE_FROM_1, "for no early stop"), Option(least=1)] = None
    processes: Annotated[int, _WHOLE_FROM_1, Option(least=1)] = 1
    backend: Annotated[Backend, Option()] = "auto"
    beta: InitVar[float | None] = None
    kl_penalty: InitVar[float | None] = None
    clip_range: InitVar[float | tuple[float, float] | None] = None

    def __post_init__(
        self, beta: float | None, kl_penalty: float | None, clip_range: float | tuple[float, float] | None
    ) -> None:
        """Raises `ConfigError` for an impossible value, with the field, the value and what to write instead."""
        # Words of other trainers. They only set fields of the loss, so that each setting has one place to be read from.
        if beta is not None and kl_penalty is not None:
            raise ConfigError(f"beta={beta!r} and kl_penalty={kl_penalty!r} say the same; leave one of them out")
        low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
        given = {"kl_coefficient": kl_penalty if beta is None else beta, "clip_low": low, "clip_high": high}
        if said := {name: value for name, value in given.items() if value is not None}:
            object.__setattr__(self, "loss", replace(self.loss, **said))  # the dataclass is frozen
        # The file of JSON in which an update is kept has lists; and the letters of a single name are no names.
        models = (self.imitate_models,) if isinstance(self.imitate_models, str) else tuple(self.imitate_models)
        object.__setattr__(self, "imitate_models", models)
        for name, known in _CHOICES.items():
            limits.require_one_of(name, getattr(self, name), get_args(known))
        for name, value, limit in limits.limits_of(self):
            if not limit.allows(value):
                raise ConfigError(f"{name}={value!r} must be {limit.words}")
        if self.early_stop is not None and self.eval_steps is None:
            raise ConfigError(f"early_stop={self.early_stop!r} counts evaluations and there are none; give eval_steps")
        if self.base_bits != 16 and self.backend == "unsloth":
            raise ConfigError(f"base_bits={self.base_bits} is for the backend peft; leave backend or base_bits out")
        if self.gradient_accumulation_steps != 1 and self.batch_size is None:
            raise ConfigError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps!r} counts batches and there is no "
                f"batch_size: minibatches={self.minibatches} says how many steps there are already; give batch_size, "
                "or lower minibatches for larger steps"
            )

    def may_imitate(self, model: str) -> bool:
        """Returns whether answers of the provider's `model`, as the app requests it, may be trained on."""
        return any(fnmatchcase(model, name) for name in self.imitate_models)


def require_permission(config: TrainConfig) -> None:
    """Raises `ConfigError` if answers are to be imitated and no model is named whose answers may be."""
    if config.imitate_from is not None and not config.imitate_models:
        raise ConfigError(
            f"imitate_from={config.imitate_from} trains on the provider's answers, which the terms of many providers "
            "forbid; if yours allow it, name the models with --imitate-models gpt-x,qwen* (ART_PATCH_IMITATE_MODELS; "
            "imitate_models of TrainConfig), or write none to imitate corrections alone"
        )


def require_packages() -> None:
    """Raises `ConfigError` if a package that training needs is not installed; imports none of them."""
    packages = ("numpy", "peft", "safetensors", "torch", "transformers")
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(
            f'an update needs {", ".join(missing)}, not installed here; run: pip install "art-patch[train]"'
        )


def require_evaluation(config: TrainConfig, groups: Sequence[object]) -> None:
    """Raises `ConfigError` if `eval_steps` is set without evaluation `groups`, or groups are given without it."""
    if config.eval_steps is not None and not groups:
        raise ConfigError(
            f"eval_steps={config.eval_steps}, but there is nothing to evaluate on; give eval_groups, which are not "
            "learned from, or leave eval_steps out"
        )
    if config.eval_steps is None and groups:
        raise ConfigError(
            "eval_groups are given, but eval_steps does not say when to evaluate on them; give it to TrainConfig"
        )
