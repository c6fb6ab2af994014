"""Makes `from art_patch.environment import Environment` work, as older guides import it."""

from art_patch.rollouts import Environment

__all__ = ["Environment"]
