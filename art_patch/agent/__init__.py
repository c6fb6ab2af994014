"""Makes `from art_patch.agent import Agent` work, as older guides import it."""

from art_patch.rollouts import Agent

__all__ = ["Agent"]
