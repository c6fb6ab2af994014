"""When a candidate wins: every number of the gate, with what it means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from art_patch.errors import ConfigError
from art_patch.gate.turns import Turn

_SHARES = ("max_unscored", "max_worse", "max_user_share")
_COUNTS = ("min_scenarios", "max_scenarios", "turns_per_scenario", "samples", "run_samples")


@dataclass(frozen=True, slots=True)
class CollapseConfig:
    """How far a candidate's answers may leave the champion's, whatever they score (`collapse`).

    Attributes:
        max_length_ratio: neither may write more than so many times as much as the other.
        max_same: the chance that answers to two different scenarios are the same may always be this large.
        max_same_rise: beyond that it may be so much larger than the champion's.
        max_entropy_rise_nats: how much less sure of its tokens it may be, a token.
        max_kl_nats: how far training may have moved it from where its rows came from, a token; training itself ends
            at `TrainConfig.max_kl_nats`, this is for what got past.
        max_latency_ratio: its median answer may take so many times as long.
    """

    max_length_ratio: float = 4.0
    max_same: float = 0.5
    max_same_rise: float = 0.25
    max_entropy_rise_nats: float = 1.0
    max_kl_nats: float = 2.0
    max_latency_ratio: float = 2.0


@dataclass(frozen=True, slots=True)
class GateConfig:
    """When a candidate wins.

    Attributes:
        min_scenarios: fewer held-out scenarios than this reject.
        max_scenarios: at most this many are asked.
        turns_per_scenario: at most this many turns of each.
        samples: answers of each policy to each turn.
        run_samples: whole runs of each policy of a scenario whose runs can be repeated. The scenario is the unit, so of
            the same budget more scenarios say more than more runs of each.
        orders: how often the judge sees each turn: 2 shows it the answers in the reverse order, too, so that what it
            gives for standing first or last cancels out. Judging then costs twice as much.
        level: confidence of the one-sided lower bound; an equal candidate is promoted at most as often as 1 - level.
        margin: the lower bound must lie above it.
        max_unscored: a larger share of turns that the judge could not score rejects, and so does a larger share of
            answers that a user's check failed on.
        max_worse: how much worse the candidate may at most be, with confidence, in what it must not lose: judge's
            scores on the suite, user's checks (on a scale of 0 to 1), shares of answers that are empty, refused,
            malformed, cut off or repeat themselves.
        new_user_s: runs of users first seen this lately are not asked, so that nobody can come and steer a promotion.
            Runs without a user are, and so is everybody who came in the project's own first so many seconds.
        max_user_share: of the scenarios, what may be one user's alone, where four users or more are known; never less
            than twice an equal share.
        suite: prompts that are always asked (`suite.read_suite`).
        collapse: how far the answers may change; `None` leaves all checks of `collapse` out.

    Raises:
        ConfigError: a number is out of its range.
    """

    min_scenarios: int = 8
    max_scenarios: int = 64
    turns_per_scenario: int = 2
    samples: int = 4
    run_samples: int = 2
    orders: Literal[1, 2] = 2
    level: float = 0.95
    margin: float = 0.0
    max_unscored: float = 0.1
    max_worse: float = 0.1
    new_user_s: float = 86_400.0
    max_user_share: float = 0.25
    suite: tuple[Turn, ...] = ()
    collapse: CollapseConfig | None = field(default_factory=CollapseConfig)

    def __post_init__(self) -> None:
        """Refuse what would promote anything, or nothing."""
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
