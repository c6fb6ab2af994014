"""Makes `from art_patch.local import LocalBackend` work, as OpenPipe ART has this class in `art.local`."""

from art_patch.rollouts import LocalBackend

__all__ = ["LocalBackend"]
