"""Calls without an SDK, which take their identity as the patch does; and the patch itself, for real streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import context as otel

from art_patch._lib.faults import faults
from art_patch.context import current_trajectory
from art_patch.patching import unpatch
from tests.support.recordings import Patched, Recording
from tests.support.servers import no_certificates, serving


@pytest.fixture
def seen() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.end()


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = otel.get_current()
    yield
    assert otel.get_current() is before
    assert current_trajectory() is None


@pytest.fixture
def patched(tmp_path: Path) -> Iterator[Patched]:
    faults.clear()
    with no_certificates(tmp_path), serving() as upstream:
        yield Patched(upstream)
        unpatch()
    assert faults.counts == {}
