"""Makes `from art_patch.backends import LocalBackend` work, as older scripts for OpenPipe ART import it."""

from art_patch.rollouts import Backend, LocalBackend

__all__ = ["Backend", "LocalBackend"]
