"""A project of its own for each test, over a real engine; and a real judge whose opinion is a rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge
from art_patch.rewards import Judge
from art_patch.serving import EmbeddedEngine
from art_patch.store import Store, open_store
from tests.support.cycles import Place, is_short
from tests.support.engines import serve
from tests.support.ruled_gate import COUNT, traffic


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with serve_stand_in_judge(is_short) as url:
        yield Judge(STAND_IN_MODEL, base_url=url, api_key="none")


@pytest.fixture
def place(tmp_path: Path, base: Path) -> Iterator[Place]:
    engine = EmbeddedEngine.from_pretrained(base, adapters_root=tmp_path / "adapters")
    with serve(engine) as running:
        here = Place(tmp_path, base, running.client)
        yield here
        assert here.store.verify() == []
        here.store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with ten held-out scenarios."""
    opened = open_store(f"sqlite:///{tmp_path}/store.db")
    for n in range(COUNT):
        traffic(opened, n)
    yield opened
    opened.close()
