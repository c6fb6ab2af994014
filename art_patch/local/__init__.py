"""`from art_patch.local import LocalBackend`, where OpenPipe ART has it."""

from __future__ import annotations

from art_patch.rollouts import LocalBackend

__all__ = ["LocalBackend"]
