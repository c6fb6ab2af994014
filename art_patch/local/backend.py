"""`from art_patch.local.backend import LocalBackend`, where OpenPipe ART's older scripts look for it."""

from __future__ import annotations

from art_patch.rollouts import LocalBackend

__all__ = ["LocalBackend"]
