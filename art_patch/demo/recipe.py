"""The demo's numbers: how much traffic a cycle sees, and how it is learned from."""

from __future__ import annotations

from dataclasses import replace

from art_patch.gate import GateConfig
from art_patch.grouping import ResampleConfig
from art_patch.pipeline import CycleConfig
from art_patch.training import TrainConfig

SCENARIOS = 120
"""Questions a cycle, of which about a fifth is held out for the gate."""

ROLLOUTS = 8
"""How often each is asked."""

EVALUATION_TASKS = 155
"""Questions that traffic never asks."""

EVALUATION_SAMPLES = 4
"""How often each of them is asked for the sampled success, before and after."""

CURVE_SAMPLES = 2
"""The same between cycles, where a rougher metric is enough."""

CYCLES = 4

CYCLE = CycleConfig(
    settle_s=1.0,
    min_group_size=4,
    max_group_size=16,
    holdout_share=0.25,
    min_groups=8,
    train=TrainConfig(learning_rate=1e-3, epochs=3, minibatches=16, warmup_steps=5, lora_rank=8, lora_alpha=16),
    gate=GateConfig(min_scenarios=8, max_scenarios=64, turns_per_scenario=6, samples=24),
)

SINGLE_SHOT = replace(
    CYCLE,
    min_group_size=1_000_000,  # what happens to be asked twice is no group here: every sibling is a re-sampled one
    resample=ResampleConfig(samples=7, turns=2, max_turns=400, concurrency=8),
)
"""The same for traffic in which every question is asked once."""

QUESTIONS = 120
"""Questions a cycle of that traffic."""
