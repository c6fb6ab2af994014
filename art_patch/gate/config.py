"""The settings of the gate: what each number means, and what happens with another value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from art_patch.errors import ConfigError
from art_patch.gate.turns import Turn

_SHARES = ("max_unscored", "max_worse", "max_user_share")
_COUNTS = ("min_scenarios", "max_scenarios", "turns_per_scenario", "samples", "run_samples")


@dataclass(frozen=True, slots=True)
class CollapseConfig:
    """How far the candidate's answers may differ from the champion's, however high its scores are (see `collapse`)."""

    # Neither policy may write more than this many times as much as the other.
    max_length_ratio: float = 4.0
    # The probability that answers to two different scenarios are identical may always be this high, ...
    max_same: float = 0.5
    # ... and may exceed the champion's by this much.
    max_same_rise: float = 0.25
    # How much higher its entropy for each token may be, in nats.
    max_entropy_rise_nats: float = 1.0
    # KL divergence for each token from the policy that training started from, in nats. Training itself stops at
    # `TrainConfig.max_kl_nats`; this is the second net.
    max_kl_nats: float = 2.0
    # Its median answer may take this many times as long.
    max_latency_ratio: float = 2.0


@dataclass(frozen=True, slots=True)
class GateConfig:
    """The gate's settings: which prompts both policies answer, and when the candidate wins."""

    # With fewer scored held-out scenarios the candidate is rejected. The level needs some as well (`fewest`).
    min_scenarios: int = 8
    # At most this many scenarios are asked, and this many turns of each.
    max_scenarios: int = 64
    turns_per_scenario: int = 2
    # Answers of each policy to each turn.
    samples: int = 4
    # Whole runs of each policy, for scenarios whose runs can be repeated. The scenario is the unit of the test, so more
    # scenarios tell more than more runs of each.
    run_samples: int = 2
    # How often the judge sees each turn. 2 shows the answers in the reverse order, too, which cancels position bias and
    # doubles the cost of judging.
    orders: Literal[1, 2] = 2
    # Confidence of the one-sided lower bound. A candidate equal to the champion is promoted in at most 1 - level of the
    # gate runs.
    level: float = 0.95
    # The lower bound of the score difference must lie above this. Below 0, the candidate may be that much worse.
    margin: float = 0.0
    # A larger share of turns without a judge's score rejects; so does a larger share of answers on which a user's check
    # failed.
    max_unscored: float = 0.1
    # Largest loss, with confidence `level`, in every metric that must not get worse: the judge's scores on the suite,
    # user checks (scaled to 0..1), and the shares of empty, refused, malformed, cut-off and repetitive answers.
    max_worse: float = 0.1
    # Runs of users who arrived within this many seconds are not asked about, so that no newcomer can steer a promotion.
    new_user_s: float = 86_400.0
    # Largest share of the scenarios that belong to one user alone, where four users or more are known; never less than
    # twice an equal share.
    max_user_share: float = 0.25
    # Prompts that every candidate is asked (`read_suite`).
    suite: tuple[Turn, ...] = ()
    # `None` switches all checks of `collapse` off.
    collapse: CollapseConfig | None = field(default_factory=CollapseConfig)

    def __post_init__(self) -> None:
        """Refuse numbers that would promote every candidate, or none: `ConfigError`."""
        if not 0.5 <= self.level < 1:
            raise ConfigError(f"the gate's level is {self.level:g}; give a confidence from 0.5 to below 1")
        if not -1 <= self.margin < 1:
            raise ConfigError(
                f"the gate's margin is {self.margin:g}; scores lie in 0..1, so give one from -1 to below 1"
            )
        if self.orders not in (1, 2):
            raise ConfigError(f"the gate's orders are {self.orders}; there are 2, an order and its reverse, or give 1")
        for name in _SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"the gate's {name} is {getattr(self, name):g}; give a share from 0 to 1")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"the gate's {name} is {getattr(self, name)}; give 1 or more")
