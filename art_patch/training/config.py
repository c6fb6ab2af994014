"""Settings of an update."""

from __future__ import annotations

from dataclasses import dataclass, fields

from art_patch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How one update is made.

    Attributes:
        learning_rate: of AdamW at its peak.
        epochs: passes over the recorded groups; more than two drift far from the policy that sampled them.
        minibatches: optimizer steps an epoch.
        warmup_steps: optimizer steps over which the learning rate rises from zero.
        lora_rank: rank of a new LoRA; a LoRA that is continued keeps its own.
        lora_alpha: scale of a new LoRA.
        clip_low: how far below 1 a token's probability ratio still moves it.
        clip_high: how far above 1 (DAPO's clip-higher, https://arxiv.org/abs/2503.14476).
        max_grad_norm: gradients are scaled down to this norm.
        max_staleness: trajectories of policies more than this many steps behind the champion are not trained on.
        micro_batch_tokens: tokens (padding included) forwarded at once; bounds memory, changes no result.
        max_tokens: longer rows are cut at the end, after the baseline was taken with them in the group.
        seed: of the minibatch order.
    """

    learning_rate: float = 1e-4
    epochs: int = 2
    minibatches: int = 8
    warmup_steps: int = 5
    lora_rank: int = 8
    lora_alpha: int = 16
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    max_staleness: int = 2
    micro_batch_tokens: int = 16_384
    max_tokens: int = 32_768
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: naming the field.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("warmup_steps", "max_staleness", "seed") else None
            if (least is None and not value > 0) or (least is not None and value < least):
                raise ConfigError(f"{field.name}={value!r} must be {'above' if least is None else 'at least'} 0")
