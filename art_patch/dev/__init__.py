"""OpenPipe ART's `art.dev`: dictionaries of settings for its engine and trainer, which `TrainableModel` translates.

A key that has no meaning here raises a `ConfigError` where the dictionary is used, with what to write instead; see
`art_patch.rollouts.forms`.
"""

from typing import Any


class EngineArgs(dict[str, Any]):
    """Settings of vLLM: `max_model_len`, `gpu_memory_utilization`, `tensor_parallel_size`, `max_lora_rank`, `dtype`."""


class ServerArgs(dict[str, Any]):
    """Settings of vLLM's server: `tool_call_parser`."""


class InitArgs(dict[str, Any]):
    """How the base is loaded for an update: `max_seq_length`, `load_in_4bit`, `load_in_8bit`, `random_state`, ..."""


class PeftArgs(dict[str, Any]):
    """A new LoRA: `r`, `lora_alpha`, `lora_dropout`, `random_state`, `use_gradient_checkpointing`."""


class TrainerArgs(dict[str, Any]):
    """Settings of an update: `learning_rate`, `num_train_epochs`, `warmup_steps`, `weight_decay`, `beta`, ..."""


class TrainConfig(dict[str, Any]):
    """Settings of one update in `model.train(_config=...)`: `epsilon`, `scale_rewards`, `ppo`, ..."""


class InternalModelConfig(dict[str, Any]):
    """The dictionaries `engine_args`, `init_args`, `peft_args` and `trainer_args` of `TrainableModel`."""


class OpenAIServerConfig(dict[str, Any]):
    """The dictionaries `engine_args` and `server_args` of `model.register(_openai_client_config=...)`."""


__all__ = [
    "EngineArgs", "InitArgs", "InternalModelConfig", "OpenAIServerConfig", "PeftArgs", "ServerArgs", "TrainConfig",
    "TrainerArgs",
]
