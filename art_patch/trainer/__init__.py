"""Makes `from art_patch.trainer import GRPOTrainer` work, as older guides import it."""

from art_patch.rollouts import GRPOTrainer
from art_patch.training import TrainConfig

__all__ = ["GRPOTrainer", "TrainConfig"]
