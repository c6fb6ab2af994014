"""Scored groups in, a new LoRA out: advantages, rows of recorded tokens, the GRPO loss, the update.

Pure parts (`advantages`, `rows`, `loss`) know no model files; `update` loads the base, continues from the parent's
LoRA and publishes the new one. Nothing here knows the store.

Importing the package loads neither torch nor transformers.
"""

from __future__ import annotations

from art_patch.training.config import TrainConfig

__all__ = ["TrainConfig"]
