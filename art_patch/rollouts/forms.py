"""OpenPipe ART's arguments and settings in our words: of `train`, of `_config`, `_internal_config` and the SFT helpers.

A setting that means the same here is translated. One that can have no meaning here raises a `ConfigError` with what to
write instead, unless its value is the one that changes nothing. None is ignored.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, cast

from openai.types.chat.chat_completion import Choice

from art_patch._lib.own_environment import gpus
from art_patch.errors import ConfigError
from art_patch.rollouts.trajectory import Trajectory
from art_patch.rollouts.trajectory_group import SCENARIO, TrajectoryGroup
from art_patch.training import LossConfig, TrainConfig
from art_patch.trajectories import canonical


class TrainSettings(TypedDict, total=False):
    """What `train` takes by name beside the fields of `TrainConfig`: OpenPipe ART's arguments of `backend.train`."""

    learning_rate: float
    loss_fn: Literal["cispo", "ppo"]
    normalize_advantages: bool
    scale_rewards: bool
    kl_penalty_coef: float
    epsilon: float | None
    epsilon_high: float | None
    importance_sampling_level: Literal["token", "sequence"]
    max_negative_advantage_importance_sampling_weight: float | None
    truncated_importance_sampling: float | None
    precalculate_logprobs: bool
    packed_sequence_length: int | None
    grad_accumulation_sequences: int | None


# Name -> the values that change nothing, and what to write in place of another one.
_ABSENT: dict[str, tuple[tuple[Any, ...], str]] = {
    "loss_fn_config": ((None,), "choose a loss with TrainConfig(loss=art.LossConfig(...))"),
    "adam_params": ((None,), "TrainConfig has learning_rate, weight_decay and max_grad_norm"),
    "kl_penalty_reference_step": ((None,), "write reference='base' or reference='champion'"),
    "kl_ref_adapter_path": ((None,), "write reference='base' or reference='champion'"),
    "advantage_balance": ((0, None), "good and bad trajectories weigh the same here"),
    "mask_prob_ratio": ((False,), "LossConfig(off_policy_nats=...) leaves out what is far off the policy"),
    "kimi_k2_tau": ((None,), "choose a loss with TrainConfig(loss=art.LossConfig(...))"),
    "allow_training_without_logprobs": ((False,), "ask through model.openai_client(), whose choices have tokens"),
    "plot_tensors": ((False,), "`art-patch report` shows what an update did"),
    "scale_learning_rate_by_reward_std_dev": ((False,), "advantage_scale='batch', the default, weighs groups alike"),
    "num_trajectories_learning_rate_multiplier_power": ((0, None), "set the learning rate itself"),
    "save_checkpoint": ((True,), "the server loads each step's files; model.delete_checkpoints() deletes them"),
    "moe_routing_replay_bundle": ((None,), "routers are not trained here"),
    "moe_routing_replay_path": ((None,), "routers are not trained here"),
    "moe_routing_replay_strict": ((True, False, None), "routers are not trained here"),
}
# Two names for one thing: whoever gives both would have one of them ignored.
_SAME = (
    ("loss_fn", "ppo"), ("loss_fn", "loss"), ("ppo", "loss"), ("packed_sequence_length", "micro_batch_tokens"),
    ("normalize_advantages", "advantage_scale"), ("scale_rewards", "advantage_scale"), ("epsilon", "clip_range"),
    ("epsilon_high", "clip_range"), ("kl_penalty_coef", "beta"), ("kl_penalty_coef", "kl_penalty"),
)  # fmt: skip
_LEVELS = ("token", "sequence")
_FIELDS = frozenset(each.name for each in fields(TrainConfig)) | {"beta", "kl_penalty", "clip_range"}


# Fields of OpenPipe ART's models that cannot mean anything here, and what to write instead.
_OF_MODELS = {
    "base_path": "give the directory to LocalBackend(path=...)",
    "entity": "set WANDB_ENTITY for `art-patch send wandb`",
    "id": "the project and the name say which model it is",
    "run_id": "the project and the name say which model it is",
    "run_name": "give it to `art-patch send wandb` or `art-patch send mlflow`",
    "report_metrics": "run `art-patch send wandb` beside the script, or `mlflow`; history.jsonl has all metrics",
}


def model_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model without those of OpenPipe ART's that say nothing; `ConfigError` if one does."""
    for name in _OF_MODELS.keys() & given.keys():
        if given[name] is not None:
            raise ConfigError(f"{name} of a model has no meaning here: {_OF_MODELS[name]}; leave it out")
    return {name: value for name, value in given.items() if name not in _OF_MODELS}


def train_config(given: Mapping[str, Any], config: TrainConfig | None = None) -> TrainConfig:
    """Return `config` with the settings in `given`, which have OpenPipe ART's names or those of `TrainConfig`.

    Raises `ConfigError` for a setting that has no meaning here.
    """
    left = dict(given)
    for one, other in _SAME:
        if left.get(one) is not None and left.get(other) is not None:
            raise ConfigError(f"{one} and {other} say the same; leave one of them out")
    for name in ("ppo", "normalize_advantages", "scale_rewards"):
        if not isinstance(left.get(name), bool | None):
            raise ConfigError(f"{name}={left[name]!r} must be True or False")
    for name in _ABSENT.keys() & left.keys():
        harmless, instead = _ABSENT[name]
        if not any(value is left[name] or value == left[name] for value in harmless):
            raise ConfigError(f"{name}={left[name]!r} has no meaning here: {instead}; leave it out")
        del left[name]
    if left.pop("logprob_calculation_chunk_size", None) is not None:
        _warn_of_memory("logprob_calculation_chunk_size")
    # Log-probabilities are computed before the first step in any case, which is what True asks for.
    left.pop("precalculate_logprobs", None)
    loss = (config or TrainConfig()).loss
    changes: dict[str, Any] = {"loss": _loss(left, left.pop("loss", loss))}
    if left.pop("normalize_advantages", True) is False or left.get("scale_rewards") is False:
        changes["advantage_scale"] = "none"
    elif left.get("scale_rewards"):
        changes["advantage_scale"] = "group"
    left.pop("scale_rewards", None)
    if (length := left.pop("packed_sequence_length", None)) is not None:
        changes["micro_batch_tokens"] = length
    if (sequences := left.pop("grad_accumulation_sequences", None)) is not None:
        raise ConfigError(
            f"grad_accumulation_sequences={sequences} counts trajectories, and a step here learns whole groups: write "
            "batch_size, the number of groups in a step"
        )
    if unknown := sorted(left.keys() - _FIELDS):
        raise ConfigError(f"train takes no {', '.join(unknown)}; it takes the fields of TrainConfig: see its docstring")
    return replace(config or TrainConfig(), **changes, **left)


def _loss(left: dict[str, Any], loss: Any) -> LossConfig:
    """Take what is about the loss out of `left`, and return the loss with it."""
    if not isinstance(loss, LossConfig):
        raise ConfigError(f"loss={loss!r} is no art.LossConfig; write, for example, loss=art.LossConfig('gspo')")
    ppo = left.pop("ppo", None)
    name = left.pop("loss_fn", None) or {True: "ppo", False: "cispo", None: None}[ppo]
    if name not in (None, "cispo", "ppo"):
        raise ConfigError(f"loss_fn={name!r} is unknown; write cispo or ppo, or loss=art.LossConfig(...)")
    low, high = left.pop("epsilon", None), left.pop("epsilon_high", None)
    changes: dict[str, Any] = {}
    if name == "cispo":
        loss = LossConfig("cispo", kl_coefficient=loss.kl_coefficient)
    elif name == "ppo":  # means over tokens, as in ART, and its clip
        loss = LossConfig("dapo", kl_coefficient=loss.kl_coefficient)
        low = 0.2 if low is None else low
    if loss.loss.surrogate == "cap":
        if low not in (None, 1.0):
            raise ConfigError(f"epsilon={low} has no meaning here: {loss.name} bounds the ratio from above alone")
        changes = {} if high is None else {"ratio_cap": 1 + high}
    elif low is not None or high is not None:
        changes = {"clip_low": low, "clip_high": low if high is None else high}
    level = left.pop("importance_sampling_level", None)
    if level is not None:
        if level not in _LEVELS:
            raise ConfigError(f"importance_sampling_level={level!r} has no meaning here; write token or sequence")
        changes["level"] = level
    renamed = {
        "max_negative_advantage_importance_sampling_weight": "clip_max",
        "truncated_importance_sampling": "importance_cap",
        "kl_penalty_coef": "kl_coefficient",  # ART lowers advantages by it; here it weighs a term of the loss
    }
    for theirs, ours in renamed.items():
        if (value := left.pop(theirs, None)) is not None:
            changes[ours] = value
    return replace(loss, **changes)


def _warn_of_memory(name: str) -> None:
    words = "bounds the memory of OpenPipe ART's trainer and is not used; here TrainConfig(micro_batch_tokens=...) does"
    warnings.warn(f"{name} {words}", stacklevel=4)


@dataclass(frozen=True, slots=True)
class InternalConfig:
    """Options of `art-patch serve` and fields of `TrainConfig`, from `_internal_config` and `_openai_client_config`."""

    serve: dict[str, Any] = field(default_factory=dict[str, Any])
    train: dict[str, Any] = field(default_factory=dict[str, Any])

    def over(self, config: TrainConfig | None) -> TrainConfig:
        """Return the config with these fields of `TrainConfig`; where `config` says something of its own, it wins."""
        default = TrainConfig()
        own: Any = default if config is None else config  # scripts give what they like
        if not isinstance(own, TrainConfig):
            raise ConfigError(f"config={own!r} is no art.TrainConfig; single settings are arguments of their own")
        return replace(own, **{n: value for n, value in self.train.items() if getattr(own, n) == getattr(default, n)})


def _same(value: Any) -> Any:
    return getattr(value, "value", value)  # ART's names of schedules are members of an enumeration


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value  # else TrainConfig refuses it


# Section, name -> (`serve` or `train`, our name, what makes our value of theirs). A name may have several.
_INTERNAL: dict[tuple[str, str], tuple[tuple[str, str, Callable[[Any], Any]], ...]] = {
    ("engine_args", "max_model_len"): (("serve", "max_model_len", _same),),
    ("engine_args", "max_lora_rank"): (("serve", "max_lora_rank", _same),),
    ("engine_args", "gpu_memory_utilization"): (("serve", "gpu_memory_utilization", _same),),
    ("engine_args", "tensor_parallel_size"): (("serve", "tensor_parallel_size", _same),),
    ("engine_args", "dtype"): (("serve", "dtype", _same),),
    ("server_args", "tool_call_parser"): (("serve", "tool_parser", _same),),
    ("init_args", "max_seq_length"): (("serve", "max_model_len", _same), ("train", "max_tokens", _same)),
    ("init_args", "gpu_memory_utilization"): (("serve", "gpu_memory_utilization", _same),),
    ("init_args", "max_lora_rank"): (("serve", "max_lora_rank", _same),),
    ("init_args", "load_in_4bit"): (("train", "base_bits", lambda _: 4),),
    ("init_args", "load_in_8bit"): (("train", "base_bits", lambda _: 8),),
    ("init_args", "dtype"): (("train", "dtype", lambda value: value or "auto"),),
    ("init_args", "random_state"): (("train", "seed", _same),),
    ("init_args", "use_gradient_checkpointing"): (("train", "gradient_checkpointing", bool),),
    ("peft_args", "r"): (("train", "lora_rank", _same),),
    ("peft_args", "lora_alpha"): (("train", "lora_alpha", _same),),
    ("peft_args", "lora_dropout"): (("train", "lora_dropout", _same),),
    ("peft_args", "random_state"): (("train", "seed", _same),),
    ("peft_args", "use_gradient_checkpointing"): (("train", "gradient_checkpointing", bool),),
    ("trainer_args", "learning_rate"): (("train", "learning_rate", _same),),
    ("trainer_args", "weight_decay"): (("train", "weight_decay", _same),),
    ("trainer_args", "max_grad_norm"): (("train", "max_grad_norm", _same),),
    ("trainer_args", "warmup_steps"): (("train", "warmup_steps", _same),),
    ("trainer_args", "lr_scheduler_type"): (("train", "lr_schedule", _same),),
    ("trainer_args", "num_train_epochs"): (("train", "epochs", _whole),),
    ("trainer_args", "max_steps"): (("train", "total_steps", _same),),
    ("trainer_args", "save_steps"): (("train", "save_steps", _same),),
    ("trainer_args", "gradient_checkpointing"): (("train", "gradient_checkpointing", bool),),
    ("trainer_args", "seed"): (("train", "seed", _same),),
    ("trainer_args", "beta"): (("train", "beta", _same),),
}
# Values that change nothing: what is done here in any case.
_INTERNAL_HARMLESS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("engine_args", "enable_lora"): (True,),
    ("engine_args", "enable_prefix_caching"): (True, None),
    ("engine_args", "enable_sleep_mode"): (False,),
    ("server_args", "enable_auto_tool_choice"): (True, None),
    ("init_args", "load_in_4bit"): (False,),
    ("init_args", "load_in_8bit"): (False,),
    ("init_args", "load_in_16bit"): (True, False),
    ("init_args", "full_finetuning"): (False,),
    ("init_args", "trust_remote_code"): (False,),
    ("trainer_args", "max_steps"): (-1,),
    ("peft_args", "bias"): ("none",),
    ("peft_args", "use_rslora"): (False,),
    ("peft_args", "modules_to_save"): (None,),
}
# Of vLLM: they change its speed or memory and not what it answers, so a script runs without them.
_ONLY_SPEED = frozenset({
    "block_size", "disable_custom_all_reduce", "disable_log_requests", "disable_log_stats", "enable_chunked_prefill",
    "enforce_eager", "max_num_batched_tokens", "max_num_seqs", "max_seq_len_to_capture", "num_scheduler_steps",
    "preemption_mode", "swap_space",
})  # fmt: skip
_SECTIONS = ("engine_args", "server_args", "init_args", "peft_args", "trainer_args")


def internal_config(*given: Mapping[str, Any] | None) -> InternalConfig:
    """Translate ART's `_internal_config` and `_openai_client_config`; `ConfigError` for what has no meaning here."""
    found = InternalConfig()
    for config in given:
        for section, values in _mapping("ART's internal config", config).items():
            if values is None:
                continue
            if section not in _SECTIONS:
                raise ConfigError(
                    f"{section}={values!r} of ART's internal config has no meaning here; what the server and an update "
                    "can be told are the arguments of LocalBackend and the fields of TrainConfig"
                )
            for name, value in _mapping(section, values).items():
                if value is None or value in _INTERNAL_HARMLESS.get((section, name), ()):
                    continue
                if section == "engine_args" and name in _ONLY_SPEED:
                    words = "changes the speed or memory of OpenPipe ART's engine and is not used; leave it out"
                    warnings.warn(f"{name}={value!r} {words}", stacklevel=2)
                    continue
                if name == "gpu_memory_utilization" and not gpus():
                    warnings.warn(f"{name}={value!r} is not used: there is no GPU here", stacklevel=2)
                    continue
                if (places := _INTERNAL.get((section, name))) is None:
                    raise ConfigError(
                        f"{section}: {name}={value!r} has no meaning here; leave it out. What the server and an update "
                        "can be told are the arguments of LocalBackend and the fields of TrainConfig"
                    )
                for where, ours, made in places:
                    if where == "train" and found.train.get(ours, made(value)) != made(value):
                        raise ConfigError(
                            f"{section}: {name}={value!r} sets {ours}, which is {found.train[ours]!r} already"
                        )
                    getattr(found, where)[ours] = made(value)
    if (beta := found.train.pop("beta", None)) is not None:
        found.train["loss"] = LossConfig(kl_coefficient=beta)
    found.over(None)  # a value that no update can have is told before the first rollout
    return found


def _mapping(what: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"{what} is {given!r}, and must be a dictionary")
    return cast("Mapping[str, Any]", given or {})


def rollouts_in(given: Any) -> list[TrajectoryGroup | Trajectory | BaseException]:
    """Return what a script gave as rollouts, as a list; one group or trajectory by itself is a list of one.

    Raises `ConfigError` for anything else, such as rollouts that have not run.
    """
    found: list[Any] = [given] if isinstance(given, TrajectoryGroup | Trajectory | BaseException) else list(given or ())
    for each in found:
        if not isinstance(each, TrajectoryGroup | Trajectory | BaseException):
            waits = "; await art.gather_trajectory_groups(...) first" if isinstance(each, Awaitable) else ""
            raise ConfigError(f"a {type(each).__name__} is neither a Trajectory nor a TrajectoryGroup{waits}")
    return found


def as_groups(given: Iterable[TrajectoryGroup | Trajectory | BaseException]) -> list[TrajectoryGroup]:
    """Return the groups; trajectories among them are put into groups of the same scenario, or of the same task.

    The scenario is the metadata `scenario_id`; without it, the messages before the first answer are the task.
    Exceptions, of rollouts that raised, come into a group of their own and count in the metric `exception_rate`.
    """
    groups: list[TrajectoryGroup] = []
    alone: dict[bytes, list[Trajectory]] = {}
    raised: list[BaseException] = []
    for each in rollouts_in(given):
        if isinstance(each, TrajectoryGroup):
            groups.append(each)
            continue
        if isinstance(each, BaseException):
            raised.append(each)
            continue
        items = each.messages_and_choices
        first = next((at for at, item in enumerate(items) if isinstance(item, Choice)), len(items))
        task = each.metadata.get(SCENARIO, [dict(message) for message in each.messages()[:first]])
        alone.setdefault(canonical({"task": task}), []).append(each)
    failed = [TrajectoryGroup(exceptions=raised)] if raised else []
    return [*groups, *(TrajectoryGroup(siblings) for siblings in alone.values()), *failed]
