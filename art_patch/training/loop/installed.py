"""Whether what an update imports is installed. Asked before anything is paid; imports none of it."""

from __future__ import annotations

from importlib.util import find_spec

from art_patch.errors import ConfigError

_PACKAGES = ("numpy", "peft", "safetensors", "torch", "transformers")


def require_packages() -> None:
    """Refuse an environment that cannot train.

    Raises:
        ConfigError: something is missing.
    """
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise ConfigError(
            f'an update needs {", ".join(missing)}, not installed here; run: pip install "art-patch[train]"'
        )
