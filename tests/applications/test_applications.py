"""Applications of others behave as before under the patch; see `tests/applications/run.py`."""

from __future__ import annotations

import os

import pytest

from tests.applications.catalog import APPLICATIONS, Application
from tests.applications.run import judge

FULL = bool(os.environ.get("ART_PATCH_FULL"))
SMOKE = ("llm with a tool", "llm with Claude")
"""Small ones: one is recorded, the other goes past the SDK."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800 if FULL else 400)]


@pytest.mark.parametrize("application", APPLICATIONS, ids=lambda application: application.name)
def test_an_application_behaves_as_before_and_each_call_is_recorded_or_told(application: Application):
    if not FULL and application.name not in SMOKE:
        pytest.skip("installs an application; ART_PATCH_FULL=1 runs it")
    verdict = judge(application, runs=3 if FULL else 1)
    assert (verdict.problems, verdict.calls > 0) == ([], True)
