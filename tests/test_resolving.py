"""Every extra of pyproject.toml can be installed, alone and with all others, at its oldest and its newest versions.

uv chooses the versions from the registry's metadata; nothing is installed.
"""

from __future__ import annotations

import pytest

from tests.support.apps import FULL
from tests.support.environments import extras, resolve

pytestmark = pytest.mark.slow

ENDS = [("lowest-direct", "3.11"), ("highest", "3.11"), ("highest", "3.13")]
QUICK = ("train", "web")
"""Also without ART_PATCH_FULL: two extras, a second each."""


def combinations() -> list[tuple[str, ...]]:
    return [*((name,) for name in extras()), tuple(extras())]


@pytest.mark.parametrize(("resolution", "python"), ENDS)
@pytest.mark.parametrize("wanted", combinations(), ids=lambda names: names[0] if len(names) == 1 else "all")
def test_an_extra_resolves(wanted: tuple[str, ...], resolution: str, python: str):
    if not FULL and wanted[0:2] not in [(name,) for name in QUICK]:
        pytest.skip("ART_PATCH_FULL=1 resolves all extras")
    versions, why_not = resolve(wanted, resolution, python)
    if not versions and ("client error" in why_not or "Failed to fetch" in why_not):
        pytest.skip("no package registry can be reached")
    assert versions, why_not
