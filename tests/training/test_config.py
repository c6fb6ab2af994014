"""What cannot be is refused, naming the field, its value and the remedy."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from art_patch.errors import ConfigError
from art_patch.training import LossConfig, TrainConfig
from art_patch.training.loop.metrics import why_broken, why_stop


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("learning_rate", 0, "a number above 0"),
        ("learning_rate", math.nan, "a number above 0"),
        ("learning_rate", math.inf, "a number above 0"),
        ("learning_rate", "1e-4", "a number above 0"),
        ("epochs", 0, "a whole number, at least 1"),
        ("epochs", 1.5, "a whole number, at least 1"),
        ("epochs", True, "a whole number, at least 1"),
        ("minibatches", -1, "a whole number, at least 1"),
        ("batch_size", 0, "a whole number, at least 1, or None"),
        ("gradient_accumulation_steps", 0, "a whole number, at least 1"),
        ("gradient_accumulation_steps", 2, "minibatches=8 says how many steps there are already; give batch_size"),
        ("eval_steps", 1.5, "a whole number, at least 1, or None to evaluate nothing"),
        ("early_stop", 2, "counts evaluations and there are none; give eval_steps"),
        ("lr_schedule", "steps", "choose one of: constant, linear, cosine"),
        ("lora_dropout", 1.0, "at least 0 and below 1"),
        ("save_steps", 0, "a whole number, at least 1, or None to go by checkpoint_every_s"),
        ("total_steps", 0, "a whole number, at least 1, or None"),
        ("weight_decay", -0.1, "a number, at least 0"),
        ("warmup_steps", -1, "a whole number, at least 0"),
        ("seed", -1, "a whole number, at least 0"),
        ("seed", 1 << 63, "below 2^63"),
        ("processes", 0, "a whole number, at least 1"),
        ("checkpoint_every_s", -1.0, "a number, at least 0"),
        ("max_kl_nats", 0.0, "a number above 0, or None for no bound"),
        ("max_clip_fraction", 1.5, "above 0 and at most 1, or None for no bound"),
        ("prefer_from", 0.0, "a number above 0, or None"),
        ("imitate_from", math.nan, "a number, or None"),
        ("rehearse_from", math.inf, "a number, or None to rehearse nothing"),
        ("rehearse_weight", 0.0, "a number above 0"),
        ("learn_truncated", None, "True or False"),
        ("gradient_checkpointing", 1, "True, False, or None"),
        ("start", "zero", "choose one of: candidate, champion, base"),
        ("reference", None, "choose one of: base, champion"),
        ("dtype", "float16", "choose one of: auto, float32, bfloat16"),
        ("backend", "vllm", "choose one of: auto, peft, unsloth"),
        ("advantage_scale", "std", "choose one of: group, batch, none"),
    ],
)
def test_what_cannot_be_is_refused(field: str, value: Any, remedy: str):
    with pytest.raises(ConfigError) as refused:
        TrainConfig(**{field: value})
    assert str(refused.value).startswith(f"{field}={value!r} ")
    assert remedy in str(refused.value)


@pytest.mark.parametrize("field", ["max_kl_nats", "max_clip_fraction", "gradient_checkpointing", "rehearse_from"])
def test_none_is_no_bound(field: str):
    assert getattr(TrainConfig(**{field: None}), field) is None


def test_words_of_others_for_the_same_settings():
    held = TrainConfig(beta=0.1, clip_range=(0.1, 0.3))
    assert held == TrainConfig(loss=LossConfig(kl_coefficient=0.1, clip_low=0.1, clip_high=0.3))
    assert held == replace(held, seed=0) == TrainConfig(kl_penalty=0.1, clip_range=(0.1, 0.3))
    assert TrainConfig(clip_range=0.2, loss=LossConfig("grpo")).loss.settings["clip_high"] == 0.2
    assert "beta" not in asdict(held)
    with pytest.raises(ConfigError, match="say the same"):
        TrainConfig(beta=0.1, kl_penalty=0.1)
    with pytest.raises(ConfigError, match="cispo does not have it"):
        TrainConfig(clip_range=0.2, loss=LossConfig("cispo"))


FINE = {"tokens": 3, "loss": 0.1, "grad_norm": 1.0, "weight_norm": 2.0, "update_kl_nats": 0.2, "clip_fraction": 0.3}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"loss": math.nan}, "loss nan"),
        ({"grad_norm": math.inf, "weight_norm": -math.inf}, "grad_norm inf and weight_norm -inf"),
        ({"tokens": 0}, "no finite log-probability"),
    ],
)
def test_what_is_not_finite_is_named(change: dict[str, float], why: str | None):
    assert why_broken(FINE | change) == why


def test_an_update_ends_above_its_bounds_only():
    assert why_stop(FINE, TrainConfig(max_kl_nats=0.2, max_clip_fraction=0.3)) is None
    assert why_stop(FINE, TrainConfig(max_kl_nats=0.19)) == "update_kl_nats 0.2 is above max_kl_nats=0.19"
    assert why_stop(FINE, TrainConfig(max_clip_fraction=0.29)) == "clip_fraction 0.3 is above max_clip_fraction=0.29"
    assert why_stop(FINE, TrainConfig(max_kl_nats=None)) is None
    assert why_stop({"loss": 1.0}, TrainConfig(max_kl_nats=0.01)) is None  # an imitation has no behaviour policy
