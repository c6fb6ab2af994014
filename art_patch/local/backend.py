"""Makes `from art_patch.local.backend import LocalBackend` work, as older scripts of OpenPipe ART use this path."""

from art_patch.rollouts import LocalBackend

__all__ = ["LocalBackend"]
