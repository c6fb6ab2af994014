"""The table of losses, and settings that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from art_patch.errors import ConfigError
from art_patch.training import LossConfig, TrainConfig
from art_patch.training.loss_config import LOSSES, Level

BOTH: tuple[Level, ...] = ("token", "sequence")


def test_the_table_of_losses():
    assert {
        name: (loss.surrogate, loss.aggregation, loss.levels, dict(loss.settings)) for name, loss in LOSSES.items()
    } == {
        "grpo": ("clip", "trajectory_mean", BOTH, {"clip_low": 0.2, "clip_high": 0.2, "clip_max": math.inf}),
        "dr_grpo": (
            "clip",
            "constant",
            BOTH,
            {"clip_low": 0.2, "clip_high": 0.2, "clip_max": math.inf, "max_completion_tokens": 1024},
        ),
        "dapo": ("clip", "token_mean", BOTH, {"clip_low": 0.2, "clip_high": 0.28, "clip_max": math.inf}),
        "cispo": ("cap", "token_mean", BOTH, {"ratio_cap": 5.0}),
        "gspo": ("clip", "trajectory_mean", ("sequence",), {"clip_low": 3e-4, "clip_high": 4e-4, "clip_max": math.inf}),
        "sapo": ("gate", "trajectory_mean", BOTH, {}),
        "vespo": ("gamma", "token_mean", ("token",), {}),
        "luspo": (
            "clip",
            "trajectory_sum",
            ("sequence", "token"),
            {"clip_low": 2e-3, "clip_high": 2.5e-3, "clip_max": math.inf},
        ),
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "ppo"}, "loss name='ppo' is unknown; choose one of: grpo, dr_grpo, dapo"),
        ({"kl_estimator": "k4"}, "kl_estimator='k4' is unknown; choose one of: k1, k2, k3"),
        ({"level": "word"}, r"level \(of dapo\)='word' is unknown; choose one of: token, sequence"),
        ({"name": "gspo", "level": "token"}, r"level \(of gspo\)='token' is unknown; choose one of: sequence"),
        ({"clip_low": 0.0}, "clip_low=0.0 must be above 0 and at most 1; leave it out"),
        ({"clip_low": 1.5}, "clip_low=1.5 must be above 0 and at most 1"),
        ({"clip_high": math.nan}, "clip_high=nan must be a number above 0"),
        ({"clip_high": math.inf}, "clip_high=inf must be a number above 0"),
        ({"clip_high": "0.2"}, "clip_high='0.2' must be a number above 0"),
        ({"clip_high": True}, "clip_high=True must be a number above 0"),
        ({"clip_max": 1.28}, r"clip_max=1.28 must be above 1 \+ clip_high, 1.28"),
        ({"clip_max": 0.5}, "clip_max=0.5 must be a number, at least 1"),
        ({"name": "cispo", "ratio_cap": 0.2}, "ratio_cap=0.2 must be a number, at least 1"),
        ({"ratio_cap": 5.0}, r"ratio_cap=5.0: dapo does not have it \(it has: clip_low, clip_high, clip_max\)"),
        ({"name": "cispo", "clip_high": 0.3}, r"clip_high=0.3: cispo does not have it \(it has: ratio_cap\)"),
        ({"name": "sapo", "clip_low": 0.3}, r"clip_low=0.3: sapo does not have it \(it has: none\); leave it out"),
        ({"max_completion_tokens": 512}, "max_completion_tokens=512: dapo does not have it"),
        ({"name": "dr_grpo", "max_completion_tokens": 0}, "max_completion_tokens=0 must be a number, at least 1"),
        ({"kl_coefficient": -0.1}, "kl_coefficient=-0.1 must be a number, at least 0"),
        ({"importance_cap": 0.0}, "importance_cap=0.0 must be a number, at least 1"),
        ({"off_policy_nats": 0.0}, "off_policy_nats=0.0 must be a number above 0"),
    ],
)
def test_impossible_settings_are_refused_with_field_value_and_remedy(settings: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        LossConfig(**settings)


def test_an_unknown_scale_of_advantages_is_refused():
    with pytest.raises(ConfigError, match="advantage_scale='std' is unknown; choose one of: group, batch, none"):
        TrainConfig(advantage_scale="std")  # type: ignore[arg-type]
