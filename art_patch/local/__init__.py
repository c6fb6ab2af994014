"""`from art_patch.local import LocalBackend`, where OpenPipe ART has it."""

from __future__ import annotations

from art_patch.explicit.backend import LocalBackend

__all__ = ["LocalBackend"]
