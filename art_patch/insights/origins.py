"""Which settings are in force, and where each comes from: `art-patch config`, and a page of `art-patch web`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from art_patch import doctor, types
from art_patch.settings import Settings, variable_of


def settings_in_force(
    settings: Settings,
    arguments: Collection[str],
    variables: Mapping[str, str],
    *,
    env_file: Collection[str] = (),
    mode: types.Mode | None = None,
) -> dict[str, dict[str, Any]]:
    """Return each setting with its `value` and `source`; of one that holds a key or a password, that it is set.

    `arguments` are the settings given on the command line, `env_file` the variables that an env file set, and `mode`
    the mode in the store, which takes precedence.
    """
    found = doctor.sources(settings, arguments, variables)
    of_file = {name.upper() for name in env_file}
    for name, one in found.items():
        if one["source"] == "environment" and variable_of(name) in of_file:
            one["source"] = "env file"
    if mode is not None:
        found["mode"] = {"value": mode, "source": "store"}
    return found
